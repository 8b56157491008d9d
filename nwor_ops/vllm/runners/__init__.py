"""How each generation of vLLM's model runner is attached to."""
