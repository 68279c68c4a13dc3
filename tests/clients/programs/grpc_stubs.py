"""Plain grpcio with the stubs of Triton's proto files, as in any language of gRPC."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import grpc
from tritonclient.grpc import service_pb2 as messages
from tritonclient.grpc import service_pb2_grpc

from tests.clients.programs.outcomes import Call, ResponseError, Responses, Target, print_outcomes

HEALTH = "/grpc.health.v1.Health/Check"


def tensor(name: str, datatype: str, *shape: int, **contents: Any) -> Any:
    return messages.ModelInferRequest.InferInputTensor(
        name=name,
        datatype=datatype,
        shape=shape,
        contents=messages.InferTensorContents(**contents),
    )


def numbers(model: str = "simple", **more: Any) -> Any:
    inputs = [
        tensor("INPUT0", "INT32", 1, 16, int_contents=range(16)),
        tensor("INPUT1", "INT32", 1, 16, int_contents=[1] * 16),
    ]
    return messages.ModelInferRequest(model_name=model, inputs=inputs, **more)


def raw_numbers(*sizes: int) -> Any:
    inputs = [tensor(f"INPUT{number}", "INT32", 1, 16) for number in range(2)]
    contents = [bytes(size) for size in sizes]
    return messages.ModelInferRequest(
        model_name="simple", inputs=inputs, raw_input_contents=contents
    )


def list_requests() -> dict[str, tuple[str, Any]]:
    """The methods with one request and one response, and what is sent."""
    requests: dict[str, tuple[str, Any]] = {
        "ServerLive": ("ServerLive", messages.ServerLiveRequest()),
        "ServerReady": ("ServerReady", messages.ServerReadyRequest()),
        "ServerMetadata": ("ServerMetadata", messages.ServerMetadataRequest()),
        "ModelInfer": ("ModelInfer", numbers()),
        "ModelInfer raw": ("ModelInfer", raw_numbers(64, 64)),
        "ModelInfer raw that is short": ("ModelInfer", raw_numbers(64, 60)),
        "ModelInfer raw for one input": ("ModelInfer", raw_numbers(64)),
        "ModelInfer unknown": ("ModelInfer", numbers("unknown")),
        "ModelInfer no name": ("ModelInfer", numbers("")),
        "ModelInfer version 9": ("ModelInfer", numbers(model_version="9")),
        "ModelInfer version x": ("ModelInfer", numbers(model_version="x")),
        "ModelInfer id": ("ModelInfer", numbers(id="mine")),
        "RepositoryIndex ready": ("RepositoryIndex", messages.RepositoryIndexRequest(ready=True)),
        "RepositoryModelLoad unknown": (
            "RepositoryModelLoad",
            messages.RepositoryModelLoadRequest(model_name="unknown"),
        ),
        "RepositoryModelLoad no name": (
            "RepositoryModelLoad",
            messages.RepositoryModelLoadRequest(),
        ),
    }
    for method in ("ModelReady", "ModelMetadata", "ModelConfig", "ModelStatistics"):
        request_type = getattr(messages, f"{method}Request")
        for model, version in (("", ""), ("unknown", ""), ("simple", "9"), ("simple", "x")):
            if (method, model) == ("ModelStatistics", ""):
                continue  # they contain times
            name = f"{method} {model or 'no name'} {version}".strip()
            requests[name] = (method, request_type(name=model, version=version))
    requests["ModelReady"] = ("ModelReady", messages.ModelReadyRequest(name="simple"))
    return requests


def list_calls(target: Target) -> Iterator[Call]:
    channel = grpc.insecure_channel(target.grpc)
    stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
    metadata = tuple(target.headers.items())

    def call(method: str, request: Any) -> Any:
        return getattr(stub, method)(request, metadata=metadata, timeout=30)

    for name, (method, request) in list_requests().items():
        yield name, partial(call, method, request)

    def stream(*sent: Any) -> Responses:
        """The responses of a stream, each error as its message and what comes with it."""
        responses = Responses()
        for answer in stub.ModelStreamInfer(iter(sent), metadata=metadata, timeout=30):
            if answer.error_message:
                responses.append(ResponseError(answer.error_message))
                answer.error_message = ""
            responses.append(answer)
        return responses

    def list_statistics(model: str) -> Any:
        answer = call("ModelStatistics", messages.ModelStatisticsRequest(name=model))
        return [[each.name, each.version] for each in answer.model_stats]

    for model in ("simple", ""):
        yield f"ModelStatistics {model or 'all'}", partial(list_statistics, model)
    yield "ModelStreamInfer", lambda: stream(numbers(id="1"), numbers(id="2"))
    yield "ModelStreamInfer nothing", stream
    yield "ModelStreamInfer unknown", lambda: stream(numbers("unknown", id="1"), numbers(id="2"))
    for service in ("", "inference.GRPCInferenceService", "any"):
        message = bytes([10, len(service)]) + service.encode() if service else b""
        yield (
            f"Health {service}".strip(),
            partial(channel.unary_unary(HEALTH), message, metadata=metadata, timeout=30),
        )
    yield (
        "unknown method",
        lambda: channel.unary_unary("/inference.GRPCInferenceService/No")(b"", metadata=metadata),
    )
    yield "close", channel.close


if __name__ == "__main__":
    print_outcomes(list_calls)
