"""`make bench-split`: what a request pays for being split."""
