"""Drives OpenVINO GenAI's continuous batching pipeline, asked by lines of JSON; runs in OpenVINO's own environment.

    openvino_child.py '{"model": ..., "num_threads": 2, "num_kv_tokens": ..., "properties": {...}}'

Knows nothing of the project and imports nothing of it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any, TextIO

import numpy as np
import openvino as ov  # type: ignore[import-not-found]
import openvino_genai as genai  # type: ignore[import-not-found]

BLOCK_SIZE = 32
EOS_TOKEN_ID = 2


class Driver:
    """The pipeline and the number of requests it has seen."""

    def __init__(self, settings: dict[str, Any]) -> None:
        scheduler = genai.SchedulerConfig()
        scheduler.num_kv_blocks = settings["num_kv_tokens"] // BLOCK_SIZE
        scheduler.enable_prefix_caching = True
        scheduler.max_num_seqs = settings["max_num_seqs"]
        scheduler.max_num_batched_tokens = settings["max_num_batched_tokens"]
        properties = {"INFERENCE_NUM_THREADS": settings["num_threads"], "NUM_STREAMS": 1}
        properties |= settings["properties"]
        self._pipeline = genai.ContinuousBatchingPipeline(
            settings["model"], scheduler, "CPU", properties
        )
        self._num_requests = 0

    def ask(self, prompts: list[list[int]], max_tokens: int, ignore_eos: bool) -> dict[str, Any]:
        """Greedy answers to all prompts at once, with the time at which each token was read."""
        started = time.perf_counter()
        handles = [self._add(prompt, max_tokens, ignore_eos) for prompt in prompts]
        times: list[list[float]] = [[] for _ in prompts]
        ids: list[list[int]] = [[] for _ in prompts]
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            now = time.perf_counter() - started
            for index, handle in enumerate(handles):
                while handle.can_read():
                    for output in handle.read().values():
                        ids[index] += output.generated_ids
                        times[index] += [now] * len(output.generated_ids)
        counts = [list(range(1, len(row) + 1)) for row in times]
        return {"times": times, "counts": counts, "ids": ids}

    def _add(self, prompt: list[int], max_tokens: int, ignore_eos: bool) -> Any:
        config = genai.GenerationConfig()
        config.do_sample = False
        config.max_new_tokens = max_tokens
        config.ignore_eos = ignore_eos
        if ignore_eos:
            config.min_new_tokens = max_tokens
        else:
            config.set_eos_token_id(EOS_TOKEN_ID)
        self._num_requests += 1
        ids = ov.Tensor(np.array([prompt], dtype=np.int64))
        return self._pipeline.add_request(self._num_requests, ids, config)


def main() -> None:
    """Serve until the input ends."""
    answers = _claim_stdout()
    driver = Driver(json.loads(sys.argv[1]))
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        told = driver.ask(asked["prompts"], asked["max_tokens"], asked["ignore_eos"])
        print(json.dumps(told), file=answers, flush=True)


def _claim_stdout() -> TextIO:
    """Standard output for the answers alone: what libraries print goes to the log."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


if __name__ == "__main__":
    main()
