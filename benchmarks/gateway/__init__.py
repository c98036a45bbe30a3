"""What the gateway itself costs: a worker that talks without a model, many streaming clients, one gateway between."""
