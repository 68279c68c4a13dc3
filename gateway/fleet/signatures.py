"""The model service: cached signatures of the models, and inference on the fleet."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from time import perf_counter

from gateway.errors import BadUpstream, InputMismatch, ModelNotReady, RefusedByModel, UnknownModel
from gateway.fleet.pool import ReplicaPool
from gateway.fleet.replica import Replica
from gateway.fleet.transports import (
    CallOptions,
    infer_over_grpc,
    infer_over_http,
    triton_model_path,
)
from gateway.http_client.connection import Headers
from gateway.messages import join_names, quote_text
from gateway.names import normalize_version
from gateway.request_info import current_request_info
from gateway.tensors.inputs import InferInputs
from gateway.tensors.outputs import InferResult, concatenate_results
from gateway.tensors.signature import Signature, build_signature
from gateway.triton.error_mapping import RequestTarget
from gateway.triton.grpc.channel import prepare_grpc_arguments
from gateway.triton.grpc.stream import GrpcInferStream
from gateway.triton.inference import InferResponse

REFRESH_AFTER_S = 2.0  # an older signature is refreshed in the background
EXPIRE_AFTER_S = 10.0  # an older signature is not used
METADATA_TIMEOUT_S = 5.0
# Pieces of one batch in flight; each uses a connection of its own.
MAX_PARALLEL_PIECES = 32
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

    def __init__(self, pool: ReplicaPool, cancellable: Sequence[str] = ()) -> None:
        self._pool = pool
        self._cancellable = cancellable
        self._signatures: dict[tuple[str, str], CachedSignature] = {}
        self._pending_reads: dict[tuple[str, str], asyncio.Task[Signature]] = {}

    def close(self) -> None:
        for task in self._pending_reads.values():
            task.cancel()
        for cached in self._signatures.values():
            if cached.refresh_task is not None:
                cached.refresh_task.cancel()

    async def get_signature(self, model: str, version: str = "") -> Signature:
        """Return the signature of a model. Raises `UnknownModel` or `ModelNotReady`."""
        normalized = normalize_version(version) if version else ""
        if normalized is None:
            raise UnknownModel(model, version)
        version = normalized
        key, now = (model, version), asyncio.get_running_loop().time()
        cached = self._signatures.get(key)
        if cached is None or now - cached.read_at > EXPIRE_AFTER_S:
            return await self._read_once(key)
        if now - cached.read_at > REFRESH_AFTER_S and cached.refresh_task is None:
            cached.refresh_task = asyncio.create_task(self._refresh_signature(model, version))
            cached.refresh_task.add_done_callback(lambda task: self._store_signature(key, task))
        return cached.signature

    async def _read_once(self, key: tuple[str, str]) -> Signature:
        task = self._pending_reads.get(key)
        if task is None:
            task = self._pending_reads[key] = asyncio.create_task(self._read_signature(*key))
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
            self._signatures[key] = CachedSignature(
                task.result(), asyncio.get_running_loop().time()
            )

    async def _refresh_signature(self, model: str, version: str) -> Signature:
        # The request that triggered the refresh does not wait for it.
        current_request_info.set(None)
        return await self._read_signature(model, version)

    async def _read_signature(self, model: str, version: str) -> Signature:
        target, path = (
            RequestTarget(model, version, METADATA_TIMEOUT_S),
            triton_model_path(model, version),
        )
        metadata, config = await asyncio.gather(
            self._pool.request_json(target, b"GET", path),
            self._pool.request_json(target, b"GET", f"{path}/config"),
        )
        try:
            return build_signature(metadata, config, version)
        except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as exc:
            raise BadUpstream(f"the replica returned invalid metadata for model '{model}'") from exc

    async def infer(
        self, model: Signature, inputs: InferInputs, options: CallOptions
    ) -> InferResult:
        """Run an inference. A batch above the model's maximum is split, sent in parallel, and joined."""
        pieces = list(inputs.split(model.max_batch_size))
        if len(pieces) == 1:
            return await self._infer_piece(model, pieces[0], options)
        if options.sequence_step is not None:  # the pieces would run in no particular order
            raise InputMismatch(f"a sequence step can have at most {model.max_batch_size} items")
        semaphore = asyncio.Semaphore(MAX_PARALLEL_PIECES)
        tasks = [
            asyncio.create_task(self._infer_limited_piece(model, piece, options, semaphore))
            for piece in pieces
        ]
        with measure_upstream_time():
            try:
                return concatenate_results(await asyncio.gather(*tasks))
            finally:
                for task in tasks:
                    task.cancel()

    async def _infer_limited_piece(
        self,
        model: Signature,
        piece: InferInputs,
        options: CallOptions,
        semaphore: asyncio.Semaphore,
    ) -> InferResult:
        try:
            async with semaphore:
                return await self._infer_piece(model, piece, options)
        except (RefusedByModel, InputMismatch) as exc:
            first, last = piece.batch_offset + 1, piece.batch_offset + piece.batch_size
            # The message of the model counts the items within the piece.
            exc.detail = f"in the part of the batch with items {first} to {last}: {exc.detail}"
            raise

    async def _infer_piece(
        self, model: Signature, inputs: InferInputs, options: CallOptions
    ) -> InferResult:
        infer = infer_over_grpc if self._is_cancellable(model) else infer_over_http
        try:
            response = await infer(
                self._pool, options.build_infer_call(model, inputs.arrays), options
            )
        except STALE_SIGNATURE_ERRORS:
            self.invalidate(model.model)
            raise
        return InferResult(
            model,
            response.outputs,
            inputs.is_batched,
            options.request_id,
            response.version,
            has_classifications=bool(options.parameters.get("classification")),
            instance_count=inputs.instance_count,
            size_bytes=response.size_bytes,
        )

    async def stream(
        self, model: Signature, inputs: InferInputs, options: CallOptions, timeout_s: float
    ) -> AsyncGenerator[InferResult, None]:
        """Start a streaming inference; return its responses. Closing the iterator cancels the inference.

        The first response is available when this returns; each of the others may take `timeout_s`.
        Raises `InputMismatch` for a batch above the model's maximum, because the responses of its pieces
        could not be told apart.
        """
        if len(list(inputs.split(model.max_batch_size))) > 1:
            raise InputMismatch(
                f"the model accepts at most {model.max_batch_size} items per streaming request"
            )
        arguments = await prepare_grpc_arguments(options.build_infer_call(model, inputs.arrays))
        target = RequestTarget(
            model.model, model.version, timeout_s, sequence_step=options.sequence_step
        )

        async def start(
            replica: Replica, trace: Headers
        ) -> tuple[GrpcInferStream, InferResponse | None]:
            stream = GrpcInferStream(replica.channel, target, arguments, trace)
            try:
                return stream, await stream.read_response(options.remaining_s)
            except BaseException:
                stream.close()
                raise

        try:
            stream, first = await self._pool.start_call(target, options.headers, start)
        except STALE_SIGNATURE_ERRORS:
            self.invalidate(model.model)
            raise

        def build_result(response: InferResponse) -> InferResult:
            has_classifications = bool(options.parameters.get("classification"))
            return InferResult(
                *(model, response.outputs, inputs.is_batched, options.request_id, response.version),
                has_classifications=has_classifications,
                size_bytes=response.size_bytes,
            )

        return iterate_results(stream, first, timeout_s, build_result)

    def _is_cancellable(self, model: Signature) -> bool:
        return model.is_cancellable or any(
            fnmatchcase(model.model, glob) for glob in self._cancellable
        )


async def iterate_results(
    stream: GrpcInferStream,
    first: InferResponse | None,
    timeout_s: float,
    build_result: Callable[[InferResponse], InferResult],
) -> AsyncGenerator[InferResult, None]:
    try:
        while first is not None:
            yield build_result(first)
            first = await stream.read_response(timeout_s)
    finally:
        stream.close()


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
    unknown = [name for name in requested if name not in model.outputs]
    if unknown:
        raise InputMismatch(
            f"the model has no output {quote_text(unknown[0])}; its outputs are {join_names(model.outputs)}"
        )
    return tuple(requested)
