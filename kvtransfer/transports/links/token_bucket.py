"""How fast a sender may send."""

from __future__ import annotations

from kvtransfer.transports.base import MAX_SLICE_BYTES

MAX_LIMITED_SLICE_BYTES = 64 * 1024
"""Most bytes sent at once under a limit, so that progress is smooth."""

_SLICE_SECONDS = 0.005
_BURST_SECONDS = 0.004


class TokenBucket:
    """Allows `rate_bytes_s` on average in slices of 5 ms, at most 64 KiB; 0 means no limit.

    It saves up a slice, or 4 ms where that is more: timers wake a thread to the millisecond only.
    """

    def __init__(self, rate_bytes_s: float) -> None:
        self._rate_bytes_s = rate_bytes_s
        self.slice_bytes = MAX_SLICE_BYTES
        if rate_bytes_s > 0:
            self.slice_bytes = max(
                1, min(MAX_LIMITED_SLICE_BYTES, int(rate_bytes_s * _SLICE_SECONDS))
            )
        self._burst_bytes = max(float(self.slice_bytes), rate_bytes_s * _BURST_SECONDS)
        self._tokens = float(self.slice_bytes)
        self._updated_at_s = 0.0

    @property
    def is_limited(self) -> bool:
        """Whether there is a limit at all."""
        return self._rate_bytes_s > 0

    def wait_s(self, now_s: float) -> float:
        """Seconds until one slice may be sent; 0 when it may be sent now."""
        if self._rate_bytes_s <= 0:
            return 0.0
        elapsed_s = max(0.0, now_s - self._updated_at_s)
        self._updated_at_s = now_s
        self._tokens = min(self._burst_bytes, self._tokens + elapsed_s * self._rate_bytes_s)
        return max(0.0, (self.slice_bytes - self._tokens) / self._rate_bytes_s)

    def spend(self, num_bytes: int) -> None:
        """Bytes were sent."""
        if self._rate_bytes_s > 0:
            self._tokens -= num_bytes
