"""Begin, write, commit or cancel: the protocol of a transaction, and what it counts."""
