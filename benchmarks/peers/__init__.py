"""Baton beside its peers on one machine: same model file, prompts, threads and KV budget, in turn."""
