"""One engine put together from its config: model, pool, scheduler, movers.

Owns the order of start: the model first, since its shapes decide the pool; the pool before the movers, which write into
it; tiers before the transports, so that what is wrong with them is found while no thread runs that a process would wait
for; the word that all is ready last.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import replace

import torch

from core.block_hash import HashRoot
from core.blocks import BlockLife
from core.errors import ConfigError
from core.ids import Epoch
from core.kv_identity import KVIdentity
from core.kv_layout import KVLayout
from core.worker_info import WorkerRates
from engine.channel import Inbox
from engine.config import HOST_MAX_STEP_TOKENS, HOST_MIN_STEP_TOKENS, EngineConfig
from engine.core import EngineCore
from engine.devices import choose_device
from engine.kvcache.block_pool import BlockPool
from engine.kvcache.device_storage import allocate_device_pool
from engine.kvcache.storage import Storage, allocate_pool
from engine.loading.load import LoadedModel, load_model
from engine.loading.sources import resolve_source
from engine.messages import EngineProgress, EngineReady, ToFront, TransportOffer
from engine.movers import make_movers
from engine.offload.offload import Offload
from engine.offload.opening import open_tiers
from engine.runner.model_runner import ModelRunner
from engine.sampler.sampler import Sampler
from engine.scheduler.config import SchedulerConfig
from engine.scheduler.scheduler import Scheduler
from kernels import ops
from kernels.backends import BackendChoice, choose_backend, timed_alone
from kvtransfer.tiers.connector import KVConnector

_EPOCH_BITS = 63
_STEP_SECONDS = 0.2
_MEASURE_WAIT_S = 30.0


def assemble(config: EngineConfig, inbox: Inbox, send: Callable[[ToFront], None]) -> EngineCore:
    """Load and allocate everything, send EngineReady, and return an engine that is ready to run.

    Raises ConfigError and ModelLoadError, each with one sentence.
    """
    device = choose_device(config.device, config.kernel_backend)
    kernels = _use_kernels(config, device, send)
    send(EngineProgress(f"loading {config.model}"))
    source = resolve_source(config.model, config.revision)
    model = load_model(source, config.dtype, _weight_format(config, kernels), device)
    config = _with_kv_dtype(config, model, kernels)
    max_model_len = _max_model_len(config, model)
    layout = KVLayout(
        config.block_size, model.config.kv_groups(config.kv_dtype), wire_dtype=config.wire_dtype
    )
    num_blocks = _num_blocks(config, layout, max_model_len)
    send(EngineProgress(f"allocating {num_blocks} blocks of {layout.block_bytes} bytes"))
    storage = _allocate(layout, num_blocks, device)
    pool = BlockPool(BlockLife(num_blocks, storage.memory.generations))
    runner = ModelRunner(model.model, layout, storage, config.layers_per_range)
    rate = _measured_rate(config, kernels, runner, send)
    identity = _identity(config, model, kernels)
    root = _hash_root(config, identity)
    connector = open_tiers(config.offload, layout, root, num_blocks, inbox.post)
    receivers, senders = make_movers(config, pool.life, storage, layout, inbox.post)
    scheduler = Scheduler(_scheduler_config(config, model, root, max_model_len, rate), pool)
    core = EngineCore(
        config=config,
        inbox=inbox,
        send=send,
        identity=identity,
        layout=layout,
        scheduler=scheduler,
        pool=pool,
        storage=storage,
        runner=runner,
        sampler=Sampler(),
        eos_token_ids=frozenset(model.eos_token_ids),
        receivers=receivers,
        senders=senders,
        offload=_offload(config, connector, scheduler, storage, inbox, rate),
    )
    send(
        EngineReady(
            epoch=Epoch(secrets.randbits(_EPOCH_BITS)),
            identity=identity,
            layout=layout,
            hash_root=root,
            num_blocks=pool.num_usable,
            max_model_len=max_model_len,
            transports=[
                TransportOffer(kind, list(addresses)) for kind, addresses in receivers.offers
            ],
            bundle=model.bundle,
            rates=WorkerRates(rate, load_tokens_per_s=_load_rate(connector, layout)),
            kernels=kernels.description,
        )
    )
    return core


def _measured_rate(
    config: EngineConfig,
    kernels: BackendChoice,
    runner: ModelRunner,
    send: Callable[[ToFront], None],
) -> float:
    """Prompt tokens a second; workers that start together, and share their cores, measure one at a time."""
    send(EngineProgress("measuring the prefill rate"))
    with timed_alone(kernels, config.core_ledger, _MEASURE_WAIT_S):
        return runner.measure_prefill_rate(_STEP_SECONDS)


def _scheduler_config(
    config: EngineConfig, model: LoadedModel, root: HashRoot, max_model_len: int, rate: float
) -> SchedulerConfig:
    return SchedulerConfig(
        block_size=config.block_size,
        max_num_batched_tokens=(
            config.max_num_batched_tokens or _step_budget(rate, config.max_num_seqs)
        ),
        max_num_seqs=config.max_num_seqs,
        max_model_len=max_model_len,
        eos_token_ids=frozenset(model.eos_token_ids),
        vocab_size=model.config.vocab_size,
        policy=config.scheduling_policy,
        hash_root=root if config.enable_prefix_caching else None,
    )


def _offload(
    config: EngineConfig,
    connector: KVConnector,
    scheduler: Scheduler,
    storage: Storage,
    inbox: Inbox,
    rate: float,
) -> Offload:
    """The tiers. A lazy store keeps safe what two steps may take, as the peer has it."""
    two_steps = 2 * -(-scheduler.config.max_num_batched_tokens // config.block_size)
    return Offload(
        connector,
        scheduler,
        storage,
        inbox.post,
        lazy_blocks=two_steps if config.offload.store == "lazy" else 0,
        arriving_share=config.arriving_share,
        prefill_tokens_per_s=rate,
    )


def _load_rate(connector: KVConnector, layout: KVLayout) -> float:
    """Tokens a second that the slowest tier of our own gives back, as measured; 0 without one."""
    rates = [connector.bytes_per_s(name) for name in connector.own_names]
    return min(rates, default=0.0) / layout.block_bytes * layout.block_size


def _hash_root(config: EngineConfig, identity: KVIdentity) -> HashRoot:
    return HashRoot.of(
        identity,
        algorithm=config.prefix_caching_hash_algo,
        lossy_settings=config.lossy_settings,
    )


def _allocate(layout: KVLayout, num_blocks: int, device: torch.device) -> Storage:
    if device.type == "cpu":
        return allocate_pool(layout, num_blocks)
    return allocate_device_pool(layout, num_blocks, device)


def _use_kernels(
    config: EngineConfig, device: torch.device, send: Callable[[ToFront], None]
) -> BackendChoice:
    """Choose what this process computes with, put it in use and say what it is."""
    kernels = choose_backend(
        config.kernel_backend,
        config.dtype,
        config.num_threads,
        core_ledger=config.core_ledger,
        device=device.type,
    )
    ops.use_backend(kernels.backend)
    # The kernels' own threads share the cores with whatever torch still does: there it is one thread.
    torch.set_num_threads((config.num_threads or 1) if kernels.name == "reference" else 1)
    send(EngineProgress(f"kernels: {kernels.description}"))
    return kernels


def _weight_format(config: EngineConfig, kernels: BackendChoice) -> str:
    if config.weight_format != "auto":
        return config.weight_format
    return "quantized" if kernels.keeps_blocks else "expanded"


def _with_kv_dtype(
    config: EngineConfig, model: LoadedModel, kernels: BackendChoice
) -> EngineConfig:
    """`auto` resolved: a backend that rounds the inputs of kept blocks may hold their KV in fewer bits as well."""
    is_kept = model.weight_format == "gguf"
    if config.kv_cache_dtype != "auto" or not (kernels.kv_dtype and is_kept):
        return config
    return replace(config, kv_cache_dtype=kernels.kv_dtype)


def _identity(config: EngineConfig, model: LoadedModel, kernels: BackendChoice) -> KVIdentity:
    rounds = kernels.activation_dtype and model.weight_format == "gguf"
    return KVIdentity(
        model_digest=model.model_digest,
        weight_format=model.weight_format,
        activation_dtype=kernels.activation_dtype if rounds else config.dtype,
        adapter_digest="",
        group_shapes=model.config.group_shapes(),
    )


def _max_model_len(config: EngineConfig, model: LoadedModel) -> int:
    limit = model.config.max_position
    if config.max_model_len > limit:
        raise ConfigError(
            f"--max-model-len: {config.max_model_len} exceeds the model's own limit of {limit}"
        )
    return config.max_model_len or limit


def _num_blocks(config: EngineConfig, layout: KVLayout, max_model_len: int) -> int:
    """Blocks of the pool, the null block included; at least one longest request must fit."""
    usable = config.num_blocks or config.kv_cache_memory_bytes // layout.block_bytes
    needed = layout.num_blocks(max_model_len)
    if usable < needed:
        raise ConfigError(
            f"the KV pool holds {usable * config.block_size} tokens, less than one request of "
            f"--max-model-len ({max_model_len}); raise --kv-cache-memory-bytes to "
            f"{needed * layout.block_bytes} or lower --max-model-len"
        )
    return usable + 1


def _step_budget(prefill_tokens_per_s: float, max_num_seqs: int) -> int:
    """Tokens that the measured rate does in 200 ms, so that nothing else waits longer for a step."""
    budget = int(prefill_tokens_per_s * _STEP_SECONDS)
    budget = min(max(budget, HOST_MIN_STEP_TOKENS), HOST_MAX_STEP_TOKENS)
    return max(budget, max_num_seqs)
