"""Imported by every Python process of a limited test run (see processor.py)."""

import processor

processor.apply_at_import()
