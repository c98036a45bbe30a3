"""Runs that D reads out of P's memory through Mooncake's transfer engine."""
