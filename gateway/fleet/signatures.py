"""The model service: cached signatures of the models, and inference on the fleet."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from time import perf_counter
from typing import Any

from gateway.errors import (
    BadUpstream,
    GatewayError,
    InputMismatch,
    ModelNotReady,
    RefusedByModel,
    UnknownModel,
)
from gateway.fleet.dispatch import Dispatcher
from gateway.fleet.tasks import run_together
from gateway.fleet.transports import (
    GrpcInferStream,
    GrpcStreamCall,
    GrpcUnaryCall,
    prepare_http_infer,
    triton_model_path,
)
from gateway.messages import join_names, quote_text
from gateway.request_info import current_request_info
from gateway.tensors.outputs import InferResult, concatenate_results
from gateway.tensors.signature import Signature, build_signature
from gateway.triton.error_mapping import RequestTarget
from gateway.triton.inference import InferRequest, InferResponse, decode_http_response

REFRESH_AFTER_S = 2.0  # an older signature is refreshed in the background
EXPIRE_AFTER_S = 10.0  # an older signature is not used
METADATA_TIMEOUT_S = 5.0
# Pieces of one batch in flight; each uses a connection of its own.
MAX_PARALLEL_PIECES = 32
MAX_PARALLEL_READS = 16  # of configs
# Errors after which the signature is read again, because Triton contradicts it.
STALE_SIGNATURE_ERRORS = (UnknownModel, ModelNotReady, InputMismatch)


@dataclass
class CachedSignature:
    """A signature, when it was read, and the task that reads it again."""

    signature: Signature
    read_at: float
    refresh_task: asyncio.Task[Signature] | None = None


class ModelService:
    """Signatures, which are cached and kept fresh, and inference.

    A client disconnect cancels the inference of models that match a glob in `cancellable`, or whose config
    allows it.
    """

    def __init__(self, dispatcher: Dispatcher, cancellable: Sequence[str] = ()) -> None:
        self._dispatcher = dispatcher
        self._cancellable = cancellable
        self._signatures: dict[tuple[str, str], CachedSignature] = {}
        self._remembered: dict[tuple[str, str], Signature] = {}  # the last ones of all models
        self._pending_reads: dict[tuple[str, str], asyncio.Task[Signature]] = {}

    def close(self) -> None:
        for task in self._pending_reads.values():
            task.cancel()
        for cached in self._signatures.values():
            if cached.refresh_task is not None:
                cached.refresh_task.cancel()

    async def get_signature(self, model: str, version: str = "") -> Signature:
        """Return the signature of a model that was resolved. Raises `UnknownModel` or `ModelNotReady`."""
        return self.find_signature(model, version) or await self._read_once((model, version))

    def find_signature(self, model: str, version: str) -> Signature | None:
        """Return the cached signature, unless it expired; an older one is refreshed in the background."""
        key = (model, version)
        cached = self._signatures.get(key)
        if cached is None:
            return None
        age_s = asyncio.get_running_loop().time() - cached.read_at
        if age_s > EXPIRE_AFTER_S:
            return None
        if age_s > REFRESH_AFTER_S and cached.refresh_task is None:
            cached.refresh_task = asyncio.create_task(self._refresh_signature(model, version))
            cached.refresh_task.add_done_callback(lambda task: self._store_signature(key, task))
        return cached.signature

    def find_remembered_signature(self, model: str, version: str) -> Signature | None:
        """Return the last known signature of a model, which may not be loaded any longer."""
        return self._remembered.get((model, version))

    async def _read_once(self, key: tuple[str, str]) -> Signature:
        task = self._pending_reads.get(key)
        if task is None:
            # The model may have been unloaded since the request waited for it: it waits again.
            work = self._read_signature(*key, can_activate=True)
            task = self._pending_reads[key] = asyncio.create_task(work)
            task.add_done_callback(lambda task: self._finish_first_read(key, task))
        with measure_upstream_time():
            return await asyncio.shield(task)

    def _finish_first_read(self, key: tuple[str, str], task: asyncio.Task[Signature]) -> None:
        if self._pending_reads.get(key) is not task:
            return  # invalidated meanwhile: the result may be outdated
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
        """Pass the config of each model to `store`, unless the model was unloaded meanwhile."""
        semaphore = asyncio.Semaphore(MAX_PARALLEL_READS)

        async def read(model: str) -> None:
            with suppress(GatewayError):
                async with semaphore:
                    target = RequestTarget(model, timeout_s=METADATA_TIMEOUT_S)
                    store(model, await self._read_config(target))

        await asyncio.gather(*map(read, sorted(models)))

    async def infer(self, request: InferRequest) -> InferResult:
        """Run an inference. A batch above the model's maximum is split, sent in parallel, and joined."""
        if request.inputs.exceeds(request.signature.max_batch_size):
            return await self._infer_pieces(request)
        try:
            if self._is_cancellable(request.signature):
                call = GrpcUnaryCall(request)
                return build_result(request, await self._dispatcher.send(call, request.remaining_s))
            http_call = await prepare_http_infer(request, request.trace_headers)
            response = await self._dispatcher.send(http_call, request.remaining_s)
            reply = await response.read_complete()
            return build_result(request, await decode_http_response(reply))
        except STALE_SIGNATURE_ERRORS as exc:
            self._check_signature(request, exc)
            raise

    async def _infer_pieces(self, request: InferRequest) -> InferResult:
        max_batch_size = request.signature.max_batch_size
        if request.target.sequence_step is not None:  # the pieces would run in no particular order
            raise InputMismatch(f"a sequence step can have at most {max_batch_size} items")
        semaphore = asyncio.Semaphore(MAX_PARALLEL_PIECES)
        pieces = request.inputs.split(max_batch_size)
        requests = (request._replace(inputs=piece) for piece in pieces)
        work = (self._infer_piece(each, semaphore) for each in requests)
        with measure_upstream_time():
            return concatenate_results(await run_together(work))

    async def _infer_piece(
        self, request: InferRequest, semaphore: asyncio.Semaphore
    ) -> InferResult:
        try:
            async with semaphore:
                return await self.infer(request)
        except (RefusedByModel, InputMismatch) as exc:
            piece = request.inputs
            first, last = piece.batch_offset + 1, piece.batch_offset + piece.batch_size
            # The message of the model counts the items within the piece.
            exc.detail = f"in the part of the batch with items {first} to {last}: {exc.detail}"
            raise

    async def stream(self, request: InferRequest) -> AsyncGenerator[InferResult, None]:
        """Start a streaming inference; return its responses. Closing the iterator cancels the inference.

        The first response is available when this returns; each of the others may take the request's timeout.
        Raises `InputMismatch` for a batch above the model's maximum, because the responses of its pieces
        could not be told apart.
        """
        max_batch_size = request.signature.max_batch_size
        if request.inputs.exceeds(max_batch_size):
            raise InputMismatch(
                f"the model accepts at most {max_batch_size} items per streaming request"
            )
        call = GrpcStreamCall(request)
        try:
            stream, first = await self._dispatcher.send(call, request.remaining_s)
        except STALE_SIGNATURE_ERRORS as exc:
            self._check_signature(request, exc)
            raise
        return iterate_results(request, stream, first)

    def _check_signature(self, request: InferRequest, error: GatewayError) -> None:
        """Invalidate the signature if Triton contradicts it. A client's own mismatch says nothing of it."""
        if error.is_from_triton or not isinstance(error, InputMismatch):
            self.invalidate(request.target.model)

    def _is_cancellable(self, model: Signature) -> bool:
        globs = self._cancellable
        return model.is_cancellable or any(fnmatchcase(model.model, glob) for glob in globs)


