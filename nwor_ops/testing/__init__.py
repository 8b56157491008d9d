"""Engines, small models and workloads, shared by the command line, the benchmarks and the tests."""
