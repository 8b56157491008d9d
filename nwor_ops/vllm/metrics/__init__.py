"""Counters, from the device to Prometheus."""
