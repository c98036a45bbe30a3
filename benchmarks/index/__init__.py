"""What the prefix index costs: a match, a publication, a snapshot, and memory a block."""
