"""Runs over data connections of our own: one a (P, D) pair, shared by sessions."""
