"""What eviction policies make of real traces, and the bound that knowing the future gives."""
