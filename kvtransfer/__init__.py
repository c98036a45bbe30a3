"""Blocks between memories: sessions, plans, transports.

Works on byte views that the engine hands over; knows neither models nor schedulers.
"""
