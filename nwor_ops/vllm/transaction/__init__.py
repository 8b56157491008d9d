"""The transaction in vLLM: sessions, layers, shadow blocks, KV connectors and the audit."""
