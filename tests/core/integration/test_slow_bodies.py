"""A body that trickles holds none of the places that inferences take."""

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
def one_place(demo_triton: EmbeddedTriton) -> Iterator[httpx.Client]:
    """A gateway with one place for each model, and none to wait for it."""
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
def test_a_body_that_trickles_holds_no_place(
    one_place: httpx.Client, target: str, body: object
) -> None:
    url = one_place.base_url
    with socket.create_connection((url.host, url.port or 80), TIMEOUT_S) as slow:
        head = f"POST {target} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        slow.sendall(f"{head}Content-Length: 20\r\n\r\n{{".encode())
        for _ in range(5):
            assert one_place.post(target, json=body).status_code == 200
