"""What the models of the fleet look like, and what they answer."""

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
from gateway.messages import join_names, quote_text
from gateway.names import normalize_version
from gateway.request_info import current_request_info
from gateway.tensors.inputs import InferInputs
from gateway.tensors.outputs import InferResult, concatenate_results
from gateway.tensors.signature import Signature, build_signature
from gateway.triton.error_mapping import RequestTarget
from gateway.triton.grpc.channel import prepare_grpc_arguments
from gateway.triton.grpc.stream import GrpcInferStream
from gateway.triton.http.connection import Headers
from gateway.triton.inference import InferResponse

REFRESH_AFTER_S = 2.0  # a signature older than this is asked for again, while it goes on serving
EXPIRE_AFTER_S = 10.0  # … and one of a model that nobody asked for lately is not relied upon
METADATA_TIMEOUT_S = 5.0
# Pieces of one batch that are under way: each has a connection of its own.
MAX_PARALLEL_PIECES = 32
# Triton and what we know of the model disagree: read it again.
STALE_SIGNATURE_ERRORS = (UnknownModel, ModelNotReady, InputMismatch)


@dataclass
class CachedSignature:
    """A signature, when it was read, and the task that reads it again."""

    signature: Signature
    read_at: float
    refresh_task: asyncio.Task[Signature] | None = None


