"""The servers that the clients are compared on: a real Triton, and the gateway before one and two of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from gateway.embedded.supervisor import EmbeddedTriton
from tests.clients.programs.outcomes import Target
from tests.support.keys import ADMIN
from tests.support.model_zoo.zoo import (
    AS_WRITTEN,
    COUNTING,
    LABELS,
    TEXT_MODELS,
    TICKING,
    Model,
    T,
    identity,
    write_repository,
)
from tests.support.servers import free_ports, gateway, triton_with


def sum_and_difference(name: str, datatype: str) -> Model:
    """A model with the tensors of `simple`, the model of Triton's own example programs."""
    inputs = tuple(T(f"INPUT{number}", datatype, (16,)) for number in range(2))
    outputs = tuple(T(f"OUTPUT{number}", datatype, (16,)) for number in range(2))
    return Model(name, "sum_and_difference", inputs, outputs, 8)


SCORES = T("SCORES", "FP32", (3,), labels=LABELS)
MODELS: Final = (
    sum_and_difference("simple", "INT32"),
    sum_and_difference("texts", "BYTES"),
    Model("classes", "identity", (T("X", "FP32", (3,)),), (SCORES,), 8),
    Model("failing", "failing", (T("X", "FP32", (1,)),), (T("Y", "FP32", (1,)),), 8),
    TICKING,
    COUNTING,
    *(model for model in TEXT_MODELS if model.name == "vectors"),
    identity("plain_text", "BYTES", (1,)),
    *(identity(f"unloaded_{number}", "INT32", (-1,)) for number in range(3)),
    identity("never_loaded", "INT32", (-1,)),
)
LOADED: Final = tuple(model.name for model in MODELS if model.name != "never_loaded")


@contextmanager
def running_triton(folder: Path) -> Iterator[EmbeddedTriton]:
    write_repository(folder, AS_WRITTEN, MODELS)
    with triton_with((folder,), LOADED) as triton:
        yield triton


def triton_target(triton: EmbeddedTriton) -> Target:
    return Target(triton.options.address, f"127.0.0.1:{triton.options.grpc_port}", ADMIN)


@contextmanager
def gateway_target(*urls: str, **settings: str) -> Iterator[Target]:
    (port,) = free_ports(1)
    with gateway(*urls, grpc_port=str(port), connect_timeout_s="10", **settings) as (client, _):
        yield Target(f"127.0.0.1:{client.base_url.port}", f"127.0.0.1:{port}", ADMIN)
