"""The block pool of one rank: storage, free queue, references, prefix cache."""
