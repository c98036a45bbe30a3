"""Random traffic through a scheduler whose runner knows what every slot must hold.

Whatever the budget, the number of blocks, the policy, the cache, preemptions, splits and aborts: every choice that is
not aborted gets the tokens it would get alone, no step reads a slot with another history, and nothing is held at the
end.
"""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, field

import pytest

from core.block_hash import BlockHash
from core.errors import NoCapacity
from core.events import EventKind
from core.ids import RequestId
from core.request import Request
from engine.sampler.rows import SampledToken
from engine.scheduler.output import SequenceUpdate
from engine.scheduler.scheduler import Scheduler
from engine.sequence import Gate, Sequence, start_sequences
from tests.support.kv import BLOCK_SIZE, ROOT
from tests.support.sequences import assert_idle, make_request, make_scheduler, pool_of
from tests.support.shadow_kv import ShadowKV, digest_chain, token_after

EOS = 7
MAX_MODEL_LEN = 160
SALTS = ("", "", "salt")


def tokens_alone(request: Request, choice: int, max_length: int) -> tuple[list[int], str]:
    """A choice's output and its end, by the plainest loop there is."""
    params = request.sampling
    output = list(request.output_token_ids[choice]) if any(request.output_token_ids) else []
    while True:
        digest = digest_chain([*request.prompt_token_ids, *output])[-1]
        output.append(token_after(digest, choice))
        if len(output) >= params.min_tokens and output[-1] in (EOS, *params.stop_token_ids):
            return output, "stop"
        length = len(request.prompt_token_ids) + len(output)
        if len(output) >= params.max_tokens or length >= max_length:
            return output, "length"


