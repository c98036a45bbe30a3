"""The engine process: `python -m engine.process --config-json JSON --in-fd N --out-fd M`.

Started by a worker's front, lives and dies with it: the kernel kills it when the front is gone, and the end of its
input ends it too. It says how far loading has come, then EngineReady or EngineFailed, then serves until Shutdown.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import signal
import sys
import traceback

import msgspec

from core.errors import ServeError
from engine.channel import FrontReader, FrontWriter, Inbox
from engine.config import EngineConfig
from engine.messages import EngineFailed, EngineProgress

_PR_SET_PDEATHSIG = 1
_SWITCH_INTERVAL_S = 0.0005
_M_MMAP_THRESHOLD = -3
_MMAP_THRESHOLD_BYTES = 16 << 20


def main() -> int:
    """Run one engine; 0 after Shutdown, 1 when it cannot start or go on."""
    arguments = _parse()
    _die_with_parent()
    _keep_heap_flat()
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    config = msgspec.json.decode(arguments.config_json, type=EngineConfig)
    writer = FrontWriter(arguments.out_fd)
    inbox = Inbox()
    FrontReader(arguments.in_fd, inbox, on_end=lambda: os._exit(0)).start()
    try:
        return _serve(config, writer, inbox)
    except ServeError as error:
        writer.send(EngineFailed(type(error).__name__, error.message))
    except Exception as error:  # noqa: BLE001 - the front must hear of anything
        traceback.print_exc()
        writer.send(EngineFailed("EngineDeadError", f"{type(error).__name__}: {error}"))
    return 1


def _serve(config: EngineConfig, writer: FrontWriter, inbox: Inbox) -> int:
    writer.send(EngineProgress("loading torch"))
    import torch  # takes a second: say so first

    from engine.assembly import assemble

    core = assemble(config, inbox, writer.send)
    gc.collect()
    gc.freeze()  # what loading made lives as long as the process: each look through it holds a step up for 75 ms
    try:
        with torch.inference_mode():
            core.run()
    finally:
        core.close()
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="engine.process")
    parser.add_argument("--config-json", required=True)
    parser.add_argument("--in-fd", type=int, required=True)
    parser.add_argument("--out-fd", type=int, required=True)
    return parser.parse_args()


def _die_with_parent() -> None:
    """Ask the kernel for SIGKILL when the front dies; leave Ctrl-C to the front."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _keep_heap_flat() -> None:
    """Logits of a large batch go back to the kernel when freed, instead of growing a heap that never shrinks.

    glibc raises this threshold by itself with each large block freed; setting it once stops that.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES)


if __name__ == "__main__":
    sys.exit(main())
