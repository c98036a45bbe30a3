"""From logits to tokens by a counter-based rule."""
