"""Engines, small models and workloads that the command line, the benchmarks and the tests share."""
