"""The gateway's metrics, in a registry of its own.

What a front end can know of vLLM's family is exported under its names and with its buckets, so that existing
dashboards work; what is Baton's own is `baton:*`. Children of labelled metrics are looked up once a model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from services.gateway.routing.base import Route, RouteQuery

TTFT_BUCKETS_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
)  # fmt: skip
TOKEN_GAP_BUCKETS_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
LATENCY_BUCKETS_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
ROUTE_BUCKETS_S = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
N_BUCKETS = (1, 2, 5, 10, 20)
FINISHED_REASONS = ("stop", "length", "abort", "error", "repetition")


@cache
def length_buckets(limit: int) -> tuple[float, ...]:
    """1, 2, 5, 10 ... up to `limit`."""
    steps = [step * 10**power for power in range(8) for step in (1, 2, 5)]
    return tuple(float(step) for step in steps if step <= limit)


@dataclass(frozen=True, slots=True)
class ModelMetrics:
    """The children of one model, used on the path of its requests."""

    time_to_first_token: Histogram
    time_to_second_token: Histogram
    inter_token_latency: Histogram
    time_per_output_token: Histogram
    e2e_latency: Histogram
    request_prompt_tokens: Histogram
    request_generation_tokens: Histogram
    request_max_tokens: Histogram
    request_n: Histogram
    prompt_tokens: Counter
    prompt_tokens_cached: Counter
    generation_tokens: Counter
    finished: dict[str, Counter]


class GatewayMetrics:
    """All metrics of one gateway."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._models: dict[str, ModelMetrics] = {}
        self._make_request_metrics()
        self._make_gateway_metrics()

    def _make_request_metrics(self) -> None:
        histogram, counter = self._histogram, self._counter
        lengths = length_buckets(1_000_000)
        self._ttft = histogram(
            "vllm:time_to_first_token_seconds", "Arrival to first token.", TTFT_BUCKETS_S
        )
        self._itl = histogram(
            "vllm:inter_token_latency_seconds", "Gap between tokens.", TOKEN_GAP_BUCKETS_S
        )
        self._second = histogram(
            "baton:time_to_second_token_seconds", "Arrival to second token.", TTFT_BUCKETS_S
        )
        self._moments = Histogram(
            "baton:request_moment_seconds",
            "From a worker's getting a request to a named moment of its way.",
            ("model_name", "moment"),
            buckets=TTFT_BUCKETS_S,
            registry=self.registry,
        )
        self._tpot = histogram(
            "vllm:request_time_per_output_token_seconds",
            "A request's mean time a token after the first.",
            TOKEN_GAP_BUCKETS_S,
        )
        self._e2e = histogram(
            "vllm:e2e_request_latency_seconds", "Arrival to end.", LATENCY_BUCKETS_S
        )
        self._prompt_len = histogram(
            "vllm:request_prompt_tokens", "Prompt tokens a request.", lengths
        )
        self._output_len = histogram(
            "vllm:request_generation_tokens", "Output tokens a request.", lengths
        )
        self._max_tokens = histogram(
            "vllm:request_params_max_tokens", "max_tokens a request.", lengths
        )
        self._n = histogram("vllm:request_params_n", "n a request.", N_BUCKETS)
        self._prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens of served requests.")
        self._prompt_cached = counter("vllm:prompt_tokens_cached", "Prompt tokens found cached.")
        self._generated = counter("vllm:generation_tokens", "Tokens received from workers.")
        self._success = Counter(
            "vllm:request_success",
            "Requests that ended, by reason.",
            ("model_name", "finished_reason"),
            registry=self.registry,
        )

    def _make_gateway_metrics(self) -> None:
        registry = self.registry
        self.inflight = Gauge(
            "baton:inflight_requests", "Prompts being served by this gateway.", registry=registry
        )
        self.worker_inflight = Gauge(
            "baton:worker_inflight_requests",
            "Requests of this gateway on a worker's stream.",
            ("worker",),
            registry=registry,
        )
        self.workers = Gauge(
            "baton:workers_live",
            "Workers that can be routed to, by role.",
            ("role",),
            registry=registry,
        )
        self.index_connected = Gauge(
            "baton:index_connected", "1 while the shared index answers.", registry=registry
        )
        self.split = Counter(
            "baton:requests_split",
            "Requests whose prompt was given to another worker.",
            registry=registry,
        )
        self.local = Counter(
            "baton:requests_local", "Requests that one worker ran alone.", registry=registry
        )
        self.retries = Counter(
            "baton:requests_rerouted",
            "Requests continued on another worker because theirs was lost.",
            registry=registry,
        )
        self.rejected = Counter(
            "baton:requests_rejected",
            "Requests answered with an error, by code.",
            ("code",),
            registry=registry,
        )
        self.route_seconds = Histogram(
            "baton:route_seconds",
            "Time to choose workers.",
            buckets=ROUTE_BUCKETS_S,
            registry=registry,
        )
        self.expected_cached = Counter(
            "baton:route_expected_cached_tokens",
            "Prompt tokens that the chosen workers were expected to hold and use.",
            registry=registry,
        )
        self.disconnects = Counter(
            "baton:client_disconnects", "Clients that left before the end.", registry=registry
        )

    def model(self, name: str) -> ModelMetrics:
        """The children of a model's metrics."""
        found = self._models.get(name)
        if found is None:
            found = self._models[name] = self._make_model(name)
        return found

    def moments(self, model: str, moments_ms: Mapping[str, float]) -> None:
        """Note when one request reached the moments that its worker names."""
        for moment, time_ms in moments_ms.items():
            self._moments.labels(model, moment).observe(time_ms / 1000)

    def routed(self, route: Route, query: RouteQuery, seconds: float) -> None:
        """Count one routing decision."""
        (self.split if route.is_split else self.local).inc()
        self.route_seconds.observe(seconds)
        best = max(candidate.cached_tokens for candidate in (route.owner, *route.prefill))
        self.expected_cached.inc(best)

    def render(self) -> bytes:
        """The text exposition of everything."""
        return generate_latest(self.registry)

    def _make_model(self, name: str) -> ModelMetrics:
        return ModelMetrics(
            time_to_first_token=self._ttft.labels(name),
            time_to_second_token=self._second.labels(name),
            inter_token_latency=self._itl.labels(name),
            time_per_output_token=self._tpot.labels(name),
            e2e_latency=self._e2e.labels(name),
            request_prompt_tokens=self._prompt_len.labels(name),
            request_generation_tokens=self._output_len.labels(name),
            request_max_tokens=self._max_tokens.labels(name),
            request_n=self._n.labels(name),
            prompt_tokens=self._prompt_tokens.labels(name),
            prompt_tokens_cached=self._prompt_cached.labels(name),
            generation_tokens=self._generated.labels(name),
            finished={reason: self._success.labels(name, reason) for reason in FINISHED_REASONS},
        )

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, ("model_name",), buckets=buckets, registry=self.registry)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, ("model_name",), registry=self.registry)
