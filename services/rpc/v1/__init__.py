"""Generated stubs of proto/services/rpc/v1; `make proto` writes them."""
