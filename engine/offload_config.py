"""What can be set about KV below the device pool."""

from __future__ import annotations

from dataclasses import dataclass, fields

from core.errors import ConfigError

POLICIES = ("arc", "lru")
BACKENDS = ("native", "lmcache")
STORE_MODES = ("eager", "lazy")
REMOTE_SCHEMES = {"native": ("redis", "rediss", "unix"), "lmcache": ("lm",)}
"""Schemes of the remote store's address that each backend speaks."""

_OF_TIER = {"disk_size": "disk_dir", "disk_threshold": "disk_dir", "remote_size": "remote_url"}
"""What says nothing without the setting that makes its tier."""

_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class OffloadConfig:
    """One worker's tiers. Each field is a flag behind `--kv-offloading-`.

    size: memory of the host tier, GiB; 0 for none.
    backend: whose store the remote tier is: `native` speaks to a Redis, `lmcache` to an LMCache server.
    policy: which blocks leave a full tier first: `arc` weighs recent against frequent use, `lru` goes by recent use.
    store: when blocks go down: `eager` as they are full, `lazy` as they are about to be evicted from the pool.
    store_threshold: uses before a block goes to the host tier; 0 stores every block.
    disk_dir: folder of the disk tier, which a restarted worker finds again; empty for none. Workers of one machine may
        share it: each takes a folder of its own inside.
    disk_size: size of the disk tier, GiB.
    disk_threshold: uses before a block goes to the disk tier; 0 stores every block.
    remote_url: the store that a fleet shares, `redis://host:port/db` or `lm://host:port`; empty for none.
    remote_size: what this worker adds to the remote store at most, GiB.
    load_rate: limit of what any one tier gives back, in bytes a second, 0 for none; for tests and benchmarks.
    """

    size: float = 0.0
    backend: str = "native"
    policy: str = POLICIES[0]
    store: str = "eager"
    store_threshold: int = 0
    disk_dir: str = ""
    disk_size: float = 4.0
    disk_threshold: int = 2
    remote_url: str = ""
    remote_size: float = 4.0
    load_rate: float = 0.0

    def __post_init__(self) -> None:
        _check_choice("backend", self.backend, BACKENDS)
        _check_choice("policy", self.policy, POLICIES)
        _check_choice("store", self.store, STORE_MODES)
        for name in ("size", "store_threshold", "disk_threshold", "load_rate"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{_flag(name)}: {getattr(self, name)} must be at least 0")
        for name in ("disk_size", "remote_size"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{_flag(name)}: {getattr(self, name)} must be above 0")
        self._check_tiers()
        self._check_remote()

    def _check_tiers(self) -> None:
        """A setting of a tier that there is not would be ignored."""
        for field in fields(self):
            owner = _OF_TIER.get(field.name)
            value = getattr(self, field.name)
            if owner and value != field.default and not getattr(self, owner):
                raise ConfigError(f"{_flag(field.name)}: {value} needs {_flag(owner)}")

    def _check_remote(self) -> None:
        schemes = REMOTE_SCHEMES[self.backend]
        if self.backend == "lmcache" and not self.remote_url:
            raise ConfigError(
                "--kv-offloading-backend: 'lmcache' needs --kv-offloading-remote-url lm://host:port"
            )
        if self.remote_url and self.remote_url.partition("://")[0] not in schemes:
            raise ConfigError(
                f"--kv-offloading-remote-url: {self.remote_url!r} must begin with "
                f"{' or '.join(f'{scheme}://' for scheme in schemes)} for backend {self.backend!r}"
            )

    @property
    def is_on(self) -> bool:
        """Whether there is any tier."""
        return bool(self.size or self.disk_dir or self.remote_url)

    @property
    def host_bytes(self) -> int:
        """Most bytes of the host tier."""
        return int(self.size * _GIB)

    @property
    def disk_bytes(self) -> int:
        """Most bytes of the disk tier's files."""
        return int(self.disk_size * _GIB)

    @property
    def remote_bytes(self) -> int:
        """Most bytes of blocks that this worker has in the remote store."""
        return int(self.remote_size * _GIB)


def _flag(name: str) -> str:
    return f"--kv-offloading-{name.replace('_', '-')}"


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{_flag(name)}: {value!r} is unknown; known: {', '.join(choices)}")
