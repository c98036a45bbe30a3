"""The remote tier: blocks in a store that a fleet shares over the network (a Redis, an LMCache server).

A store knows names and bytes; the tier knows which blocks are there, and verifies what it reads.
"""
