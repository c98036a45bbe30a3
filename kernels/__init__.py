"""The numeric operations: one specification in plain torch, and faster backends behind the same functions.

Imports neither triton nor anything that needs a GPU; carries no version attribute, since other libraries probe for one.
"""
