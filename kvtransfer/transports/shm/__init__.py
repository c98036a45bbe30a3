"""Runs between two processes of one host: P says where they lie, D copies them out of P's pool."""
