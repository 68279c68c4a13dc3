"""The signatures of the models: a cache that is refreshed in the background."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from contextvars import Context
from dataclasses import dataclass
from math import inf
from typing import Any, Final

from gateway.errors import BadUpstream, GatewayError, InputMismatch
from gateway.fleet.dispatch import Dispatcher
from gateway.fleet.transports import triton_model_path
from gateway.messages import join_names, quote_text
from gateway.tasks import TaskSet
from gateway.telemetry.request_info import measure_upstream_time
from gateway.tensors.signature import Signature, build_signature
from gateway.triton.request_target import RequestTarget

REFRESH_AFTER_S: Final = 1.5  # an older signature is refreshed in the background
STALE_AFTER_S = 2.0  # a request waits for a newer signature
# and then uses the one that is stale, until it expires: Triton may be busy.
MAX_REFRESH_WAIT_S: Final = 0.5
EXPIRE_AFTER_S: Final = 10.0  # an older signature is not used
METADATA_TIMEOUT_S: Final = 5.0
MAX_PARALLEL_READS: Final = 16  # configs that are read at the same time


@dataclass
class CachedSignature:
    """The signature of a version that was read last, and the task that reads it now."""

    signature: Signature | None = None
    read_at: float = -inf  # of a signature that is invalid as well
    next_read_at: float = -inf  # when a read in the background may begin
    reading: asyncio.Task[Signature] | None = None


class SignatureCache:
    """The signatures of the models, read from the replicas' metadata and configs, and kept fresh."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._loop = asyncio.get_running_loop()
        self._cached: dict[tuple[str, str], CachedSignature] = {}
        self._reads = TaskSet()

    def close(self) -> None:
        for task in self._reads:
            task.cancel()

    async def get_signature(
        self, model: str, version: str = "", timeout_s: float = METADATA_TIMEOUT_S
    ) -> Signature:
        """Return the signature of a model that was resolved, which is loaded on demand within the timeout.

        Raises `UnknownModel` or `ModelNotReady`.
        """
        if signature := self.find_signature(model, version):
            return signature
        await self._dispatcher.wait_for_model(model, version, timeout_s)
        key = (model, version)
        with measure_upstream_time():
            cached = self._find_cached(key, EXPIRE_AFTER_S)
            if cached is not None and cached.reading is not None:
                await asyncio.wait([cached.reading], timeout=MAX_REFRESH_WAIT_S)
                cached = self._find_cached(key, inf)  # none if the refresh failed
            if cached is not None and cached.signature is not None:
                return cached.signature
            return await asyncio.shield(self._start_reading(key))

    def find_signature(self, model: str, version: str) -> Signature | None:
        """Return the cached signature, unless it is stale; an older one is refreshed in the background."""
        cached = self._find_cached((model, version), STALE_AFTER_S)
        return None if cached is None else cached.signature

    def _find_cached(self, key: tuple[str, str], max_age_s: float) -> CachedSignature | None:
        cached = self._cached.get(key)
        if cached is None or cached.read_at == -inf:
            return None
        age_s = self._loop.time() - cached.read_at
        if REFRESH_AFTER_S < age_s <= EXPIRE_AFTER_S:
            self._read_in_background(key)
        return cached if age_s <= max_age_s else None

    def find_remembered_signature(self, model: str, version: str) -> Signature | None:
        """Return the signature that was read last, whatever has become of the model."""
        cached = self._cached.get((model, version))
        return None if cached is None else cached.signature

    def find_or_start_reading(self, model: str) -> Signature | None:
        """Return the last known signature, and read a new one in the background if it is old."""
        key = (model, "")
        cached = self._cached.get(key)
        if cached is None:
            cached = self._cached[key] = CachedSignature()
        now = self._loop.time()
        if now - cached.read_at > EXPIRE_AFTER_S and now >= cached.next_read_at:
            # A config that cannot be used is not read again for each request.
            cached.next_read_at = now + REFRESH_AFTER_S
            self._read_in_background(key)
        return cached.signature

    async def read_unknown_signatures(self, models: Iterable[str]) -> None:
        """Read the signature of each model that was never read, unless that fails."""
        unknown = [model for model in models if not self.find_remembered_signature(model, "")]
        await read_each(unknown, self.get_signature)

    def invalidate(self, model: str) -> None:
        """Drop the cached signatures of a model that was loaded or unloaded, or contradicts them."""
        for key, cached in self._cached.items():
            if key[0] == model:
                cached.read_at = -inf
                cached.reading = None  # what is read now may be outdated

    def _read_in_background(self, key: tuple[str, str]) -> None:
        # The request that triggers the read does not wait for it, and its log line has no part of it.
        Context().run(self._start_reading, key)

    def _start_reading(self, key: tuple[str, str]) -> asyncio.Task[Signature]:
        cached = self._cached.setdefault(key, CachedSignature())
        if cached.reading is None:
            cached.reading = self._reads.start(self._read_signature(*key))
            cached.reading.add_done_callback(lambda task: self._finish_reading(cached, task))
        return cached.reading

    def _finish_reading(self, cached: CachedSignature, task: asyncio.Task[Signature]) -> None:
        failure = None if task.cancelled() else task.exception()
        if cached.reading is not task:
            return  # `invalidate` was called meanwhile
        cached.reading = None
        cached.read_at = -inf
        if not task.cancelled() and failure is None:
            cached.read_at = self._loop.time()
            cached.signature = task.result()

    async def _read_signature(self, model: str, version: str) -> Signature:
        # The model may have been unloaded since the request waited for it: it waits again.
        target = RequestTarget(model, version, METADATA_TIMEOUT_S, can_activate=True)
        metadata, config = await asyncio.gather(
            self._dispatcher.request_json(target, triton_model_path(model, version)),
            self._read_config(target),
        )
        try:
            return build_signature(metadata, config, version)
        except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as exc:
            raise BadUpstream(f"the replica returned invalid metadata for model '{model}'") from exc

    async def _read_config(self, target: RequestTarget) -> Any:
        path = triton_model_path(target.model, target.version)
        return await self._dispatcher.request_json(target, f"{path}/config")

    async def read_configs(self, models: Iterable[str], store: Callable[[str, Any], None]) -> None:
        """Pass the config of each model to `store`, unless the model is not loaded any longer."""

        async def read(model: str) -> None:
            target = RequestTarget(model, timeout_s=METADATA_TIMEOUT_S)
            store(model, await self._read_config(target))

        await read_each(sorted(models), read)


async def read_each(models: Iterable[str], read: Callable[[str], Awaitable[object]]) -> None:
    """Read something of each model, a few at a time, and leave out what cannot be read."""
    semaphore = asyncio.Semaphore(MAX_PARALLEL_READS)

    async def try_to_read(model: str) -> None:
        with suppress(GatewayError):
            async with semaphore:
                await read(model)

    await asyncio.gather(*map(try_to_read, models))


def select_outputs(model: Signature, requested: Sequence[str]) -> tuple[str, ...]:
    """Return the requested outputs; empty means all. Raises `InputMismatch` for an unknown output."""
    if not requested:
        return ()
    unknown = [name for name in requested if name not in model.outputs]
    if unknown:
        raise InputMismatch(
            f"the model has no output {quote_text(unknown[0])}; its outputs are {join_names(model.outputs)}"
        )
    return tuple(requested)
