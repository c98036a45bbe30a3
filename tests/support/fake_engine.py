"""An engine of scripted tokens: speaks the front's protocol, computes nothing, starts in a tenth of a second.

Token i of choice c of a prompt is `(sum(prompt) + 7 * i + c) % 1000`, whoever produces it, so that a split run and a
local one can be compared. Run as a program with the arguments of the real engine, after options of its own. With
`--tiers` it holds what it has served in the tiers of `fake_tiers`; otherwise it tells of made-up blocks.
"""

from __future__ import annotations

import argparse
import os
import select
import struct
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

if __name__ == "__main__":
    # Instead of this folder, whose names must not hide packages.
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import msgspec

from core.block_hash import BlockHash, HashRoot
from core.events import CacheEvent, EventKind, Tier
from core.ids import Epoch, SessionId
from core.request import Request
from core.worker_info import WorkerLoad, WorkerRates
from engine.config import EngineConfig
from engine.messages import (
    AbortRequest,
    AddPrefill,
    AddRequest,
    AnnouncePrefill,
    CallPrefill,
    ChoiceOutput,
    DeclinePrefill,
    EndPrefill,
    EngineFailed,
    EngineProgress,
    EngineReady,
    EngineStopped,
    FirstTokens,
    GrantPrefill,
    PrefillAnnounced,
    PrefillAnswered,
    PrefillDeclined,
    PrefillEnded,
    PrefillGranted,
    PrefillLost,
    PrefillRenewed,
    PrefillRoom,
    RefusePrefill,
    ResetPrefixCache,
    RoomForPrefill,
    Shutdown,
    SnapshotTaken,
    StepDone,
    TakeSnapshot,
    ToEngine,
    ToFront,
    TransportOffer,
)
from engine.stats import EngineStats
from tests.support.fake_model import BUNDLE, IDENTITY, LAYOUT
from tests.support.fake_tiers import FakeTiers

SIGN_OF_LIFE_S = 0.1


def command(*options: str) -> list[str]:
    """The command that starts a fake engine with these options."""
    return [sys.executable, str(Path(__file__).resolve()), *options]


def expected_token(prompt: tuple[int, ...], index: int, choice: int = 0) -> int:
    """Output token `index` of a choice."""
    return (sum(prompt) + 7 * index + choice) % 1000


@dataclass
class Running:
    request: Request
    num_done: int = 0
    session: SessionId | None = None
    attempt: int = 0
    candidates: list[str] = field(default_factory=list)
    waits: bool = False
    num_cached: int = 0


@dataclass
class Stats:
    steps: int = 0
    prompt_tokens: int = 0
    generated: int = 0
    fallbacks: int = 0


