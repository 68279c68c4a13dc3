"""One inference on the fleet: over HTTP, or over gRPC so that it can be stopped."""

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
from gateway.tensors.sequence import SequenceStep
from gateway.tensors.signature import Signature
from gateway.triton.error_mapping import RequestTarget
from gateway.triton.grpc import unary
from gateway.triton.grpc.management import GrpcUnreachable
from gateway.triton.http.connection import Headers
from gateway.triton.http.response import read_complete_response, read_error_response
from gateway.triton.inference import (
    InferCall,
    InferResponse,
    decode_http_response,
    encode_http_request,
)

log = logging.getLogger(__name__)

# What a path's segment may hold as it is (RFC 3986, section 3.3); Triton does not decode the rest.
UNQUOTED_PATH_CHARS = "!$&'()*+,;=:@"


@dataclass(frozen=True)
class CallOptions:
    """What the caller wants beside the tensors."""

    outputs: tuple[str, ...]
    parameters: Mapping[str, Any]
    request_id: str
    deadline: float  # in the loop's time
    headers: Headers = field(default_factory=list)
    sequence_step: SequenceStep | None = None  # of a sequence

    def build_infer_call(self, model: Signature, arrays: Mapping[str, np.ndarray]) -> InferCall:
        """What is to be inferred in the time that is left."""
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
    """The fleet's answer over HTTP, which costs least, and runs to its end whoever leaves."""
    asked, path = options.build_request_target(inference.signature), triton_infer_path(inference)
    headers, body = await encode_http_request(inference)
    answer = await pool.send(asked, b"POST", path, [*headers, *options.headers], body)
    return await decode_http_response(await read_complete_response(answer))


async def infer_over_grpc(
    pool: ReplicaPool, inference: InferCall, options: CallOptions
) -> InferResponse:
    """The fleet's answer over gRPC: giving this up stops the inference in Triton."""
    asked = options.build_request_target(inference.signature)
    return await pool.start_call(
        asked, options.headers, partial(infer_on_replica, inference, options)
    )


async def infer_on_replica(
    inference: InferCall, options: CallOptions, replica: Replica, trace_headers: Headers
) -> InferResponse:
    """A replica's answer over gRPC; over HTTP where that is all there is."""
    asked = options.build_request_target(inference.signature)
    why = ""
    if not replica.channel.is_unavailable:
        try:
            return await unary.infer_unary(replica.channel, asked, inference, trace_headers)
        except GrpcUnreachable as exc:
            why = exc.detail
    headers, body = await encode_http_request(inference)
    path, left_s = triton_infer_path(inference), options.remaining_s
    answer = await replica.http.send(
        b"POST", path, [*headers, *trace_headers], body, timeout_s=left_s
    )
    if why and replica.channel.mark_unavailable():  # and the replica is well
        log.warning("%s at %s: who leaves does not stop an inference there", why, replica.address)
    if answer.status >= 400:
        raise await read_error_response(answer, asked)
    return await decode_http_response(await read_complete_response(answer))


def triton_model_path(model: str, version: str = "") -> str:
    """Triton's path of a model. Triton does not decode it: what must be quoted is no model's name."""
    path = f"/v2/models/{quote(model, safe=UNQUOTED_PATH_CHARS)}"
    return f"{path}/versions/{version}" if version else path


def triton_infer_path(inference: InferCall) -> bytes:
    model = inference.signature
    return f"{triton_model_path(model.model, model.version)}/infer".encode()
