"""The version that a label chose for one request, and the copy of the request for the label's shadow."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial

from starlette.types import Send

from gateway.capabilities.versions.http_copy import HttpCopy, can_copy
from gateway.capabilities.versions.label_router import ActiveLabel
from gateway.capabilities.versions.labels import Shadow
from gateway.capabilities.versions.output_comparison import Arrays
from gateway.capabilities.versions.shadows import IN_PIECES, ShadowCopy, ShadowRunner
from gateway.errors import UpstreamResponseTooLarge
from gateway.fleet.replica import Replica
from gateway.fleet.transports import GrpcBytesCall, HttpCall, prepare_http_infer
from gateway.repository.resolver import StartCopy
from gateway.telemetry.request_info import RequestScope
from gateway.telemetry.tracing import TRACE_CONTEXT_HEADERS
from gateway.tensors.outputs import InferResult
from gateway.tensors.sequence import SequenceStep
from gateway.triton.grpc.byte_channel import Metadata
from gateway.triton.grpc.messages import decode_grpc_response
from gateway.triton.inference import InferRequest, decode_http_response

TRACE_METADATA = frozenset(name.decode() for name in TRACE_CONTEXT_HEADERS)


class LabelChoice:
    """A `VersionChoice` by a label. Sequences and streams are never copied for its shadow."""

    def __init__(self, label: ActiveLabel, scope: RequestScope, runner: ShadowRunner) -> None:
        self.version = label.choose_version(scope)
        self._label = label
        self._scope = scope
        self._runner = runner
        self._http_copy: HttpCopy | None = None

    def choose_sequence_version(self, step: SequenceStep) -> str:
        self.version = self._label.choose_sequence_version(self._scope, self.version, step)
        return self.version

    def choose_other_version(self, refused: str, step: SequenceStep | None) -> str:
        if step is not None or not self._label.value.is_split:
            return ""
        version = self._label.redirect(refused)
        self.version = version or self.version
        return version

    def copy_inference(self, request: InferRequest, result: InferResult) -> StartCopy | None:
        label = self._label
        target = request.target
        if target.sequence_step is not None or not (shadow := self._runner.choose_shadow(label)):
            return None
        if request.inputs.exceeds(request.signature.max_batch_size):  # it was sent in pieces
            self._runner.drop(label, shadow, IN_PIECES)
            return None

        async def send(replica: Replica) -> Arrays:
            deadline = asyncio.get_running_loop().time() + target.timeout_s
            copied = replace(
                request, target=target._replace(version=shadow.version), deadline=deadline
            )
            call = await prepare_http_infer(copied, [])
            response = await call.send(replica, target.timeout_s, None)
            reply = await response.read_complete(self._runner.max_bytes)
            return (await decode_http_response(reply)).outputs

        async def read_response() -> Arrays:
            return result.arrays

        input_bytes = sum(array.nbytes for array in request.inputs.arrays.values())
        size_bytes = max(input_bytes, result.size_bytes)
        copy = ShadowCopy(
            label,
            shadow,
            request.request_id,
            size_bytes=size_bytes,
            send=send,
            read_response=read_response,
        )
        return partial(self._runner.start, copy)

    def copy_grpc_call(
        self, call: GrpcBytesCall, response: bytes, request_id: str
    ) -> StartCopy | None:
        label = self._label
        target = call.target
        if target.sequence_step is not None or not (shadow := self._runner.choose_shadow(label)):
            return None

        async def send(replica: Replica) -> Arrays:
            copied = build_grpc_copy(call, shadow)
            reply = await copied.send(replica, target.timeout_s, None)
            if len(reply) > self._runner.max_bytes:
                raise UpstreamResponseTooLarge(self._runner.max_bytes)
            return (await decode_grpc_response(reply)).outputs

        async def read_response() -> Arrays:
            return (await decode_grpc_response(response)).outputs

        size_bytes = max(len(call.message), len(response))
        copy = ShadowCopy(
            label, shadow, request_id, size_bytes=size_bytes, send=send, read_response=read_response
        )
        return partial(self._runner.start, copy)

    def copy_http_call(self, call: HttpCall, *, has_tensors: bool) -> HttpCall:
        if self._label.value.shadow is None or not can_copy(call):
            return call
        shadow = self._runner.choose_shadow(self._label)
        if shadow is None:
            return call
        self._http_copy = HttpCopy(
            self._label, shadow, self._runner, call=call, has_tensors=has_tensors
        )
        return self._http_copy.call

    def watch_response(self, send: Send, request_id: str) -> Send:
        copy = self._http_copy
        if copy is None or copy.is_dropped:
            return send
        return copy.watch_response(send, request_id)


def build_grpc_copy(call: GrpcBytesCall, shadow: Shadow) -> GrpcBytesCall:
    metadata: Metadata = tuple(pair for pair in call.metadata if pair[0] not in TRACE_METADATA)
    return replace(call.with_version(shadow.version), metadata=metadata)
