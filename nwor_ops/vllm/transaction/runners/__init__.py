"""Attachments to vLLM's model runners, one module per generation."""
