"""The signatures of the models: a cache that is refreshed in the background."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from contextvars import Context
from dataclasses import dataclass
from typing import Any

from gateway.errors import BadUpstream, GatewayError, InputMismatch
from gateway.fleet.dispatch import Dispatcher
from gateway.fleet.transports import triton_model_path
from gateway.messages import join_names, quote_text
from gateway.telemetry.request_info import current_request_info, measure_upstream_time
from gateway.tensors.signature import Signature, build_signature
from gateway.triton.request_target import RequestTarget

REFRESH_AFTER_S = 1.5  # an older signature is refreshed in the background
STALE_AFTER_S = 2.0  # a request waits for a newer signature
MAX_REFRESH_WAIT_S = (
    0.5  # and then uses the one that is stale, until it expires: Triton may be busy
)
EXPIRE_AFTER_S = 10.0  # an older signature is not used
METADATA_TIMEOUT_S = 5.0
MAX_PARALLEL_READS = 16  # configs that are read at the same time


@dataclass
class CachedSignature:
    """A signature, when it was read, and the task that reads it again."""

    signature: Signature
    read_at: float
    refresh_task: asyncio.Task[Signature] | None = None


class SignatureCache:
    """The signatures of the models, read from the replicas' metadata and configs, and kept fresh."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._signatures: dict[tuple[str, str], CachedSignature] = {}
        self._remembered: dict[tuple[str, str], Signature] = {}  # the last ones of all models
        self._next_reads: dict[
            tuple[str, str], float
        ] = {}  # when a read in the background may begin
        self._pending_reads: dict[tuple[str, str], asyncio.Task[Signature]] = {}

    def close(self) -> None:
        for task in self._pending_reads.values():
            task.cancel()
        for cached in self._signatures.values():
            if cached.refresh_task is not None:
                cached.refresh_task.cancel()

    async def get_signature(self, model: str, version: str = "") -> Signature:
        """Return the signature of a model that was resolved. Raises `UnknownModel` or `ModelNotReady`."""
        if signature := self.find_signature(model, version):
            return signature
        key = (model, version)
        cached = self._find_cached(key, EXPIRE_AFTER_S)
        if cached is not None and cached.refresh_task is not None:
            with measure_upstream_time():
                await asyncio.wait([cached.refresh_task], timeout=MAX_REFRESH_WAIT_S)
            cached = self._signatures.get(key)  # None if the refresh failed
        return await self._read_once(key) if cached is None else cached.signature

    def find_signature(self, model: str, version: str) -> Signature | None:
        """Return the cached signature, unless it is stale; an older one is refreshed in the background."""
        cached = self._find_cached((model, version), STALE_AFTER_S)
        return None if cached is None else cached.signature

    def _find_cached(self, key: tuple[str, str], max_age_s: float) -> CachedSignature | None:
        cached = self._signatures.get(key)
        if cached is None:
            return None
        age_s = asyncio.get_running_loop().time() - cached.read_at
        if REFRESH_AFTER_S < age_s <= EXPIRE_AFTER_S and cached.refresh_task is None:
            cached.refresh_task = asyncio.create_task(self._refresh_signature(*key))
            cached.refresh_task.add_done_callback(lambda task: self._store_signature(key, task))
        return cached if age_s <= max_age_s else None

    def find_remembered_signature(self, model: str, version: str) -> Signature | None:
        return self._remembered.get((model, version))

    def find_or_start_reading(self, model: str) -> Signature | None:
        """Return the last known signature, and read a new one in the background if it is old."""
        key = (model, "")
        now = asyncio.get_running_loop().time()
        if self._find_cached(key, EXPIRE_AFTER_S) is None and now >= self._next_reads.get(key, 0.0):
            # A config that cannot be used is not read again for each request.
            self._next_reads = {each: at for each, at in self._next_reads.items() if at > now}
            self._next_reads[key] = now + REFRESH_AFTER_S
            # The request that triggers the read does not wait for it, and its log line has no part of it.
            Context().run(self._start_first_read, key)
        return self._remembered.get(key)

    async def read_unknown_signatures(self, models: Iterable[str]) -> None:
        """Read the signature of each model that was never read, unless that fails."""
        unknown = [model for model in models if (model, "") not in self._remembered]
        await read_each(unknown, self.get_signature)

    async def _read_once(self, key: tuple[str, str]) -> Signature:
        with measure_upstream_time():
            return await asyncio.shield(self._start_first_read(key))

    def _start_first_read(self, key: tuple[str, str]) -> asyncio.Task[Signature]:
        task = self._pending_reads.get(key)
        if task is None:
            # The model may have been unloaded since the request waited for it: it waits again.
            work = self._read_signature(*key, can_activate=True)
            task = self._pending_reads[key] = asyncio.create_task(work)
            task.add_done_callback(lambda task: self._finish_first_read(key, task))
        return task

    def _finish_first_read(self, key: tuple[str, str], task: asyncio.Task[Signature]) -> None:
        if self._pending_reads.get(key) is not task:
            return  # `invalidate` was called during the read: the result may be outdated
        del self._pending_reads[key]
        self._store_signature(key, task)

    def invalidate(self, model: str) -> None:
        """Drop the cached signatures of a model that was loaded or unloaded, or contradicts them."""
        for key in [key for key in self._signatures if key[0] == model]:
            cached = self._signatures.pop(key)
            if cached.refresh_task is not None:
                cached.refresh_task.cancel()
        for key in [key for key in self._pending_reads if key[0] == model]:
            self._pending_reads.pop(key)

    def _store_signature(self, key: tuple[str, str], task: asyncio.Task[Signature]) -> None:
        if task.cancelled():
            return
        if task.exception() is not None:
            self._signatures.pop(key, None)
        else:
            now = asyncio.get_running_loop().time()
            self._signatures[key] = CachedSignature(task.result(), now)
            self._remembered[key] = task.result()

    async def _refresh_signature(self, model: str, version: str) -> Signature:
        # The request that triggered the refresh does not wait for it.
        current_request_info.set(None)
        return await self._read_signature(model, version)

    async def _read_signature(
        self, model: str, version: str, *, can_activate: bool = False
    ) -> Signature:
        target = RequestTarget(model, version, METADATA_TIMEOUT_S, can_activate=can_activate)
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
