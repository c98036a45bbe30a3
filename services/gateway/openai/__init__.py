"""The OpenAI-shaped surface: what may be asked, how it is checked, how answers look."""