async def iterate_results(
    request: InferRequest, stream: GrpcInferStream, first: InferResponse | None
) -> AsyncGenerator[InferResult, None]:
    try:
        while first is not None:
            yield build_result(request, first)
            first = await stream.read_response(request.target.timeout_s)
    finally:
        stream.close()


def build_result(request: InferRequest, response: InferResponse) -> InferResult:
    return InferResult(
        request.signature,
        response.outputs,
        request.inputs.is_batched,
        request.request_id,
        response.version,
        has_classifications=bool(
            request.parameters.get("classification", request.signature.default_class_counts)
        ),
        instance_count=request.inputs.instance_count,
        size_bytes=response.size_bytes,
    )


@contextmanager
def measure_upstream_time() -> Iterator[None]:
    """Count the upstream time of parallel requests once, not once per request."""
    info, started_at = current_request_info.get(), perf_counter()
    before_s = info.upstream_s if info is not None else 0.0
    try:
        yield
    finally:
        if info is not None:
            info.upstream_s = before_s + perf_counter() - started_at


def check_output_names(model: Signature, requested: Sequence[str]) -> tuple[str, ...]:
    """Return the requested outputs; empty means all. Raises `InputMismatch` for an unknown output."""
    if not requested:
        return ()
    unknown = [name for name in requested if name not in model.outputs]
    if unknown:
        raise InputMismatch(
            f"the model has no output {quote_text(unknown[0])}; its outputs are {join_names(model.outputs)}"
        )
    return tuple(requested)
