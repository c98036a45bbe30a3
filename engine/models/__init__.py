"""Model architectures over `kernels.ops`; they know tensors only."""
