"""A slow body takes none of the slots of inferences."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import httpx
import pytest

from gateway.embedded.supervisor import EmbeddedTriton
from tests.support.servers import gateway_before
from tests.support.wait import TIMEOUT_S

V2_BODY = {"inputs": [{"name": "TEXT", "shape": [1, 1], "datatype": "BYTES", "data": ["a text"]}]}


@pytest.fixture(scope="module")
def one_slot(demo_triton: EmbeddedTriton) -> Iterator[httpx.Client]:
    """A gateway with one slot for each model, and no queue."""
    settings = {"max_model_inflight": "1", "max_queue": "0", "body_stall_s": "600"}
    with gateway_before(demo_triton.options.url, **settings) as client:
        yield client


@pytest.mark.parametrize(
    ("target", "body"),
    [
        ("/v1/models/text_ensemble/infer", {"inputs": "a text"}),
        ("/v1/models/text_ensemble:predict", {"instances": ["a text"]}),
        ("/v2/models/text_ensemble/infer", V2_BODY),
    ],
)
def test_slow_body_holds_no_slot(one_slot: httpx.Client, target: str, body: object) -> None:
    url = one_slot.base_url
    with socket.create_connection((url.host, url.port or 80), TIMEOUT_S) as slow:
        head = f"POST {target} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        slow.sendall(f"{head}Content-Length: 20\r\n\r\n{{".encode())
        for _ in range(5):
            assert one_slot.post(target, json=body).status_code == 200
