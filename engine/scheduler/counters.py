"""What a scheduler counts since it was built."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class SchedulerCounters:
    """Totals; they only grow.

    steps: steps that ran something.
    preemptions: sequences that lost their blocks.
    prompt_tokens: prompt tokens of sequences that got their KV, counted once each.
    computed_prompt_tokens: prompt tokens computed here, recomputed ones counted again.
    cached_prompt_tokens: prompt tokens whose KV was found here when the sequence got its blocks, parts of blocks too.
    received_prompt_tokens: prompt tokens whose KV another worker sent.
    generation_tokens: output tokens of this engine's own requests, wherever they were sampled.
    prefix_cache_queries: tokens looked up at each admission, repeated ones included.
    prefix_cache_hits: tokens found at each admission.
    """

    steps: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    computed_prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    received_prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
