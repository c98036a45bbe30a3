"""Whether this gateway can serve, and what it sees of its cluster."""

from __future__ import annotations

from typing import Any

from services.gateway.state import GatewayState


def health_report(state: GatewayState) -> tuple[bool, dict[str, Any]]:
    """Healthy while some live worker decodes (it can run prompts, too, when no prefill worker is left)."""
    workers = state.directory.known_workers()
    can_decode = any(
        is_live and info is not None and info.role.serves_decode for _, is_live, info, _ in workers
    )
    is_healthy = can_decode and not state.is_draining
    report = {
        "status": _status(state, can_decode, bool(workers)),
        "index": _index_status(state),
        "models": list(state.directory.models()),
        "inflight_requests": state.num_inflight,
        "workers": [
            {
                "id": worker_id,
                "role": None if info is None else info.role.value,
                "live": is_live,
                "inflight_requests": num_requests,
            }
            for worker_id, is_live, info, num_requests in workers
        ],
    }
    return is_healthy, report


def _status(state: GatewayState, can_decode: bool, knows_workers: bool) -> str:
    if state.is_draining:
        return "shutting down"
    if can_decode:
        return "ok"
    return "no live worker can decode" if knows_workers else "no worker found yet"


def _index_status(state: GatewayState) -> str:
    if state.index is None:
        return "none: serving from seed addresses"
    return "connected" if state.directory.index_is_connected else "away: serving from local view"