@dataclass
class Traffic:
    """One engine under random load, and what came out of it."""

    seed: int
    caching: bool = True
    policy: str = "fcfs"
    num_groups: int = 1
    requests: dict[RequestId, Request] = field(default_factory=dict)
    outputs: dict[tuple[RequestId, int], list[int]] = field(
        default_factory=lambda: defaultdict(list)
    )
    ends: dict[tuple[RequestId, int], str] = field(default_factory=dict)
    parents: dict[BlockHash, BlockHash | None] = field(default_factory=dict)
    aborted: set[RequestId] = field(default_factory=set)
    first_tokens_only: set[RequestId] = field(default_factory=set)
    arriving: list[Sequence] = field(default_factory=list)
    sessions: list[Sequence] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.chooser = random.Random(self.seed)
        self.scheduler: Scheduler = make_scheduler(
            num_usable=self.chooser.choice([12, 16, 30, 80]) * self.num_groups,
            num_groups=self.num_groups,
            caching=self.caching,
            policy=self.policy,
            max_num_batched_tokens=self.chooser.choice([8, 24, 64, 300]),
            max_num_seqs=self.chooser.choice([3, 8]),
            max_model_len=MAX_MODEL_LEN,
            eos_token_ids=frozenset({EOS}),
        )
        self.shadow = ShadowKV(pool_of(self.scheduler), BLOCK_SIZE)
        base = [self.chooser.randrange(8, 60) for _ in range(150)]
        self.bases = [base, base[:50] + base[:100], base[::-1]]

    # ---- load

    def make_request(self, name: str) -> Request:
        chooser = self.chooser
        length = chooser.choice([3, 16, 17, 40, 64, 100, 140])
        prompt = list(chooser.choice(self.bases)[:length])
        if chooser.random() < 0.5:
            prompt[chooser.randrange(length)] = chooser.randrange(8, 60)
        n = chooser.choice([1, 1, 1, 2, 3])
        output = tuple((chooser.randrange(10, 60),) * chooser.randrange(1, 4) for _ in range(n))
        return make_request(
            name,
            prompt=prompt,
            output=output if chooser.random() < 0.15 else (),
            priority=chooser.randrange(3),
            cache_salt=chooser.choice(SALTS),
            n=n,
            temperature=1.0,
            max_tokens=chooser.choice([6, 12, 40]),
            min_tokens=chooser.choice([0, 0, 5]),
            stop_token_ids=chooser.choice([(), (8, 9)]),
        )

    def offer(self, name: str) -> None:
        """One more request, as one of the three kinds an engine meets."""
        request = self.make_request(name)
        sequences = start_sequences(request, self.num_groups)
        kind = self.chooser.choice(["local", "local", "arriving", "session"])
        self.requests[request.id] = request
        if kind == "session" and not any(request.output_token_ids):
            self.scheduler.add_session(sequences[0])
            self.sessions.append(sequences[0])
            self.first_tokens_only.add(request.id)
            return
        if kind == "arriving" and not any(request.output_token_ids):
            try:
                self.scheduler.add_arriving(sequences[0])
                self.arriving.append(sequences[0])
                return
            except NoCapacity:
                pass
        for sequence in sequences:
            assert self.scheduler.add(sequence) is None

    def meddle(self) -> None:
        """What the other worker, the client and the movers may do between steps."""
        for sequence in list(self.arriving):
            if self.chooser.random() < 0.4:
                self.meddle_with_arrival(sequence)
        for session in list(self.sessions):
            if self.chooser.random() < 0.5:
                self.meddle_with_session(session)
        if self.requests and self.chooser.random() < 0.04:
            self.abort(self.chooser.choice(list(self.requests)))
        if self.chooser.random() < 0.02:
            pool_of(self.scheduler).reset_prefix_cache()

    def meddle_with_arrival(self, sequence: Sequence) -> None:
        scheduler, chooser = self.scheduler, self.chooser
        if len(sequence.block_table) * BLOCK_SIZE < sequence.num_arriving_tokens:
            cap = pool_of(scheduler).num_usable // 2
            has_room = scheduler.num_undecoded_blocks + scheduler.blocks_for_prompt(sequence) <= cap
            if scheduler.num_undecoded_blocks and not has_room:
                return
            scheduler.pin_prefix(sequence, sequence.num_arriving_tokens)
            if not scheduler.reserve(sequence):
                scheduler.give_up_blocks(sequence)
                return
        size = len(sequence.block_table)
        missing = list(range(sequence.num_computed_tokens // BLOCK_SIZE, size))
        first = self.first_tokens(sequence) if chooser.random() < 0.5 else []
        fate = chooser.random()
        if fate < 0.15:  # the attempt fails with a head received
            received = chooser.randint(0, len(missing))
            whole = min(size - len(missing) + received, sequence.num_arriving_tokens // BLOCK_SIZE)
            self.shadow.receive(sequence, missing[:received])
            scheduler.give_up_blocks(sequence, whole)  # these stay findable
            scheduler.give_up_blocks(sequence)  # and nobody waits while holding
        elif fate < 0.25:
            self.note(scheduler.accept_first_tokens(sequence, first) if first else [])
            if sequence in self.arriving and not sequence.is_finished:
                received = chooser.randint(0, len(missing))
                whole = size - len(missing) + received
                whole = min(whole, sequence.num_arriving_tokens // BLOCK_SIZE)
                self.shadow.receive(sequence, missing[:received])
                scheduler.return_to_local(sequence, whole)
            self.arriving.remove(sequence)
        else:
            self.note(scheduler.accept_first_tokens(sequence, self.first_tokens(sequence)))
            if not sequence.is_finished:
                self.shadow.receive(sequence, missing)
                scheduler.admit_with_kv(sequence, sequence.num_arriving_tokens)
            self.arriving.remove(sequence)

    def first_tokens(self, sequence: Sequence) -> list[SampledToken]:
        digest = digest_chain(sequence.token_ids[: sequence.num_arriving_tokens])[-1]
        num_choices = sequence.sampling.n
        return [SampledToken(token_after(digest, choice)) for choice in range(num_choices)]

    def meddle_with_session(self, session: Sequence) -> None:
        scheduler = self.scheduler
        if session.is_finished:
            scheduler.release(session)
            self.sessions.remove(session)
        elif session.gate is Gate.PARKED:
            scheduler.unpark(session)
        elif session.gate is Gate.CLOSED and len(session.block_table):
            verdict = self.chooser.random()
            if verdict < 0.2:
                scheduler.drop_blocks(session)
            else:
                scheduler.open_gate(session)
        elif self.chooser.random() < 0.05:
            self.abort(session.request.id)

    def abort(self, request_id: RequestId) -> None:
        """The client is gone, or the other worker is."""
        ended = self.scheduler.abort(request_id)
        for session in [s for s in self.sessions if s.request.id == request_id]:
            self.sessions.remove(session)
            ended.append(session)
            self.scheduler.release(session)
        self.arriving = [s for s in self.arriving if s.request.id != request_id]
        if ended:
            self.aborted.add(request_id)

    # ---- steps

    def step(self) -> bool:
        """One turn of an engine's loop; whether anything ran."""
        output = self.scheduler.schedule()
        for sequence in self.scheduler.sessions_due():
            if not self.scheduler.take_blocks(sequence):
                break
        tokens = sum(item.num_tokens for item in output.items)
        assert tokens == output.num_batched_tokens <= self.scheduler.config.max_num_batched_tokens
        assert len(output.items) <= self.scheduler.config.max_num_seqs
        assert len({id(item.sequence) for item in output.items}) == len(output.items)
        self.note(self.scheduler.update(output, self.shadow.run(output)))
        self.scheduler.check_integrity()
        self.check_published()
        return bool(output.items)

    def check_published(self) -> None:
        """What readers of the events know is what is findable, and never a block without its parent."""
        pool = pool_of(self.scheduler)
        for event in pool.take_events():
            if event.kind is EventKind.STORED:
                parents = (event.parent, *event.hashes)
                self.parents |= dict(zip(event.hashes, parents, strict=False))
            elif event.kind is EventKind.REMOVED:
                for name in event.hashes:
                    del self.parents[name]
            else:
                self.parents.clear()
        assert set(self.parents) == set(pool.snapshot())
        roots = {ROOT.salted(salt) for salt in SALTS}
        assert set(self.parents.values()) <= set(self.parents) | roots

    def note(self, updates: list[SequenceUpdate]) -> None:
        for update in updates:
            key = (update.sequence.request.id, update.choice)
            assert key not in self.ends, "a token after the end"
            self.outputs[key] += [token.token_id for token in update.tokens]
            if update.finish_reason:
                self.ends[key] = update.finish_reason

    def run(self, num_requests: int) -> None:
        """Offer all requests bit by bit, then run until everything has ended."""
        names = iter(f"r{index}" for index in range(num_requests))
        idle = 0
        for _ in range(20_000):
            if self.chooser.random() < 0.4 and (name := next(names, None)) is not None:
                self.offer(name)
            self.meddle()
            idle = 0 if self.step() else idle + 1
            scheduler = self.scheduler
            waiting = scheduler.num_running + scheduler.num_waiting + scheduler.num_arriving
            if len(self.requests) == num_requests and not waiting and not self.sessions:
                return
            assert idle < 500, "nothing runs, though something is left"
        raise AssertionError("it does not end")

    def check(self) -> None:
        """Everything that was not aborted has the tokens it would have alone; what was aborted has their head."""
        for request_id, request in self.requests.items():
            for choice in range(request.sampling.n):
                self.check_choice(request, choice, request_id in self.aborted)
        assert_idle(self.scheduler)

    def check_choice(self, request: Request, choice: int, is_aborted: bool) -> None:
        expected, reason = tokens_alone(request, choice, self.scheduler.max_length)
        if request.id in self.first_tokens_only and len(expected) > 1:
            expected, reason = expected[:1], ""
        given = request.output_token_ids[choice] if any(request.output_token_ids) else ()
        got = [*given, *self.outputs[request.id, choice]]
        if is_aborted:
            assert got == expected[: len(got)]
        else:
            assert (got, self.ends.get((request.id, choice), "")) == (expected, reason)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("seed", range(12))
def test_random_traffic(seed: int, caching: bool, policy: str) -> None:
    traffic = Traffic(seed, caching, policy)
    traffic.run(num_requests=40)
    traffic.check()


@pytest.mark.parametrize("seed", range(6))
def test_random_traffic_over_several_kv_groups(seed: int) -> None:
    traffic = Traffic(seed, num_groups=3)
    traffic.run(num_requests=40)
    traffic.check()
