"""The models that can be asked for: text bundles by digest, learned from workers.

Owns the bundles. A bundle is fetched once for each digest and kept, so a model that loses all its workers stays known
(its requests are answered 503, not 404).
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

import grpc.aio

from core.errors import ServeError
from services.gateway.text.bundle import TextBundle
from services.rpc.bundle import BundleBuilder
from services.rpc.channel import open_channel
from services.rpc.protocol import PROTOCOL_VERSION
from services.rpc.status import error_of_status
from services.rpc.v1 import baton_pb2 as pb
from services.rpc.v1.baton_pb2_grpc import WorkerStub

logger = logging.getLogger(__name__)

_FETCH_TIMEOUT_S = 60.0
_RETRY_PAUSE_S = 1.0


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One served name, as of now.

    name: what clients ask for.
    bundle_digest, text: its tokenizer, template and defaults.
    max_model_len: most tokens of prompt and answer together, on the longest worker.
    created_s: when this gateway first saw it, seconds since 1970.
    """

    name: str
    bundle_digest: str
    text: TextBundle
    max_model_len: int
    created_s: int


class BundleStore:
    """Text bundles by digest. A fetch that fails is tried again; several askers share one fetch."""

    def __init__(self) -> None:
        self._bundles: dict[str, TextBundle] = {}
        self._fetches: dict[str, asyncio.Task[None]] = {}

    def get(self, digest: str) -> TextBundle | None:
        """The bundle, if it is here."""
        return self._bundles.get(digest)

    def want(self, digest: str, address: str) -> None:
        """See that the bundle comes, from the worker at `address` if no other is asked already."""
        if digest not in self._bundles and digest not in self._fetches:
            task = asyncio.create_task(self._fetch(digest, address), name=f"bundle {digest[:12]}")
            self._fetches[digest] = task
            task.add_done_callback(lambda _: self._fetches.pop(digest, None))

    async def close(self) -> None:
        """Stop fetching."""
        tasks = list(self._fetches.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _fetch(self, digest: str, address: str) -> None:
        try:
            async with asyncio.timeout(_FETCH_TIMEOUT_S):
                files = await fetch_bundle(address, digest)
            self._bundles[digest] = await asyncio.to_thread(TextBundle, files)
            logger.info("model bundle %s learned from %s", digest[:12], address)
        except (ServeError, TimeoutError) as error:
            logger.warning("model bundle %s from %s: %s", digest[:12], address, error)
            await asyncio.sleep(_RETRY_PAUSE_S)


async def fetch_bundle(address: str, digest: str) -> dict[str, bytes]:
    """The files of a worker's model bundle, if their digest is the one expected."""
    builder = BundleBuilder()
    request = pb.DescribeRequest(protocol_version=PROTOCOL_VERSION, with_bundle=True)
    try:
        async with open_channel(address) as channel:
            async for frame in WorkerStub(channel).Describe(request):
                if frame.HasField("piece"):
                    builder.add(frame.piece)
    except grpc.aio.AioRpcError as error:
        raise error_of_status(error, address) from None
    return builder.finish(digest)


async def fetch_record(address: str, timeout_s: float) -> pb.WorkerRecord:
    """A worker's record, asked directly."""
    request = pb.DescribeRequest(protocol_version=PROTOCOL_VERSION, with_bundle=False)
    try:
        async with open_channel(address) as channel:
            async for frame in WorkerStub(channel).Describe(request, timeout=timeout_s):
                if frame.HasField("record"):
                    record: pb.WorkerRecord = frame.record
                    return record
    except grpc.aio.AioRpcError as error:
        raise error_of_status(error, address) from None
    raise ServeError(f"{address}: the worker described nothing")
