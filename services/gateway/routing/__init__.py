"""Who runs which leg of a request."""
