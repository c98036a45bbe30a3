"""`make bench-cores`: what two workers get of one machine's cores."""
