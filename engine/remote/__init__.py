"""The engine side of split serving: what D and P do with a session."""
