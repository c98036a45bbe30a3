"""`make bench-transfer`: how fast runs get from one process's pool into another's."""
