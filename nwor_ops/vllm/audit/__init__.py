"""What was promised, checked: bytes at every step, and the counts of the scheduler."""
