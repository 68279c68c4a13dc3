"""A running Triton, and a model on which to observe the behaviours that the gateway relies on.

The model is loaded under a name of its own, and unloaded at the end. Everything is asked with the gateway's
own code.
"""

from __future__ import annotations

import asyncio
import base64
import re
from collections.abc import Awaitable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from gateway.errors import GatewayError, ModelControlModeConflict
from gateway.fleet.index import Index
from gateway.fleet.probe import INDEX_PATH, PROBE_STATUS_REASONS, parse_index_response
from gateway.fleet.replica import Replica
from gateway.fleet.transports import (
    FailedResponse,
    GrpcStreamCall,
    GrpcUnaryCall,
    decode_json,
    prepare_http_infer,
    triton_model_path,
)
from gateway.http_client.client import CompleteResponse
from gateway.tensors.inputs import InferInputs
from gateway.tensors.signature import Signature, build_signature
from gateway.triton.grpc import byte_channel
from gateway.triton.grpc.management import (
    build_load_request,
    build_unload_request,
    call_management_api,
)
from gateway.triton.grpc.messages import encode_grpc_request
from gateway.triton.inference import InferRequest, InferResponse, decode_http_response
from gateway.triton.request_target import RequestTarget

MODEL: Final = "triton_gateway_conformance"
MODEL_PATH: Final = triton_model_path(MODEL)
TARGET: Final = RequestTarget(MODEL, timeout_s=10.0)
LOAD_TIMEOUT_S: Final = 60.0
VALUES: Final = np.array([[1.5, -2.25, 0.0]], np.float32)
# Numbers of steps of the model, or its failure in place of a response.
FAILURE: Final = -1
FAILURE_MESSAGE: Final = "it was made to fail"
NO_BACKEND: Final = re.compile(r"unable to find .*(?:backend|lib)", re.I)


@dataclass(frozen=True)
class Variant:
    """The model with one config: the parameters of its load, and the signature that Triton must describe."""

    backend: str
    load_parameters: dict[str, Any]
    signature: Signature


def build_variant(backend: str, path: str, content: bytes, **options: Any) -> Variant:
    sides = {"input": [("VALUES", "FP32", -1)], "output": [("RESULT", "FP32", -1)]}
    if backend == "python":
        sides["input"].append(("STEPS", "INT32", 1))
        sides["output"].append(("LAST_STEPS", "INT32", 1))
    group = [{"count": 1, "kind": "KIND_CPU"}]
    config = {"backend": backend, "max_batch_size": 1, "instance_group": group, **options}
    metadata: dict[str, Any] = {"name": MODEL, "versions": ["1"]}
    for side, tensors in sides.items():
        config[side] = [
            {"name": name, "data_type": f"TYPE_{datatype}", "dims": [size]}
            for name, datatype, size in tensors
        ]
        metadata[f"{side}s"] = [
            {"name": name, "datatype": datatype, "shape": [-1, size]}
            for name, datatype, size in tensors
        ]
    parameters = {"config": config, f"file:{path}": base64.b64encode(content).decode()}
    return Variant(backend, parameters, build_signature(metadata, config))


SOURCE: Final = Path(__file__).with_name("conformance_model.py").read_bytes()
build_python_variant: Final = partial(build_variant, "python", "1/model.py")
MAX_QUEUE_SIZE: Final = 2
QUEUED: Final = build_python_variant(
    SOURCE, dynamic_batching={"default_queue_policy": {"max_queue_size": MAX_QUEUE_SIZE}}
)
DECOUPLED: Final = build_python_variant(SOURCE, model_transaction_policy={"decoupled": True})
STATEFUL: Final = build_python_variant(
    SOURCE, sequence_batching={"max_sequence_idle_microseconds": 60_000_000}
)
BROKEN: Final = build_python_variant(f"raise ValueError('{FAILURE_MESSAGE}')\n".encode())
# An ONNX graph that returns its input, for a Triton without the Python backend.
GRAPH: Final = (
    "CAcSADpXChoKBlZBTFVFUxIGUkVTVUxUIghJZGVudGl0eRIBZ1oaCgZWQUxVRVMSEAoOCAESCgoDEgFiCgMSAW5iGgoG"
    "UkVTVUxUEhAKDggBEgoKAxIBYgoDEgFuQgQKABAN"
)
IDENTITY: Final = build_variant("onnxruntime", "1/model.onnx", base64.b64decode(GRAPH))


