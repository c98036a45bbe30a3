"""Everything an engine process is told when it starts.

Built from flags, environment and YAML in services/config and handed over as JSON; nothing else reads those sources.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from core.block_hash import DEFAULT_HASH_BLOCK_SIZE, HashAlgorithm
from core.errors import ConfigError
from core.kv_layout import KV_DTYPE_ALIASES, KV_DTYPES
from core.worker_info import Role
from engine.offload_config import OffloadConfig

ACTIVATION_DTYPES = ("float32", "bfloat16", "float16")
WEIGHT_FORMATS = ("auto", "expanded", "quantized")
KERNEL_BACKENDS = ("auto", "cpu", "reference", "triton")
DEVICES = ("auto", "cpu", "cuda")
SCHEDULING_POLICIES = ("fcfs", "priority")
KV_TRANSPORTS = ("nixl", "mooncake", "shm", "tcp")
RAW = "raw"
HOST_MIN_STEP_TOKENS, HOST_MAX_STEP_TOKENS = 64, 2048


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """One engine. Each field names its flag where the flag differs.

    model: GGUF file, model folder or Hub id.
    revision: Hub revision, empty for the default branch.
    role: what the worker serves.
    device: where weights, KV and steps are: `cpu` or `cuda`; `auto` takes the card where there is one.
    dtype: precision of activations and of expanded weights.
    weight_format: `quantized` keeps weights as small as their GGUF blocks, `expanded` dequantises them at load;
        `auto` keeps them small where the kernels compute on them.
    kernel_backend: code of the numeric operations: `cpu` and `reference` on the host, `triton` on a card; `auto` takes
        the fastest that is there and right for `dtype`, and says which.
    kv_cache_dtype: how the pool holds KV; `auto` is float16 beside weights that host kernels keep in blocks, else the
        activations' type; fp8 and int8 ones are smaller and lossier.
    kv_wire_dtype: how this worker takes in KV that others computed: `raw` bit for bit as it keeps it itself, and only
        from workers that keep it likewise; a KV dtype (one that `--kv-cache-dtype` takes) makes whoever computed it
        send that, which may be smaller and lossier.
    block_size: tokens in a block, a multiple of the hash block size.
    max_model_len: most tokens of prompt and answer together; 0 takes the model's own limit.
    max_num_seqs: most sequences in one step.
    max_num_batched_tokens: tokens in one step; 0 measures the prefill rate and takes what it does in 200 ms.
    num_blocks: blocks in the pool (`--num-gpu-blocks-override`); 0 derives it from kv_cache_memory_bytes.
    kv_cache_memory_bytes: bytes of the pool when num_blocks is 0; beside a card, of its mirror on the host as well.
    enable_prefix_caching: whether finished blocks stay findable.
    prefix_caching_hash_algo: how blocks are hashed.
    scheduling_policy: `fcfs`, or `priority` (lower value first).
    num_threads: most threads of the kernels; 0 takes all cores where workers share them through the core ledger, one
        where the kernels cannot (torch's own threads).
    core_ledger: file through which the workers on a machine share its cores; `auto` is one for each user, `none` makes
        every worker use all its threads whatever others do.
    data_host: address the data endpoint listens on.
    kv_transports: how KV may come from other workers, which must name it too, best first, between commas: `tcp`; `shm`
        unless `--ipc-dir` is `none`; `nixl` and `mooncake` where their packages are installed.
    ipc_dir: directory in which workers of this host find each other to hand KV over in shared memory (`--ipc-dir`);
        `auto` is one for each user, `none` leaves only tcp.
    shm_checksums: whether KV in shared memory is checked by CRC-32C, as it is over tcp.
    link_rate_bytes_s: limit of what this worker sends over data links, in bytes a second, 0 for none (`--link-rate`).
    transfer_window_bytes: bytes of one prompt's KV that may be on their way to a decode worker, unanswered
        (`--transfer-window`).
    session_lease_ms: how long P keeps a session that nobody renews.
    prefill_timeout_ms: how long D waits for a sign of life of one prefill attempt before it gives the attempt up.
    arriving_share: share of the pool that sequences not yet decoding may hold on a decode worker.
    layers_per_range: layers that leave together while later ones compute; 0 picks a third of the model.
    offload: where KV goes that the pool has no room for.
    """

    model: str
    revision: str = ""
    role: Role = Role.MIXED
    device: str = "auto"
    dtype: str = "float32"
    weight_format: str = "auto"
    kernel_backend: str = "auto"
    kv_cache_dtype: str = "auto"
    kv_wire_dtype: str = "raw"
    block_size: int = 16
    max_model_len: int = 0
    max_num_seqs: int = 128
    max_num_batched_tokens: int = 0
    num_blocks: int = 0
    kv_cache_memory_bytes: int = 1 << 30
    enable_prefix_caching: bool = True
    prefix_caching_hash_algo: HashAlgorithm = HashAlgorithm.SHA256
    scheduling_policy: str = "fcfs"
    num_threads: int = 0
    core_ledger: str = "auto"
    data_host: str = "127.0.0.1"
    kv_transports: tuple[str, ...] = ("shm", "tcp")
    ipc_dir: str = "auto"
    shm_checksums: bool = False
    link_rate_bytes_s: float = 0.0
    transfer_window_bytes: int = 64 << 20
    session_lease_ms: int = 30_000
    prefill_timeout_ms: int = 30_000
    arriving_share: float = 0.5
    layers_per_range: int = 0
    offload: OffloadConfig = field(default_factory=OffloadConfig)

    def __post_init__(self) -> None:
        _check_choice("device", self.device, DEVICES)
        _check_choice("dtype", self.dtype, ACTIVATION_DTYPES)
        _check_choice("weight-format", self.weight_format, WEIGHT_FORMATS)
        _check_choice("kernel-backend", self.kernel_backend, KERNEL_BACKENDS)
        kv_dtypes = ("auto", *KV_DTYPES, *KV_DTYPE_ALIASES)
        _check_choice("kv-cache-dtype", self.kv_cache_dtype, kv_dtypes)
        wire_dtypes = (RAW, *KV_DTYPES, *KV_DTYPE_ALIASES)
        _check_choice("kv-wire-dtype", self.kv_wire_dtype, wire_dtypes)
        _check_choice("scheduling-policy", self.scheduling_policy, SCHEDULING_POLICIES)
        if self.block_size < 1 or self.block_size % DEFAULT_HASH_BLOCK_SIZE:
            raise ConfigError(
                f"--block-size: {self.block_size} must be a positive multiple of {DEFAULT_HASH_BLOCK_SIZE}"
            )
        _check_least("max-model-len", self.max_model_len, 0)
        _check_least("max-num-seqs", self.max_num_seqs, 1)
        _check_least("max-num-batched-tokens", self.max_num_batched_tokens, 0)
        _check_least("num-gpu-blocks-override", self.num_blocks, 0)
        _check_least("kv-cache-memory-bytes", self.kv_cache_memory_bytes, 1)
        _check_least("num-threads", self.num_threads, 0)
        if not self.core_ledger:
            raise ConfigError("--core-ledger: '' must be `auto`, `none` or a file")
        for kind in self.kv_transports:
            _check_choice("kv-transports", kind, KV_TRANSPORTS)
        if not self.kv_transports or len(set(self.kv_transports)) < len(self.kv_transports):
            named = ",".join(self.kv_transports)
            raise ConfigError(
                f"--kv-transports: {named!r} must name one or more of {', '.join(KV_TRANSPORTS)}, each once"
            )
        if not self.ipc_dir:
            raise ConfigError("--ipc-dir: '' must be `auto`, `none` or a directory")
        _check_least("link-rate", self.link_rate_bytes_s, 0)
        _check_least("transfer-window", self.transfer_window_bytes, 1)
        _check_least("session-lease-ms", self.session_lease_ms, 1)
        _check_least("prefill-timeout-ms", self.prefill_timeout_ms, 1)
        _check_least("layers-per-range", self.layers_per_range, 0)
        if self.offload.is_on and not self.enable_prefix_caching:
            raise ConfigError(
                "--kv-offloading-size: tiers find blocks by their hashes, so --enable-prefix-caching must be on"
            )
        if not 0.0 < self.arriving_share <= 1.0:
            raise ConfigError(f"--arriving-share: {self.arriving_share} must be in (0, 1]")
        if 0 < self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"--max-num-batched-tokens: {self.max_num_batched_tokens} must be at least "
                f"--max-num-seqs ({self.max_num_seqs})"
            )

    @property
    def kv_dtype(self) -> str:
        """What the pool holds, under its one name: what layout and hash root are made of."""
        if self.kv_cache_dtype == "auto":
            return self.dtype
        return KV_DTYPE_ALIASES.get(self.kv_cache_dtype, self.kv_cache_dtype)

    @property
    def wire_dtype(self) -> str | None:
        """How KV is taken in, under its one name; None for raw."""
        if self.kv_wire_dtype == RAW:
            return None
        return KV_DTYPE_ALIASES.get(self.kv_wire_dtype, self.kv_wire_dtype)

    @property
    def lossy_settings(self) -> list[str]:
        """What makes this worker's KV other than the model's own: it shares hashes with those that do the same."""
        settings = [f"kv_dtype={self.kv_dtype}"]
        if self.wire_dtype is not None:
            settings.append(f"wire_dtype={self.wire_dtype}")
        return settings


def _check_choice(flag: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"--{flag}: {value!r} is unknown; known: {', '.join(choices)}")


def _check_least(flag: str, value: float, least: float) -> None:
    if value < least:
        raise ConfigError(f"--{flag}: {value} must be at least {least}")
