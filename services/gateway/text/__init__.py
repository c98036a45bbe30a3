"""Text and tokens: bundles of workers, chat templates, detokenising, stop strings."""
