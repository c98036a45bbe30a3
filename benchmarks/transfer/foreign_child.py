"""One end of another system's engine: `ENGINE receiver`, or `ENGINE sender REACH`.

A receiver says how it is reached and waits for the end of its input. A sender writes the whole memory for each run
size that it reads, and says how many seconds that took.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import numpy

from benchmarks.transfer.pools import POOL_BYTES

Send = Callable[[int], None]
_MOONCAKE_BATCH = 256  # thousands fail


def nixl_receiver() -> str:
    """Where a sender writes."""
    agent, memory, registered = _nixl_agent("receiver")
    _keep.extend((agent, memory, registered))
    return f"{agent.get_agent_metadata().hex()}:{memory.data_ptr()}"


def nixl_sender(reach: str) -> Send:
    """What writes all runs at once."""
    metadata, _, there = reach.partition(":")
    agent, memory, registered = _nixl_agent("sender")
    _keep.extend((memory, registered))
    peer = agent.add_remote_agent(bytes.fromhex(metadata))

    def send(run_bytes: int) -> None:
        places = range(0, POOL_BYTES // run_bytes * run_bytes, run_bytes)
        ours, theirs = (
            agent.get_xfer_descs([(base + place, run_bytes, 0) for place in places], "DRAM")
            for base in (memory.data_ptr(), int(there))
        )
        handle = agent.initialize_xfer("WRITE", ours, theirs, peer, b"done")
        started = time.perf_counter()
        state = agent.transfer(handle, b"done")
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        print(f"seconds {time.perf_counter() - started}", flush=True)
        assert state == "DONE", state
        agent.release_xfer_handle(handle)

    return send


def _nixl_agent(name: str):  # type: ignore[no-untyped-def]
    import torch
    from nixl._api import nixl_agent, nixl_agent_config

    agent = nixl_agent(name, nixl_agent_config(backends=["UCX"]))
    memory = torch.ones(POOL_BYTES, dtype=torch.uint8)
    return agent, memory, agent.register_memory(memory)


def mooncake_receiver() -> str:
    """Where a sender writes."""
    engine, memory = _mooncake_engine()
    _keep.extend((engine, memory))
    return f"127.0.0.1:{engine.get_rpc_port()}/{memory.ctypes.data}"


def mooncake_sender(reach: str) -> Send:
    """What writes all runs at once."""
    peer, _, there = reach.partition("/")
    engine, memory = _mooncake_engine()

    def send(run_bytes: int) -> None:
        places = range(0, POOL_BYTES // run_bytes * run_bytes, run_bytes)
        ours, theirs = (
            [base + place for place in places] for base in (memory.ctypes.data, int(there))
        )
        started = time.perf_counter()
        for start in range(0, len(ours), _MOONCAKE_BATCH):
            parts = [runs[start : start + _MOONCAKE_BATCH] for runs in (ours, theirs)]
            sizes = [run_bytes] * len(parts[0])
            assert engine.batch_transfer_sync_write(peer, *parts, sizes) == 0
        print(f"seconds {time.perf_counter() - started}", flush=True)

    return send


def _mooncake_engine():  # type: ignore[no-untyped-def]
    from mooncake.engine import TransferEngine

    engine = TransferEngine()
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    memory = numpy.ones(POOL_BYTES, numpy.uint8)
    engine.register_memory(memory.ctypes.data, memory.nbytes)
    return engine, memory


_keep: list[object] = []
_RECEIVERS = {"nixl": nixl_receiver, "mooncake": mooncake_receiver}
_SENDERS = {"nixl": nixl_sender, "mooncake": mooncake_sender}


def main() -> None:
    """Be one end until the end of input."""
    engine, role, *reach = sys.argv[1:]
    if role == "receiver":
        print(f"reach {_RECEIVERS[engine]()}", flush=True)
        sys.stdin.read()
        return
    send = _SENDERS[engine](*reach)
    print("ready now", flush=True)
    for line in sys.stdin:
        send(int(line))


if __name__ == "__main__":
    main()
