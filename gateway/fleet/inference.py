"""Inference on the fleet: batches in pieces, streams, and signatures that Triton contradicts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from gateway.errors import GatewayError, InputMismatch, ModelNotReady, RefusedByModel, UnknownModel
from gateway.fleet.dispatch import Dispatcher
from gateway.fleet.signatures import SignatureCache
from gateway.fleet.transports import GrpcStreamCall, GrpcUnaryCall, prepare_http_infer
from gateway.messages import quote_text
from gateway.tasks import run_together
from gateway.telemetry.request_info import measure_upstream_time
from gateway.tensors.outputs import InferResult, concatenate_results
from gateway.tensors.signature import Signature
from gateway.triton.grpc.byte_channel import STREAM_METHOD, ByteStream, map_stream_error
from gateway.triton.grpc.messages import (
    build_grpc_metadata,
    encode_grpc_request,
    render_streamed_result,
)
from gateway.triton.inference import InferRequest, decode_http_response

# Pieces of one batch in flight; each uses a connection of its own.
MAX_PARALLEL_PIECES = 32
# Errors after which the signature is read again, because Triton contradicts it.
STALE_SIGNATURE_ERRORS = (UnknownModel, ModelNotReady, InputMismatch)


class InferenceService:
    """Inferences on the fleet.

    A client disconnect cancels the inference of models that match a glob in `cancellable`, or whose config
    allows it.
    """

    def __init__(
        self, dispatcher: Dispatcher, signatures: SignatureCache, cancellable: Sequence[str] = ()
    ) -> None:
        self._dispatcher = dispatcher
        self._signatures = signatures
        self._cancellable = cancellable

    async def infer(self, request: InferRequest) -> InferResult:
        """Run an inference. A batch above the model's maximum is split, sent in parallel, and joined."""
        if request.inputs.exceeds(request.signature.max_batch_size):
            check_splitting(request)
            return await self._infer_pieces(request)
        try:
            if self._is_cancellable(request.signature):
                call = GrpcUnaryCall(request)
                return request.build_result(await self._dispatcher.send(call, request.remaining_s))
            http_call = await prepare_http_infer(request, request.trace_headers)
            response = await self._dispatcher.send(http_call, request.remaining_s)
            reply = await response.read_complete()
            return request.build_result(await decode_http_response(reply))
        except STALE_SIGNATURE_ERRORS as exc:
            self._check_signature(request, exc)
            raise

    async def _infer_pieces(self, request: InferRequest) -> InferResult:
        max_batch_size = request.signature.max_batch_size
        semaphore = asyncio.Semaphore(MAX_PARALLEL_PIECES)
        target = request.target._replace(fallback=None)  # one version runs all pieces
        pieces = request.inputs.split(max_batch_size)
        requests = (replace(request, target=target, inputs=piece) for piece in pieces)
        work = (self._infer_piece(each, semaphore) for each in requests)
        with measure_upstream_time():
            return concatenate_results(await run_together(work))

    async def _infer_piece(
        self, request: InferRequest, semaphore: asyncio.Semaphore
    ) -> InferResult:
        try:
            async with semaphore:
                result = await self.infer(request)
        except (RefusedByModel, InputMismatch) as exc:
            piece = request.inputs
            first = piece.batch_offset + 1
            last = piece.batch_offset + piece.batch_size
            # The message of the model counts the items within the piece.
            exc.add_context(f"in the part of the batch with items {first} to {last}")
            raise
        check_rows(request, result)
        return result

    async def stream(self, request: InferRequest) -> ResultStream:
        """Start a streaming inference; return its results.

        The first response is available when this returns; each of the others may take the request's timeout.
        Raises `InputMismatch` for a batch above the model's maximum, because the responses of its pieces
        could not be told apart.
        """
        if request.inputs.exceeds(request.signature.max_batch_size):
            raise build_split_error(request, "the responses of its parts could not be told apart")
        message = await request.encode(encode_grpc_request)
        metadata = build_grpc_metadata(request.trace_headers)
        call = GrpcStreamCall(request.target, STREAM_METHOD, message, metadata)
        try:
            stream = await self._dispatcher.send(call, request.remaining_s)
            results = ResultStream(request, stream)
            try:
                await results.read_first()
            except BaseException:
                results.close()
                raise
        except STALE_SIGNATURE_ERRORS as exc:
            self._check_signature(request, exc)
            raise
        return results

    def _check_signature(self, request: InferRequest, error: GatewayError) -> None:
        """Invalidate the signature if Triton contradicts it. A client's own mismatch says nothing of it."""
        if error.is_from_triton or not isinstance(error, InputMismatch):
            self._signatures.invalidate(request.target.model)

    def _is_cancellable(self, model: Signature) -> bool:
        if model.is_cancellable or not self._cancellable:
            return model.is_cancellable
        return any(fnmatchcase(model.model, glob) for glob in self._cancellable)


def check_splitting(request: InferRequest) -> None:
    """Check that a batch may be several inferences. Raises `InputMismatch`."""
    if request.target.sequence_step is not None:
        raise build_split_error(
            request, "the parts of a sequence step would run in no particular order"
        )
    if not request.signature.is_splittable:
        raise build_split_error(request, "its config says gateway.split: false")


def check_rows(request: InferRequest, result: InferResult) -> None:
    """Check that each output has one row for each item, without which results cannot be joined.

    Values that count items, such as the index of an image, would be wrong as well. Raises `InputMismatch`.
    """
    items = request.inputs.batch_size
    for name, array in result.arrays.items():
        if array.shape[:1] != (items,):
            rows = array.shape[0] if array.ndim else 1
            reason = f"its output {quote_text(name)} has {rows} rows for {items} items"
            raise build_split_error(request, reason)


def build_split_error(request: InferRequest, reason: str) -> InputMismatch:
    limit = 1 if request.inputs.items else request.signature.max_batch_size
    return InputMismatch(
        f"a batch for model {quote_text(request.signature.model)} cannot be split, because {reason}; send at "
        f"most {limit} item{'s' if limit > 1 else ''} per request"
    )


class ResultStream:
    """The results of a streaming inference. Its owner must close it, which cancels the rest."""

    def __init__(self, request: InferRequest, stream: ByteStream) -> None:
        self._request = request
        self._stream = stream
        self._first: bytes | None = None

    async def read_first(self) -> None:
        """Read the first result, whose error is that of the request."""
        self._first = await self.read_json()

    async def read_json(self) -> bytes | None:
        """Return the next result; None after the last. Raises the mapped error of a failure."""
        first = self._first
        if first is not None:
            self._first = None
            return first
        target = self._request.target
        with measure_upstream_time():
            message = await self._stream.read_message(target.timeout_s)
        if message is None:
            return None
        if (error := map_stream_error(message, target)) is not None:
            raise error
        return await render_streamed_result(self._request, message)

    def close(self) -> None:
        self._stream.close()
