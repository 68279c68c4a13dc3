"""Transports of an inference: HTTP, or gRPC, over which it can be cancelled."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from urllib.parse import quote

import numpy as np

from gateway.fleet.pool import ReplicaPool
from gateway.fleet.replica import Replica
from gateway.http_client.connection import Headers
from gateway.tensors.sequence import SequenceStep
from gateway.tensors.signature import Signature
from gateway.triton.error_mapping import RequestTarget
from gateway.triton.grpc import unary
from gateway.triton.grpc.management import GrpcUnreachable
from gateway.triton.inference import (
    InferCall,
    InferResponse,
    decode_http_response,
    encode_http_request,
)
from gateway.triton.response import read_complete_response, read_error_response

log = logging.getLogger(__name__)

# Characters that need no quoting in a path segment (RFC 3986, section 3.3).
UNQUOTED_PATH_CHARS = "!$&'()*+,;=:@"


@dataclass(frozen=True)
class CallOptions:
    """The options of an inference, beside its tensors."""

    outputs: tuple[str, ...]
    parameters: Mapping[str, Any]
    request_id: str
    deadline: float  # on the event loop's clock
    headers: Headers = field(default_factory=list)
    sequence_step: SequenceStep | None = None

    def build_infer_call(self, model: Signature, arrays: Mapping[str, np.ndarray]) -> InferCall:
        timeout_us = max(int(self.remaining_s * 1e6), 1)
        return InferCall(
            model,
            arrays,
            self.outputs,
            self.parameters,
            self.request_id,
            timeout_us,
            self.sequence_step,
        )

    def build_request_target(self, model: Signature) -> RequestTarget:
        return RequestTarget(
            model.model, model.version, self.remaining_s, sequence_step=self.sequence_step
        )

    @property
    def remaining_s(self) -> float:
        return self.deadline - asyncio.get_running_loop().time()


async def infer_over_http(
    pool: ReplicaPool, inference: InferCall, options: CallOptions
) -> InferResponse:
    """Run an inference over HTTP, which costs least. A client disconnect does not cancel it."""
    target, path = options.build_request_target(inference.signature), triton_infer_path(inference)
    headers, body = await encode_http_request(inference)
    response = await pool.send(target, b"POST", path, [*headers, *options.headers], body)
    return await decode_http_response(await read_complete_response(response))


async def infer_over_grpc(
    pool: ReplicaPool, inference: InferCall, options: CallOptions
) -> InferResponse:
    """Run an inference over gRPC. Cancelling the task cancels it in Triton."""
    target = options.build_request_target(inference.signature)
    return await pool.start_call(
        target, options.headers, partial(infer_on_replica, inference, options)
    )


async def infer_on_replica(
    inference: InferCall, options: CallOptions, replica: Replica, trace_headers: Headers
) -> InferResponse:
    """Run an inference on a replica over gRPC, or over HTTP if its gRPC port is unreachable."""
    target = options.build_request_target(inference.signature)
    reason = ""
    if not replica.channel.is_unavailable:
        try:
            return await unary.infer_unary(replica.channel, target, inference, trace_headers)
        except GrpcUnreachable as exc:
            reason = exc.detail
    headers, body = await encode_http_request(inference)
    path, remaining_s = triton_infer_path(inference), options.remaining_s
    response = await replica.http.send(
        b"POST", path, [*headers, *trace_headers], body, timeout_s=remaining_s
    )
    if reason and replica.channel.mark_unavailable():  # the replica itself works
        text = "%s at %s; client disconnects do not cancel inference there"
        log.warning(text, reason, replica.address)
    if response.status >= 400:
        raise await read_error_response(response, target)
    return await decode_http_response(await read_complete_response(response))


def triton_model_path(model: str, version: str = "") -> str:
    """Return Triton's path of a model. Triton does not decode it, so a quoted name matches no model."""
    path = f"/v2/models/{quote(model, safe=UNQUOTED_PATH_CHARS)}"
    return f"{path}/versions/{version}" if version else path


def triton_infer_path(inference: InferCall) -> bytes:
    model = inference.signature
    return f"{triton_model_path(model.model, model.version)}/infer".encode()
