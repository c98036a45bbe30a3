"""Options of every gRPC channel and server: how fast a dead peer is noticed, and how large a frame
may be.

A peer that is stopped or unplugged answers no ping, so its streams end within KEEPALIVE_TIME_MS +
KEEPALIVE_TIMEOUT_MS. A peer that exits closes its socket, which is noticed at once.
"""

from __future__ import annotations

import grpc.aio

KEEPALIVE_TIME_MS = 3_000
"""How long a connection with open calls may be silent before it is pinged."""

KEEPALIVE_TIMEOUT_MS = 5_000
"""How long an answer to a ping may take; long enough for a process that waits for its turn on a
busy core.
"""

MAX_MESSAGE_BYTES = 64 << 20
"""A request of a million tokens is about 4 MiB; bundles and snapshots travel in pieces."""

_Options = list[tuple[str, int]]

_SHARED: _Options = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.http2.max_pings_without_data", 0),
]


def channel_options() -> _Options:
    """Options of a client's channel: a refused connection fails calls at once and is tried again
    within a second.
    """
    return [
        *_SHARED,
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 2_000),
        ("grpc.max_reconnect_backoff_ms", 1_000),
        # One connection a channel: two channels of one process to one address share nothing.
        ("grpc.use_local_subchannel_pool", 1),
    ]


def server_options() -> _Options:
    """Options of a server: clients' pings are welcome, and two processes never share a port."""
    return [
        *_SHARED,
        ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 1_000),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.so_reuseport", 0),
    ]


def open_channel(address: str) -> grpc.aio.Channel:
    """A channel to a worker's control address; connecting happens with the first call."""
    return grpc.aio.insecure_channel(address, options=channel_options())
