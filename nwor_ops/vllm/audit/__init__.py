"""What was promised, checked: every byte at every step (`audit`), and the scheduler's counts (`emit_metrics`)."""
