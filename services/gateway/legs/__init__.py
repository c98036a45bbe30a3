"""Driving the legs of a request once it is routed."""