async def find_error(work: Awaitable[object]) -> GatewayError | None:
    try:
        await work
    except FailedResponse as exc:
        exc.response.close()
        return exc.error
    except GatewayError as exc:
        return exc
    return None


class ObservedTriton:
    """A Triton, and the variant of the model that is loaded there."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.variant: Variant | None = None

    async def request(
        self, method: bytes, path: bytes, body: bytes = b"", *, has_secret: bool = True
    ) -> CompleteResponse:
        headers = self.replica.management_headers if has_secret else []
        return await self.replica.http.request(
            method, path, body=body, headers=headers, timeout_s=TARGET.timeout_s, fresh=True
        )

    async def read_json(self, path: str) -> Any:
        return decode_json((await self.request(b"GET", path.encode())).body)

    async def read_index(self) -> Index:
        response = await self.request(b"POST", INDEX_PATH)
        assert response.status == 200, PROBE_STATUS_REASONS.get(response.status, response.status)
        return await parse_index_response(response.body)

    async def manage(self, message: Any, *, has_secret: bool = True) -> None:
        replica = self.replica
        metadata = replica.management_metadata if has_secret else ()
        target = replica.address.grpc_target
        await call_management_api(target, message, LOAD_TIMEOUT_S, replica.grpc_tls, metadata)

    async def load(self, *variants: Variant) -> Variant:
        """Load the first of the variants whose backend Triton has; skip the test if it has none."""
        if self.variant in variants:
            return self.variant
        for variant in variants:
            load = build_load_request(MODEL, variant.load_parameters)
            error = await find_error(self.manage(load))
            if error is None:
                self.variant = variant
                return variant
            if isinstance(error, ModelControlModeConflict):
                pytest.skip("Triton does not run with --model-control-mode=explicit")
            if not NO_BACKEND.search(error.detail):
                raise error
        pytest.skip(f"Triton lacks the backend {variants[-1].backend}")

    async def unload(self) -> None:
        self.variant = None
        await self.manage(build_unload_request(MODEL, {}))

    def build_request(
        self, steps: int = 0, target: RequestTarget = TARGET, rows: int = 1
    ) -> InferRequest:
        signature = (self.variant or QUEUED).signature
        counts = np.full((rows, 1), steps, np.int32)
        arrays = {"VALUES": np.repeat(VALUES, rows, axis=0), "STEPS": counts}
        inputs = InferInputs({name: arrays[name] for name in signature.inputs})
        deadline = asyncio.get_running_loop().time() + target.timeout_s
        return InferRequest(target, signature, inputs, (), {}, "", deadline, [])

    async def infer_over_http(self, **options: Any) -> InferResponse:
        call = await prepare_http_infer(self.build_request(**options), [])
        response = await call.send(self.replica, TARGET.timeout_s, None)
        return await decode_http_response(await response.read_complete())

    async def infer_over_grpc(self, **options: Any) -> InferResponse:
        call = GrpcUnaryCall(self.build_request(**options))
        return await call.send(self.replica, TARGET.timeout_s, None)

    async def read_stream(self, steps: int) -> list[bytes]:
        """Return the messages of a stream. Raises `FailedResponse` for an error of the model."""
        request = self.build_request(steps)
        message = encode_grpc_request(request, request.remaining_s)
        call = GrpcStreamCall(TARGET, byte_channel.STREAM_METHOD, message)
        stream = await call.send(self.replica, TARGET.timeout_s, None)
        messages = []
        try:
            while (received := await stream.read_message(TARGET.timeout_s)) is not None:
                messages.append(received)
        finally:
            stream.close()
        return messages
