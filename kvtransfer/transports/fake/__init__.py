"""A transport in memory that a test drives step by step, with faults that no socket gives on demand.

The rules are those of every transport: `intake` and `outbox` decide, this folder only carries.
"""
