"""Runs that D reads out of P's memory by a transfer engine (NIXL, Mooncake), wherever P is."""
