"""KV between the device pool and the tiers below it."""
