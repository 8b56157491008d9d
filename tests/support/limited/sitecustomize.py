"""Imported by every Python process that a limited test run starts (see processor.py)."""

import processor

processor.apply_at_import()
