"""The prefix index: which worker holds how much of a chain, in memory or in Redis behind one interface.

Holds hints and leases, never truth about KV: losing it costs cache hits, not requests.
"""
