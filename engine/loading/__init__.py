"""Model files into memory: GGUF files, Hugging Face folders, Hub ids, and the bundle that gateways need."""
