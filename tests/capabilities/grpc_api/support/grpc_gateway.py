"""A gateway that serves gRPC, and calls of its gRPC API."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import grpc
import httpx
import numpy as np
import psutil
import tritonclient.grpc as triton_grpc
from tritonclient.utils import InferenceServerException

from tests.support.servers import Command, free_ports, gateway

SERVICE = "/inference.GRPCInferenceService"
INFER = f"{SERVICE}/ModelInfer"
STREAM = f"{SERVICE}/ModelStreamInfer"


class GrpcGateway(NamedTuple):
    address: str  # of gRPC
    http: httpx.Client
    command: Command


@contextmanager
def grpc_gateway(*urls: str, **settings: str) -> Iterator[GrpcGateway]:
    """`triton-gateway serve` before these Tritons, with gRPC."""
    (port,) = free_ports(1)
    with gateway(*urls, grpc_port=str(port), **settings) as (client, command):
        yield GrpcGateway(f"127.0.0.1:{port}", client, command)


def memory_mib(gateway: GrpcGateway) -> float:
    return float(psutil.Process(gateway.command.pid).memory_info().rss) / (1 << 20)


def make_input(name: str, values: np.ndarray, datatype: str) -> triton_grpc.InferInput:
    tensor = triton_grpc.InferInput(name, list(values.shape), datatype)
    return tensor.set_data_from_numpy(values)


def fp32(*values: float, name: str = "X", shape: tuple[int, ...] = ()) -> triton_grpc.InferInput:
    array = np.array(values, np.float32)
    return make_input(name, array.reshape(shape or array.shape), "FP32")


def call_bytes(address: str, method: str, message: bytes, **options: Any) -> bytes:
    """Call a method with a message as it is. Raises `grpc.RpcError`."""
    with grpc.insecure_channel(address) as channel:
        return bytes(channel.unary_unary(method)(message, timeout=30, **options))


def failure(call: Any, *arguments: Any, **named: Any) -> tuple[str, str]:
    """The code and the message with which a call fails."""
    try:
        call(*arguments, **named)
    except InferenceServerException as exc:
        return str(exc.status()).removeprefix("StatusCode."), str(exc.message())
    except grpc.RpcError as exc:
        return exc.code().name, str(exc.details())
    raise AssertionError("the call succeeded")