class FakeEngine:
    def __init__(self, options: argparse.Namespace, config: EngineConfig) -> None:
        self.options = options
        self.config = config
        self.running: dict[str, Running] = {}
        self.sessions: dict[tuple[int, int], AddPrefill] = {}
        self.declined = False
        self.outputs: list[ChoiceOutput] = []
        self.stats = Stats()
        self.num_events = 0
        self.next_session = int.from_bytes(os.urandom(7), "little")
        self.ending = False
        self.tiers = FakeTiers(HashRoot.of(IDENTITY)) if options.tiers else None

    # ------------------------------------------------------------ pipes

    def send(self, message: ToFront) -> None:
        body = msgspec.msgpack.encode(message)
        data = struct.pack("<I", len(body)) + body
        while data:
            data = data[os.write(self.options.out_fd, data) :]

    def read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            piece = os.read(self.options.in_fd, size - len(data))
            if not piece:
                os._exit(0)
            data += piece
        return data

    def receive(self, wait_s: float | None) -> ToEngine | None:
        if not select.select([self.options.in_fd], [], [], wait_s)[0]:
            return None
        size = struct.unpack("<I", self.read(4))[0]
        return msgspec.msgpack.decode(self.read(size), type=ToEngine)

    # ------------------------------------------------------------ life

    def run(self) -> None:
        self.send(EngineProgress("loading nothing"))
        time.sleep(self.options.load_ms / 1000)
        if self.options.fail:
            self.send(EngineFailed("ModelLoadError", self.options.fail))
            sys.exit(1)
        self.send(
            EngineReady(
                epoch=Epoch(int.from_bytes(os.urandom(7), "little")),
                identity=IDENTITY,
                layout=replace(LAYOUT, block_size=self.options.block_size),
                hash_root=HashRoot.of(IDENTITY),
                num_blocks=100,
                max_model_len=2048,
                transports=[
                    TransportOffer("shm", ["/nowhere/kv-0"]),
                    TransportOffer("tcp", ["127.0.0.1:9"]),
                ],
                bundle=BUNDLE,
                rates=WorkerRates(1000.0, 5.0),
                kernels="none",
            )
        )
        step_s = self.options.step_ms / 1000
        while not self.ending:
            is_busy = any(not r.waits for r in self.running.values())
            message = self.receive(step_s if is_busy else SIGN_OF_LIFE_S)
            is_idle = message is None and not is_busy
            while message is not None:
                self.handle(message)
                message = self.receive(0)
            self.step()
            if is_idle:
                self.tell([])
        self.send(EngineStopped())

    def step(self) -> None:
        for run in list(self.running.values()):
            if not run.waits:
                self.generate(run)
        if not self.outputs:
            return
        self.stats.steps += 1
        if self.tiers is not None:
            self.tell([])
            return
        event = CacheEvent(EventKind.STORED, hashes=(BlockHash(os.urandom(16)),))
        self.tell_events([event])

    def tell(self, events: list[CacheEvent]) -> None:
        num_running = len(self.running)
        load = WorkerLoad(num_running=num_running, num_free_blocks=100 - num_running)
        stats = EngineStats(
            num_running=num_running,
            num_free_blocks=100 - num_running,
            steps_total=self.stats.steps,
            prompt_tokens_total=self.stats.prompt_tokens,
            generation_tokens_total=self.stats.generated,
            local_prefill_fallbacks_total=self.stats.fallbacks,
        )
        first = self.num_events + 1 - len(events)
        self.send(StepDone(self.outputs, events, first, load, stats))
        self.outputs = []

    def tell_events(self, events: list[CacheEvent]) -> None:
        self.num_events += len(events)
        self.tell(events)

    def generate(self, run: Running) -> None:
        request = run.request
        if request.id == self.options.die_on_request and run.num_done == 2:
            os._exit(9)
        ends = run.num_done + 1 >= request.sampling.max_tokens
        for choice in range(request.sampling.n):
            token = expected_token(request.prompt_token_ids, run.num_done, choice)
            self.outputs.append(
                ChoiceOutput(
                    request.id,
                    choice,
                    [token],
                    finish_reason="length" if ends else "",
                    num_cached_tokens=run.num_cached if run.num_done == 0 else None,
                    timestamps_ms={"done": 1.0} if ends else {},
                )
            )
        run.num_done += 1
        self.stats.generated += request.sampling.n
        if ends:
            del self.running[request.id]

    # ------------------------------------------------------------ messages

    def handle(self, message: ToEngine) -> None:
        match message:
            case AddRequest():
                self.add(message)
            case AbortRequest():
                self.abort(message)
            case PrefillAnnounced() | PrefillAnswered() | PrefillLost():
                run = self.of_session(message.session_id, message.attempt)
                if run is not None:
                    self.continue_session(run, message)
            case AddPrefill():
                self.add_prefill(message)
            case PrefillGranted():
                self.answer(message)
            case PrefillDeclined() | PrefillRenewed():
                pass
            case PrefillRoom():
                self.send(AnnouncePrefill(message.session_id, message.attempt, 0))
            case PrefillEnded():
                self.sessions.pop((message.session_id, message.attempt), None)
                self.log(f"ended {message.reason}")
            case TakeSnapshot():
                hashes = {Tier.DEVICE: [BlockHash(bytes(16)), BlockHash(b"\x01" * 16)]}
                if self.tiers is not None:
                    hashes = self.tiers.snapshot()
                self.send(SnapshotTaken(message.query_id, self.num_events, hashes))
            case ResetPrefixCache():
                self.log("reset")
                if self.tiers is not None:
                    self.tell_events(self.tiers.reset())
            case Shutdown():
                self.ending = not self.options.ignore_shutdown

    def add(self, message: AddRequest) -> None:
        self.stats.prompt_tokens += len(message.request.prompt_token_ids)
        run = Running(message.request, candidates=list(message.prefill_candidates))
        self.running[message.request.id] = run
        if self.tiers is not None:
            run.num_cached, events = self.tiers.use(message.request)
            self.tell_events(events)
        if run.candidates:
            run.session = SessionId(self.next_session)
            self.next_session += 1
            self.call(run)

    def call(self, run: Running) -> None:
        if not run.candidates:
            run.waits = False
            self.stats.fallbacks += 1
            return
        run.waits = True
        run.attempt += 1
        lease_ms = self.options.lease_ms
        candidate = run.candidates.pop(0)
        self.send(
            CallPrefill(run.session, run.attempt, candidate, run.request, 0, b"s" * 32, lease_ms)
        )

    def abort(self, message: AbortRequest) -> None:
        run = self.running.pop(message.request_id, None)
        if run is None:
            return
        self.log(f"aborted {message.request_id}")
        if run.waits:
            self.send(EndPrefill(run.session, run.attempt, completed=False))
        for choice in range(run.request.sampling.n):
            self.outputs.append(ChoiceOutput(message.request_id, choice, finish_reason="abort"))

    def of_session(self, session: int, attempt: int) -> Running | None:
        for run in self.running.values():
            if run.waits and (run.session, run.attempt) == (session, attempt):
                return run
        return None

    def continue_session(
        self, run: Running, message: PrefillAnnounced | PrefillAnswered | PrefillLost
    ) -> None:
        key = (run.session, run.attempt)
        match message:
            case PrefillAnnounced() if self.options.decline_first and not self.declined:
                self.declined = True
                self.send(DeclinePrefill(*key))
                self.send(RoomForPrefill(*key))
            case PrefillAnnounced():
                self.send(GrantPrefill(*key, [0]))
            case PrefillAnswered():
                self.outputs += message.first_outputs
                run.num_done = 1
                run.waits = False
                self.send(EndPrefill(*key, completed=True))
            case PrefillLost():
                self.log(f"lost {message.error_kind}")
                self.call(run)

    def add_prefill(self, message: AddPrefill) -> None:
        key = (message.session_id, message.attempt)
        if self.options.refuse_prefill:
            self.send(RefusePrefill(*key, "NoCapacity", "no room here"))
            return
        self.sessions[key] = message
        if not self.options.silent_prefill:
            self.send(AnnouncePrefill(*key, 0))

    def answer(self, message: PrefillGranted) -> None:
        key = (message.session_id, message.attempt)
        add = self.sessions.get(key)
        if add is None:
            return
        if self.options.die_on_grant:
            os._exit(9)
        request = add.request
        outputs = [
            ChoiceOutput(
                request.id,
                choice,
                [expected_token(request.prompt_token_ids, 0, choice)],
                num_cached_tokens=3,
            )
            for choice in range(request.sampling.n)
        ]
        self.send(FirstTokens(*key, outputs, 3, sends_kv=True))

    def log(self, line: str) -> None:
        if self.options.log:
            with open(self.options.log, "a") as file:
                file.write(line + "\n")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config-json", required=True)
    parser.add_argument("--in-fd", type=int, required=True)
    parser.add_argument("--out-fd", type=int, required=True)
    parser.add_argument("--load-ms", type=float, default=0)
    parser.add_argument("--step-ms", type=float, default=2)
    parser.add_argument("--lease-ms", type=int, default=30_000)
    parser.add_argument("--fail", default="")
    parser.add_argument("--log", default="")
    parser.add_argument("--die-on-request", default="")
    parser.add_argument("--refuse-prefill", action="store_true")
    parser.add_argument("--silent-prefill", action="store_true")
    parser.add_argument("--decline-first", action="store_true")
    parser.add_argument("--die-on-grant", action="store_true")
    parser.add_argument("--ignore-shutdown", action="store_true")
    parser.add_argument("--tiers", action="store_true")
    parser.add_argument("--block-size", type=int, default=LAYOUT.block_size)
    options = parser.parse_args()
    config = msgspec.json.decode(options.config_json, type=EngineConfig)
    FakeEngine(options, config).run()


if __name__ == "__main__":
    main()
