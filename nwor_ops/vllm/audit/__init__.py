"""The audit of the transaction: it compares every byte of the KV cache at every step."""
