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

from gateway.fleet.pool import Pool
from gateway.fleet.replica import Replica
from gateway.tensors.sequence import Step
from gateway.tensors.signature import Signature
from gateway.triton import infer, unary
from gateway.triton.answers import complained, whole
from gateway.triton.complaints import Asked
from gateway.triton.grpc import NoGrpc
from gateway.triton.infer import Answer, Inference
from gateway.triton.wire import Headers

log = logging.getLogger(__name__)

# What a path's segment may hold as it is (RFC 3986, section 3.3); Triton does not decode the rest.
UNQUOTED = "!$&'()*+,;=:@"


@dataclass(frozen=True)
class Call:
    """What the caller wants beside the tensors."""

    outputs: tuple[str, ...]
    parameters: Mapping[str, Any]
    request_id: str
    deadline: float  # in the loop's time
    headers: Headers = field(default_factory=list)
    step: Step | None = None  # of a sequence

    def asks(self, model: Signature, arrays: Mapping[str, np.ndarray]) -> Inference:
        """What is to be inferred in the time that is left."""
        timeout_us = max(int(self.left_s * 1e6), 1)
        return Inference(
            model, arrays, self.outputs, self.parameters, self.request_id, timeout_us, self.step
        )

    def to(self, model: Signature) -> Asked:
        return Asked(model.model, model.version, self.left_s, sequence=self.step)

    @property
    def left_s(self) -> float:
        return self.deadline - asyncio.get_running_loop().time()


async def posted(pool: Pool, inference: Inference, call: Call) -> Answer:
    """The fleet's answer over HTTP, which costs least, and runs to its end whoever leaves."""
    asked, path = call.to(inference.signature), infer_path(inference)
    headers, body = await infer.encode(inference)
    answer = await pool.send(asked, b"POST", path, [*headers, *call.headers], body)
    return await infer.decode(await whole(answer))


async def called(pool: Pool, inference: Inference, call: Call) -> Answer:
    """The fleet's answer over gRPC: giving this up stops the inference in Triton."""
    asked = call.to(inference.signature)
    return await pool.begin(asked, call.headers, partial(stoppable, inference, call))


async def stoppable(inference: Inference, call: Call, replica: Replica, trace: Headers) -> Answer:
    """A replica's answer over gRPC; over HTTP where that is all there is."""
    asked = call.to(inference.signature)
    why = ""
    if not replica.channel.is_missing:
        try:
            return await unary.infer(replica.channel, asked, inference, trace)
        except NoGrpc as exc:
            why = exc.detail
    headers, body = await infer.encode(inference)
    path, left_s = infer_path(inference), call.left_s
    answer = await replica.http.send(b"POST", path, [*headers, *trace], body, timeout_s=left_s)
    if why and replica.channel.miss():  # and the replica is well
        log.warning("%s at %s: who leaves does not stop an inference there", why, replica.address)
    if answer.status >= 400:
        raise await complained(answer, asked)
    return await infer.decode(await whole(answer))


def model_path(model: str, version: str = "") -> str:
    """Triton's path of a model. Triton does not decode it: what must be quoted is no model's name."""
    path = f"/v2/models/{quote(model, safe=UNQUOTED)}"
    return f"{path}/versions/{version}" if version else path


def infer_path(inference: Inference) -> bytes:
    model = inference.signature
    return f"{model_path(model.model, model.version)}/infer".encode()
