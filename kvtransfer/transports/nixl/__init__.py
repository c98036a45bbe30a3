"""Runs that D reads out of P's memory through NIXL."""
