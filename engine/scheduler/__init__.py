"""One step is how many tokens for which sequence, under one token budget."""
