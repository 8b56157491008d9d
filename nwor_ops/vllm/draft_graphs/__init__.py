"""CUDA graphs for vLLM's draft models."""
