"""Configs from flags, environment and YAML, built in one place."""
