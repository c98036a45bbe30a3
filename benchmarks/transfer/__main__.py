"""`make bench-transfer`: GB/s of each transport, from P's push to D's knowledge that all is there.

    memcpy        one thread, run by run, between two pools of one process
    raw socket    sendall on one side, recv_into of a run's size on the other, over loopback
    tcp, shm      the transports, P in a process of its own; "shm checked" bears checksums
    over nixl, over mooncake   the transports that read by these engines, with checksums, P in a process of its own
    nixl          its UCX agent, writing into D's memory, over shared memory and over tcp
    mooncake      its transfer engine over tcp, where libibverbs1 is installed

The last two write runs of the same size in one batch, between two processes of their own.

A session moves all blocks of the pool, in pushes of 32 blocks, as chunks of a prompt do.

Predicted before the first run, as shares of memcpy (shm) and of the raw socket (tcp):
- shm, runs of 4 MB and 1 MB: 0.9; of 256 KB: 0.6; of 24 KB: 0.15. A run costs some 15 us of Python on D's side.
- over nixl (which finds shared memory), as shares of tcp: runs of 1 MB and more 1.2, of 24 KB 0.8; over mooncake
  0.5 and 0.1.
- tcp, runs of 1 MB: 0.8, CRC-32C on both sides included; of 24 KB: 0.3.
"""

from __future__ import annotations

import argparse

from benchmarks import report
from benchmarks.transfer import measure


def main() -> None:
    """Run all and write results/transfer.json."""
    parser = argparse.ArgumentParser(prog="bench-transfer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--output", default="transfer", help="name of the file in benchmarks/results"
    )
    arguments = parser.parse_args()
    report.write(arguments.output, measure.run(arguments.rounds))


if __name__ == "__main__":
    main()
