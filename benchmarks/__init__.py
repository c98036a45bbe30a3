"""Measurements: `make bench-NAME` runs `benchmarks.NAME`. They are never tests."""
