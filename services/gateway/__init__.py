"""The OpenAI-compatible gateway: validates, tokenises, routes, detokenises, streams. Holds no KV and no torch."""
