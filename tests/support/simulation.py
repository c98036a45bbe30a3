"""Decode and prefill engines in one process, in random order, on a clock of their own: one seed, one history.

Requests come and are aborted; engines stand still, die and come back; runs are lost, doubled, delayed, turned and cut;
time jumps over leases. Whatever happened, each request ends, says the right tokens, and nothing is held in the end.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from unittest import mock

from core.ids import RequestId
from core.request import Request
from engine.messages import AddRequest
from kvtransfer.transports.fake.ends import FakeSender
from kvtransfer.transports.fake.network import FakeNetwork
from kvtransfer.transports.fake.packets import Fault
from tests.support.engines import EngineHarness, Wire, abort, make_request
from tests.support.ledger_model import ledger_answer
from tests.support.scenes import random_prompt

LEASE_MS, PREFILL_TIMEOUT_MS = 1500, 2000
NUM_REQUESTS, NUM_TICKS, MAX_QUIET_TICKS = 8, 120, 2000
PREFILL_NAMES = ("p1", "p2")
NAMES = ("d", *PREFILL_NAMES)
NOBODY = "nobody"


@dataclass
class Clock:
    """Stands in for the module `time` where the engine reads it; moves when told to."""

    now_ms: float = 0.0

    def monotonic(self) -> float:
        """Seconds."""
        return self.now_ms / 1000.0


@contextmanager
def simulated_clock() -> Iterator[Clock]:
    """Every engine of this process lives by the clock that is yielded."""
    clock = Clock()
    with mock.patch("engine.channel.time", clock):
        yield clock


@dataclass
class Simulation:
    """One schedule, from its first request until nothing is held.

    violence: share of the time for disorder in which there is some, in (0, 1].
    owners: the engine that has each request: D, or now and then a prefill worker that serves clients too.
    told: tokens of each choice, whoever told them. history: what happened, to be compared with another run.
    """

    seed: int
    clock: Clock
    rng: random.Random = field(init=False)
    violence: float = field(init=False)
    network: FakeNetwork = field(init=False)
    wire: Wire = field(init=False)
    requests: list[Request] = field(default_factory=list)
    owners: dict[RequestId, str] = field(default_factory=dict)
    told: dict[RequestId, list[list[int]]] = field(default_factory=dict)
    ended: dict[RequestId, dict[int, str]] = field(default_factory=dict)
    standing_until_ms: dict[str, float] = field(default_factory=dict)
    renewed_at_ms: float = 0.0
    history: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.violence = self.rng.choice([0.1, 0.4, 1.0])
        self.network = FakeNetwork(self.rng.choice([40, 150, 1000]))
        engines = {name: self.new_engine() for name in PREFILL_NAMES}
        self.wire = Wire(self.new_engine(), engines, network=self.network)

    def new_engine(self) -> EngineHarness:
        """An engine as an operator would start it again: nothing of a former life in it."""
        return EngineHarness(
            block_size=self.rng.choice([16, 16, 32]),
            num_blocks=self.rng.choice([13, 18, 40]),
            budget=self.rng.choice([16, 40]),
            is_ledger=True,
            is_staged=self.rng.random() < 0.2,
            enable_prefix_caching=self.rng.random() < 0.8,
            network=self.network,
            session_lease_ms=LEASE_MS,
            prefill_timeout_ms=PREFILL_TIMEOUT_MS,
        )

    # ---- the schedule

    def run(self) -> None:
        """Disorder, then quiet; raises AssertionError when anything is wrong or held."""
        for _ in range(NUM_TICKS):
            self.happen()
            self.go_on()
        while len(self.requests) < NUM_REQUESTS:
            self.submit()
        for _ in range(MAX_QUIET_TICKS):
            if self.is_over():
                break
            self.be_quiet()
        else:
            raise AssertionError(f"no end: {self.ended} {self.wire.decode.stats}")
        self.check_answers()

    def happen(self) -> None:
        """One thing from outside, if any."""
        if self.rng.random() < 0.14 and len(self.requests) < NUM_REQUESTS:
            self.submit()
        if self.rng.random() < 0.015 and self.requests:
            request_id = self.rng.choice(self.requests).id
            self.note(f"abort {request_id}")
            abort(self.engine(self.owners[request_id]), request_id)
        if self.rng.random() < self.violence:
            self.befall(self.rng.random())

    def befall(self, dice: float) -> None:
        """One fault, if any. dice: which one, in [0, 1)."""
        if dice < 0.01:
            self.kill_prefill(self.rng.choice(PREFILL_NAMES))
        elif dice < 0.016:
            self.kill_decode()
        elif dice < 0.03:
            self.stop(self.rng.choice(NAMES))
        elif dice < 0.04:
            self.note("streams lost")
            self.wire.lose_streams(self.rng.choice(PREFILL_NAMES))
        elif dice < 0.05:
            self.clock.now_ms += self.rng.randrange(100, 2500)
        elif dice < 0.2:
            self.disturb()

    def go_on(self) -> None:
        """A little time passes, and everyone may do something or nothing."""
        self.clock.now_ms += self.rng.randrange(15)
        for _ in range(self.rng.randrange(4)):
            self.wire.carry_one()
        for _ in range(self.rng.randrange(40)):
            self.network.step(self.rng.choice)
        self.renew_when_due()
        for name in NAMES:
            if self.rng.random() < 0.7:
                self.turn(name)

    def be_quiet(self) -> None:
        """Nothing more befalls anyone; what stood still goes on."""
        self.clock.now_ms += 10
        self.standing_until_ms.clear()
        self.network.release_delayed()
        self.network.notice_losses()
        self.wire.turn()
        self.renew_when_due()
        for name in NAMES:
            self.turn(name)

    # ---- what happens

    def submit(self) -> None:
        """A new request, with candidates that may be dead, stopped or none."""
        number = len(self.requests)
        prompt = random_prompt(self.rng.randrange(1, 130), self.rng.randrange(3))
        num_choices, max_tokens = self.rng.choice([1, 1, 2]), self.rng.randrange(1, 30)
        request = make_request(f"r{number}", prompt, max_tokens=max_tokens, n=num_choices)
        if self.rng.random() < 0.1:
            request = replace(request, deadline_ms=self.rng.randrange(1, 3000))
        candidates = self.rng.sample([*PREFILL_NAMES, NOBODY], self.rng.randrange(4))
        owner = "d" if self.rng.random() < 0.85 else self.rng.choice(PREFILL_NAMES)
        self.note(f"submit {len(prompt)} {owner} {candidates}")
        self.requests.append(request)
        self.told[request.id] = [[] for _ in range(num_choices)]
        self.ended[request.id] = {}
        self.owners[request.id] = owner
        self.engine(owner).inbox.post(AddRequest(request, candidates if owner == "d" else []))

    def submit_again(self, lost_owner: str) -> None:
        """What a dead engine had goes on at D, from the tokens that were told."""
        for request in self.requests:
            is_open = len(self.ended[request.id]) < request.sampling.n
            if is_open and self.owners[request.id] == lost_owner:
                outputs = tuple(tuple(tokens) for tokens in self.told[request.id])
                again = replace(request, output_token_ids=outputs if any(outputs) else ())
                self.owners[request.id] = "d"
                candidates = [self.rng.choice(PREFILL_NAMES)]
                self.wire.decode.inbox.post(AddRequest(again, candidates))

    def disturb(self) -> None:
        """Something befalls what carries KV."""
        dice = self.rng.random()
        if dice < 0.6:
            fault = self.rng.choice(list(Fault))
            self.note(fault.name)
            self.network.inject(fault, self.rng.randrange(6))
        elif dice < 0.8:
            self.network.release_delayed()
            self.network.notice_losses()
        elif self.network.links:
            self.note("cut")
            link = self.rng.choice(self.network.links)
            cuts = [
                self.network.cut,
                self.network.cut_for_sender,
                self.network.cut_for_receiver,
            ]
            self.rng.choice(cuts)(link)

    def stop(self, name: str) -> None:
        """An engine stands still for a while, sometimes for longer than any lease."""
        self.note(f"stop {name}")
        self.standing_until_ms[name] = self.clock.now_ms + self.rng.randrange(10, 1000)

    def kill_prefill(self, name: str) -> None:
        """P dies, noticed or not by whom it was sending to, and another one serves at its address."""
        self.note(f"kill {name}")
        sender = self.wire.prefill[name].sender
        assert isinstance(sender, FakeSender)
        self.network.remove_sender(sender, is_noticed=self.rng.random() < 0.5)
        self.wire.cut(name)
        self.wire.prefill[name] = self.new_engine()
        self.submit_again(name)

    def kill_decode(self) -> None:
        """D dies, and P hears of it or not; another one takes its place."""
        self.note("kill d")
        self.wire.decode.close()
        if self.rng.random() < 0.5:
            self.wire.end_streams()
        self.wire.streams.clear()
        self.wire.decode = self.new_engine()
        self.submit_again("d")

    # ---- running

    def turn(self, name: str) -> None:
        """One turn of an engine that does not stand still."""
        if self.standing_until_ms.get(name, 0.0) > self.clock.now_ms:
            return
        engine = self.engine(name)
        engine.turn()
        self.hear(engine)

    def engine(self, name: str) -> EngineHarness:
        """The engine that now bears a name."""
        return self.wire.decode if name == "d" else self.wire.prefill[name]

    def hear(self, engine: EngineHarness) -> None:
        """Take what an engine has told its clients."""
        for request_id, outputs in engine.outputs.items():
            for output in outputs:
                if output.token_ids:
                    self.note(f"{request_id}/{output.choice} {output.token_ids}")
                self.told[request_id][output.choice] += output.token_ids
                if output.finish_reason:
                    self.note(f"{request_id}/{output.choice} {output.finish_reason}")
                    self.ended[request_id].setdefault(output.choice, output.finish_reason)
        engine.outputs.clear()

    def renew_when_due(self) -> None:
        """D's front renews, unless it stands still too."""
        stands = self.standing_until_ms.get("d", 0.0) > self.clock.now_ms
        if not stands and self.clock.now_ms - self.renewed_at_ms > LEASE_MS / 3:
            self.renewed_at_ms = self.clock.now_ms
            self.wire.renew()

    def is_over(self) -> bool:
        """Whether every request has ended and every engine is at rest."""
        all_ended = all(len(self.ended[r.id]) == r.sampling.n for r in self.requests)
        engines = (self.wire.decode, *self.wire.prefill.values())
        return all_ended and all(engine.is_idle() for engine in engines)

    # ---- judging

    def check_answers(self) -> None:
        """Right tokens to the end, or to where the client left or the deadline passed."""
        for request in self.requests:
            for choice, expected in enumerate(ledger_answer(request)):
                told, reason = self.told[request.id][choice], self.ended[request.id][choice]
                assert told == expected[: len(told)], f"{request.id}/{choice}: {told} {expected}"
                is_whole = len(told) == len(expected)
                assert is_whole or reason in ("abort", "error"), f"{request.id}/{choice}: {reason}"

    def note(self, event: str) -> None:
        """Add to the history."""
        self.history.append(f"{self.clock.now_ms:.0f} {event}")

    def close(self) -> None:
        """Close every engine, each of which looks at its books."""
        for engine in (self.wire.decode, *self.wire.prefill.values()):
            engine.close()


def run_schedule(seed: int) -> list[str]:
    """Run one schedule to its end; its history."""
    with simulated_clock() as clock:
        simulation = Simulation(seed, clock)
        simulation.run()
        simulation.close()
    return simulation.history
