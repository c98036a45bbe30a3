"""Tiers: bounded stores of whole KV blocks below the device pool, nearest first (host, disk, remote).

Knows bytes, keys and slots; neither models nor schedulers. No engine has one yet.
"""
