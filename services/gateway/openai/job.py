"""All generations of one HTTP request, merged: one a prompt, choices numbered over all of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from core.errors import ServeError
from services.gateway.choice import ChoiceDelta
from services.gateway.generation import Generation


class Job:
    """The deltas of a request's generations. `choice` of a delta is its index in the answer."""

    def __init__(self, generations: Sequence[Generation]) -> None:
        self._generations = tuple(generations)
        self._choices_each = generations[0].request.sampling.n
        self.num_prompt_tokens = sum(len(g.request.prompt_token_ids) for g in generations)
        self.num_choices = len(generations) * self._choices_each

    def cancel(self, error: ServeError | None = None) -> None:
        """End all generations, now."""
        for generation in self._generations:
            generation.cancel(error)

    def usage(self) -> dict[str, Any]:
        """What the request has used so far, in the shape of the API."""
        num_output = sum(generation.num_output_tokens for generation in self._generations)
        num_cached = sum(generation.num_cached_tokens for generation in self._generations)
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": num_output,
            "total_tokens": self.num_prompt_tokens + num_output,
            "prompt_tokens_details": {"cached_tokens": num_cached},
        }

    def deltas(self) -> AsyncGenerator[list[ChoiceDelta], None]:
        """What each wake-up brought, until all is done; the first error ends everything."""
        if len(self._generations) == 1:
            return self._generations[0].deltas()
        return self._merged()

    async def collect(self) -> list[ChoiceDelta]:
        """Everything at once: one delta a choice, by index."""
        choices = [ChoiceDelta(index) for index in range(self.num_choices)]
        async with aclosing(self.deltas()) as deltas:
            async for group in deltas:
                for delta in group:
                    choices[delta.choice].add(delta)
        return choices

    async def _merged(self) -> AsyncGenerator[list[ChoiceDelta], None]:
        groups: asyncio.Queue[list[ChoiceDelta] | BaseException | None] = asyncio.Queue()
        tasks = [
            asyncio.create_task(self._feed(place, generation, groups))
            for place, generation in enumerate(self._generations)
        ]
        num_open = len(tasks)
        try:
            while num_open:
                group = await groups.get()
                if group is None:
                    num_open -= 1
                elif isinstance(group, BaseException):
                    raise group
                else:
                    yield group
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _feed(
        self,
        place: int,
        generation: Generation,
        groups: asyncio.Queue[list[ChoiceDelta] | BaseException | None],
    ) -> None:
        first_index = place * self._choices_each
        try:
            async with aclosing(generation.deltas()) as deltas:
                async for group in deltas:
                    for delta in group:
                        delta.choice += first_index
                    groups.put_nowait(group)
            groups.put_nowait(None)
        except Exception as error:  # noqa: BLE001 - handed to the reader, who raises it
            groups.put_nowait(error)
