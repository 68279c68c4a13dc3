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
        if request.target.sequence_step is not None:  # the pieces would run in no particular order
            raise InputMismatch(f"a sequence step can have at most {max_batch_size} items")
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
                return await self.infer(request)
        except (RefusedByModel, InputMismatch) as exc:
            piece = request.inputs
            first = piece.batch_offset + 1
            last = piece.batch_offset + piece.batch_size
            # The message of the model counts the items within the piece.
            exc.add_context(f"in the part of the batch with items {first} to {last}")
            raise

    async def stream(self, request: InferRequest) -> ResultStream:
        """Start a streaming inference; return its results.

        The first response is available when this returns; each of the others may take the request's timeout.
        Raises `InputMismatch` for a batch above the model's maximum, because the responses of its pieces
        could not be told apart.
        """
        max_batch_size = request.signature.max_batch_size
        if request.inputs.exceeds(max_batch_size):
            raise InputMismatch(
                f"the model accepts at most {max_batch_size} items per streaming request"
            )
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
