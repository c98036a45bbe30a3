"""A scheduled step as tensors in, logits out."""
