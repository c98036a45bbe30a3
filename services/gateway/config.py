"""Everything a gateway is told when it starts."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from core.errors import ConfigError
from kvindex.config import IndexConfig

_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:]+\]|[^\s:\[\]]+):(\d{1,5})")


@dataclass(frozen=True, slots=True)
class RoutingConfig:
    """How workers are chosen.

    split_min_tokens: a prompt is split off to a prefill worker when the decode worker lacks at least this many of its
        tokens; those that it would load from a tier count as what that takes.
    max_prefill_candidates: prefill workers named to the decode worker, best first.
    decode_weights: weight of each scorer when an owner is chosen, by scorer name.
    prefill_weights: the same for prefill candidates.
    request_load_tokens: what one running request weighs against queued prompt tokens.
    """

    split_min_tokens: int = 16
    max_prefill_candidates: int = 3
    decode_weights: dict[str, float] = field(default_factory=lambda: {"prefix": 1.0, "load": 2.0})
    prefill_weights: dict[str, float] = field(default_factory=lambda: {"prefill_work": 1.0})
    request_load_tokens: int = 64

    def __post_init__(self) -> None:
        _check_least("split-min-tokens", self.split_min_tokens, 1)
        _check_least("max-prefill-candidates", self.max_prefill_candidates, 1)
        _check_least("request-load-tokens", self.request_load_tokens, 0)
        for flag, weights in (
            ("decode-scorer-weights", self.decode_weights),
            ("prefill-scorer-weights", self.prefill_weights),
        ):
            for name, weight in weights.items():
                _check_least(f"{flag}: {name}", weight, 0)


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """One gateway. Each field names its flag where the flag differs.

    host: address the HTTP service listens on.
    port: port of the HTTP service, 0 for any free one.
    seeds: worker addresses `host:port` asked directly (`--seed`); a DNS name stands for all its addresses.
    index: where the shared index is; an empty URL serves from seeds alone.
    routing: how workers are chosen.
    gateway_id: name of this gateway in logs and on worker streams; empty derives one.
    api_key: key that requests under /v1 must bear; empty asks for none.
    admin_api_key: key that POST /reset_prefix_cache must bear; empty refuses every such request.
    request_timeout_s: longest time from a request's arrival to its last token, 0 for no limit.
    max_inflight_requests: prompts served at once; one more is answered with 429.
    max_body_bytes: largest request body; a larger one is answered with 413.
    body_timeout_s: longest time a client may take to send a body.
    max_prompts: most prompts in one completions request.
    max_stop_strings: most stop strings in one request.
    max_messages: most messages in one chat request.
    max_retries: how many workers a request may lose and still be continued on another one.
    enable_force_include_usage: whether streams end with usage unasked.
    poll_interval_ms: how often the index is asked for workers.
    seed_interval_ms: how often seeds that are not connected are tried and names resolved again.
    silence_limit_ms: how long a worker without a lease counts as alive by what its stream brings.
    drain_timeout_s: how long running requests may go on after a request to stop.
    log_level: least severity that is logged.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    seeds: tuple[str, ...] = ()
    index: IndexConfig = field(default_factory=IndexConfig)
    routing: RoutingConfig = field(default_factory=RoutingConfig)
    gateway_id: str = ""
    api_key: str = field(default="", repr=False)
    admin_api_key: str = field(default="", repr=False)
    request_timeout_s: float = 600.0
    max_inflight_requests: int = 1024
    max_body_bytes: int = 64 << 20
    body_timeout_s: float = 30.0
    max_prompts: int = 1024
    max_stop_strings: int = 64
    max_messages: int = 10_000
    max_retries: int = 2
    enable_force_include_usage: bool = False
    poll_interval_ms: int = 200
    seed_interval_ms: int = 500
    silence_limit_ms: int = 3_000
    drain_timeout_s: float = 10.0
    log_level: str = "info"

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65_535:
            raise ConfigError(f"--port: {self.port} must be in [0, 65535]")
        for seed in self.seeds:
            check_address("seed", seed)
        if self.admin_api_key and self.admin_api_key == self.api_key:
            raise ConfigError("--admin-api-key: must differ from --api-key, which users have")
        for flag, value, least in (
            ("request-timeout", self.request_timeout_s, 0),
            ("max-inflight-requests", self.max_inflight_requests, 1),
            ("max-body-bytes", self.max_body_bytes, 1024),
            ("body-timeout", self.body_timeout_s, 0.1),
            ("max-prompts", self.max_prompts, 1),
            ("max-stop-strings", self.max_stop_strings, 1),
            ("max-messages", self.max_messages, 1),
            ("max-retries", self.max_retries, 0),
            ("poll-interval-ms", self.poll_interval_ms, 10),
            ("seed-interval-ms", self.seed_interval_ms, 10),
            ("silence-limit-ms", self.silence_limit_ms, 100),
            ("drain-timeout", self.drain_timeout_s, 0),
        ):
            _check_least(flag, value, least)


def check_address(flag: str, address: str) -> tuple[str, int]:
    """Host and port of a `host:port` address; ConfigError names the flag otherwise."""
    found = _ADDRESS.fullmatch(address)
    if found is None or not 0 < int(found[2]) <= 65_535:
        raise ConfigError(f"--{flag}: {address!r} must be host:port with a port in [1, 65535]")
    return found[1], int(found[2])


def _check_least(flag: str, value: float, least: float) -> None:
    if not value >= least:
        raise ConfigError(f"--{flag}: {value} must be at least {least}")
