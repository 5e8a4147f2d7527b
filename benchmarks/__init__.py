"""Benchmarks. Each prints a table and, as its last line, one JSON object; all figures of a ratio are measured in one run."""
