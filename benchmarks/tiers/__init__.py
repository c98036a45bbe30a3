"""`make bench-tiers`: what a prompt costs by where its KV lies."""
