"""How runs move between two processes: one module or folder a transport, one contract for all
(`base`).
"""
