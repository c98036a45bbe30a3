"""What a worker shows over HTTP: /metrics for scrapers, /health for probes."""

from __future__ import annotations

from http import HTTPStatus

import msgspec

from core.errors import ConfigError
from core.worker_info import WorkerInfo
from engine.messages import StepDone
from services.worker.http import Answer, HttpEndpoint
from services.worker.metrics import CONTENT_TYPE, FrontCounts, WorkerMetrics
from services.worker.prefill_client import PrefillCalls
from services.worker.registration import Registration
from services.worker.service import WorkerState


class WorkerPages:
    """The HTTP endpoint of one worker; without a port it keeps the metrics and serves nothing."""

    def __init__(self, state: WorkerState) -> None:
        self._state = state
        self._calls: PrefillCalls | None = None
        self._registration: Registration | None = None
        self._endpoint: HttpEndpoint | None = None
        self._details: dict[str, str] = {}
        self.metrics = WorkerMetrics("", "")

    @property
    def port(self) -> int:
        """The endpoint's port, -1 for none."""
        return self._endpoint.port if self._endpoint else -1

    async def listen(self, host: str, port: int) -> None:
        """Serve the pages on this port (0: a free one); -1 serves none."""
        if port < 0:
            return
        endpoint = HttpEndpoint({"/metrics": self._metrics_page, "/health": self._health_page})
        try:
            await endpoint.start(host, port)
        except OSError as error:
            reason = error.strerror or error
            raise ConfigError(f"--metrics-port: {host}:{port} cannot be bound: {reason}") from None
        self._endpoint = endpoint

    def begin(
        self,
        info: WorkerInfo,
        calls: PrefillCalls,
        registration: Registration,
        details: dict[str, str],
    ) -> None:
        """The engine is ready: metrics get their labels. details: what /health tells besides."""
        self._calls = calls
        self._details = details
        self._registration = registration
        cache_config = {
            "block_size": str(info.layout.block_size),
            "num_gpu_blocks": str(info.num_blocks),
            "cache_dtype": info.layout.groups[0].slot.dtype,
        }
        self.metrics = WorkerMetrics(info.models[0], info.id, cache_config)

    def note_step(self, step: StepDone) -> None:
        """Keep what a step says for the next scrape."""
        self.metrics.stats = step.stats
        for output in step.outputs:
            if output.finish_reason:
                self.metrics.count_finished(output.finish_reason)

    async def close(self) -> None:
        """Stop serving. Idempotent."""
        if self._endpoint is not None:
            await self._endpoint.close()
            self._endpoint = None

    def _metrics_page(self) -> Answer:
        num_calls = self._calls.num_open if self._calls else 0
        registration = self._registration
        self.metrics.front = FrontCounts(
            open_requests=self._state.streams.num_requests,
            open_prefill_streams=self._state.sessions.num_open + num_calls,
            index_connected=registration is not None and registration.is_connected,
            index_in_step=registration is not None and registration.is_in_step,
        )
        return Answer(self.metrics.render(), content_type=CONTENT_TYPE)

    def _health_page(self) -> Answer:
        state = self._state
        if state.error is not None:
            return _health("dead", state.error.message, HTTPStatus.SERVICE_UNAVAILABLE)
        if state.info is None:
            return _health("loading", "", HTTPStatus.SERVICE_UNAVAILABLE)
        return _health("ok", "", HTTPStatus.OK, **self._details)


def _health(status: str, message: str, code: HTTPStatus, **details: str) -> Answer:
    return Answer(msgspec.json.encode({"status": status, "message": message, **details}), code)
