"""The engine beside Hugging Face `generate`, and the price of splitting on the same cores."""
