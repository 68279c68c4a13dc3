"""KServe's inference clients: the REST API in its version 2, and gRPC."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from typing import Any

from kserve import InferInput, InferOutput, InferRequest
from kserve.inference_client import InferenceGRPCClient, InferenceRESTClient, RESTConfig

from tests.clients.programs.outcomes import Call, Target, print_outcomes

VALUES = [[*range(16)]]
TEXTS = [[str(number) for number in range(16)]]


def request(model: str = "simple", datatype: str = "INT32", **more: Any) -> InferRequest:
    values = TEXTS if datatype == "BYTES" else VALUES
    inputs = [InferInput(f"INPUT{number}", [1, 16], datatype, values) for number in range(2)]
    return InferRequest(model, inputs, **more)


def summary(response: Any) -> dict[str, Any]:
    def values(output: InferOutput) -> Any:
        return [output.name, output.datatype, list(output.shape), output.as_numpy()]

    return {
        "model": response.model_name,
        "version": response.model_version,
        "outputs": [values(output) for output in response.outputs],
    }


def list_calls(target: Target) -> Iterator[Call]:
    logging.disable(logging.CRITICAL)  # they log what they raise
    base = f"http://{target.http}"
    rest = InferenceRESTClient(RESTConfig(protocol="v2", retries=0))
    clients: dict[str, Any] = {}
    headers = target.headers
    metadata = tuple(headers.items())

    def grpc_client() -> Any:
        if not clients:
            clients["grpc"] = InferenceGRPCClient(target.grpc, retries=0)
        return clients["grpc"]

    async def ready_grpc(model: str) -> Any:
        return await grpc_client().is_model_ready(model, headers=metadata)

    async def infer_rest(sent: InferRequest) -> Any:
        return summary(await rest.infer(base, sent, model_name=sent.model_name, headers=headers))

    async def infer_grpc(sent: InferRequest) -> Any:
        return summary(await grpc_client().infer(sent, headers=metadata))

    yield "REST: live", lambda: rest.is_server_live(base, headers=headers)
    yield "REST: ready", lambda: rest.is_server_ready(base, headers=headers)
    yield "gRPC: live", lambda: grpc_client().is_server_live(headers=metadata)
    yield "gRPC: ready", lambda: grpc_client().is_server_ready(headers=metadata)
    for model in ("simple", "unknown", "never_loaded"):
        yield (
            f"REST: model ready {model}",
            partial(rest.is_model_ready, base, model, headers=headers),
        )
        yield (
            f"gRPC: model ready {model}",
            partial(ready_grpc, model),
        )
    sent = {
        "infer": request(),
        "infer BYTES": request("texts", "BYTES"),
        "infer unknown model": request("unknown"),
        "infer wrong datatype": request(datatype="INT64"),
    }
    for name, each in sent.items():
        yield f"REST: {name}", partial(infer_rest, each)
        yield f"gRPC: {name}", partial(infer_grpc, each)
    yield "REST: close", rest.close
    yield "gRPC: close", lambda: grpc_client().close()


if __name__ == "__main__":
    print_outcomes(list_calls)