class ModelService:
    """What the models take and give, read when first asked for and kept fresh; and their answers.

    Those that `cancellable` names, as globs, or whose config says so, stop when nobody waits any more.
    """

    def __init__(self, pool: ReplicaPool, cancellable: Sequence[str] = ()) -> None:
        self._pool = pool
        self._cancellable = cancellable
        self._signatures: dict[tuple[str, str], CachedSignature] = {}
        self._pending_reads: dict[tuple[str, str], asyncio.Task[Signature]] = {}

    def close(self) -> None:
        for task in self._pending_reads.values():
            task.cancel()
        for known in self._signatures.values():
            if known.refresh_task is not None:
                known.refresh_task.cancel()

    async def get_signature(self, model: str, version: str = "") -> Signature:
        """What a model takes and gives. Raises `UnknownModel` or `ModelNotReady`."""
        number = normalize_version(version) if version else ""
        if number is None:
            raise UnknownModel(model, version)
        version = number
        key, now = (model, version), asyncio.get_running_loop().time()
        known = self._signatures.get(key)
        if known is None or now - known.read_at > EXPIRE_AFTER_S:
            return await self._read_once(key)
        if now - known.read_at > REFRESH_AFTER_S and known.refresh_task is None:
            known.refresh_task = asyncio.create_task(self._refresh_signature(model, version))
            known.refresh_task.add_done_callback(lambda task: self._store_signature(key, task))
        return known.signature

    async def _read_once(self, key: tuple[str, str]) -> Signature:
        """Read once, however many ask and wait at the same time."""
        task = self._pending_reads.get(key)
        if task is None:
            task = self._pending_reads[key] = asyncio.create_task(self._read_signature(*key))
            task.add_done_callback(lambda task: self._finish_first_read(key, task))
        with measure_upstream_time():
            return await asyncio.shield(task)

    def _finish_first_read(self, key: tuple[str, str], task: asyncio.Task[Signature]) -> None:
        if self._pending_reads.get(key) is not task:
            return  # forgotten meanwhile: what it read may be old
        del self._pending_reads[key]
        self._store_signature(key, task)

    def invalidate(self, model: str) -> None:
        """What was known of a model is doubtful: it was loaded, unloaded, or contradicts us."""
        for key in [key for key in self._signatures if key[0] == model]:
            known = self._signatures.pop(key)
            if known.refresh_task is not None:
                known.refresh_task.cancel()
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
        current_request_info.set(None)  # for no request: the one that found it old is not waiting
        return await self._read_signature(model, version)

    async def _read_signature(self, model: str, version: str) -> Signature:
        asked, path = (
            RequestTarget(model, version, METADATA_TIMEOUT_S),
            triton_model_path(model, version),
        )
        metadata, config = await asyncio.gather(
            self._pool.request_json(asked, b"GET", path),
            self._pool.request_json(asked, b"GET", f"{path}/config"),
        )
        try:
            return build_signature(metadata, config, version)
        except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as exc:
            raise BadUpstream(f"the replica's metadata of model '{model}' cannot be read") from exc

    async def infer(
        self, model: Signature, inputs: InferInputs, options: CallOptions
    ) -> InferResult:
        """The model's answer; a batch larger than it takes is cut, sent side by side, and joined."""
        pieces = list(inputs.split(model.max_batch_size))
        if len(pieces) == 1:
            return await self._infer_piece(model, pieces[0], options)
        if options.sequence_step is not None:  # its pieces would have no order
            raise InputMismatch(f"a step of a sequence has at most {model.max_batch_size} items")
        turns = asyncio.Semaphore(MAX_PARALLEL_PIECES)
        tasks = [
            asyncio.create_task(self._infer_limited_piece(model, piece, options, turns))
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
        """A piece of a batch; what the model says of «item 2» is counted within the piece."""
        try:
            async with semaphore:
                return await self._infer_piece(model, piece, options)
        except (RefusedByModel, InputMismatch) as exc:
            first, last = piece.batch_offset + 1, piece.batch_offset + piece.batch_size
            exc.detail = f"in the part of the batch with items {first} to {last}: {exc.detail}"
            raise

    async def _infer_piece(
        self, model: Signature, inputs: InferInputs, options: CallOptions
    ) -> InferResult:
        way = infer_over_grpc if self._is_cancellable(model) else infer_over_http
        try:
            answer = await way(self._pool, options.build_infer_call(model, inputs.arrays), options)
        except STALE_SIGNATURE_ERRORS:
            self.invalidate(model.model)
            raise
        return InferResult(
            model,
            answer.outputs,
            inputs.is_batched,
            options.request_id,
            answer.version,
            has_classifications=bool(options.parameters.get("classification")),
            instance_count=inputs.instance_count,
            size_bytes=answer.size_bytes,
        )

    async def stream(
        self, model: Signature, inputs: InferInputs, options: CallOptions, timeout_s: float
    ) -> AsyncGenerator[InferResult, None]:
        """The model's answers as they come: the first is there when this returns, and each of the others
        may take `timeout_s`. Closing what this returns cancels the inference.

        Raises `DoesNotFit` for a batch larger than the model takes: its pieces would be told apart by
        nobody.
        """
        if len(list(inputs.split(model.max_batch_size))) > 1:
            raise InputMismatch(f"the model streams at most {model.max_batch_size} items at a time")
        arguments = await prepare_grpc_arguments(options.build_infer_call(model, inputs.arrays))
        asked = RequestTarget(
            model.model, model.version, timeout_s, sequence_step=options.sequence_step
        )

        async def start(
            replica: Replica, trace: Headers
        ) -> tuple[GrpcInferStream, InferResponse | None]:
            begun = GrpcInferStream(replica.channel, asked, arguments, trace)
            try:
                return begun, await begun.read_response(options.remaining_s)
            except BaseException:
                begun.close()
                raise

        try:
            begun, first = await self._pool.start_call(asked, options.headers, start)
        except STALE_SIGNATURE_ERRORS:
            self.invalidate(model.model)
            raise

        def build_result(answer: InferResponse) -> InferResult:
            classified = bool(options.parameters.get("classification"))
            return InferResult(
                *(model, answer.outputs, inputs.is_batched, options.request_id, answer.version),
                has_classifications=classified,
                size_bytes=answer.size_bytes,
            )

        return iterate_results(begun, first, timeout_s, build_result)

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
    """From this answer on."""
    try:
        while first is not None:
            yield build_result(first)
            first = await stream.read_response(timeout_s)
    finally:
        stream.close()


@contextmanager
def measure_upstream_time() -> Iterator[None]:
    """What runs side by side was waited for once, and not as often as there are pieces."""
    notes, began = current_request_info.get(), perf_counter()
    before_s = notes.upstream_s if notes is not None else 0.0
    try:
        yield
    finally:
        if notes is not None:
            notes.upstream_s = before_s + perf_counter() - began


def check_output_names(model: Signature, requested: Sequence[str]) -> tuple[str, ...]:
    """The outputs to ask for; none are all. Raises `DoesNotFit` for one that the model does not have."""
    unknown = [name for name in requested if name not in model.outputs]
    if unknown:
        raise InputMismatch(
            f"the model has no output {quote_text(unknown[0])}; its outputs are {join_names(model.outputs)}"
        )
    return tuple(requested)
