"""The only code that speaks HTTP or gRPC: gateway, worker, cluster launcher, CLI."""
