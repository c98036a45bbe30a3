"""The RPC front of a worker: gRPC in, engine messages out. It never maps the pool."""
