"""What a scheduler counts since it was built."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class SchedulerCounters:
    """Totals; they only grow.

    steps: steps that ran something.
    preemptions: sequences that lost their blocks.
    prompt_tokens: prompt tokens of requests admitted for the first time.
    computed_prompt_tokens: prompt tokens computed here, recomputed ones counted again.
    received_prompt_tokens: prompt tokens whose KV another worker sent.
    generation_tokens: tokens sampled here or taken over with received KV.
    prefix_cache_queries: tokens looked up at admission.
    prefix_cache_hits: tokens found.
    """

    steps: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    computed_prompt_tokens: int = 0
    received_prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
