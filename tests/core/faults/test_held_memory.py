"""Memory that requests hold until their responses."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import orjson
import pytest

from tests.support.fleet import QUICK, url_of, write_echo
from tests.support.metrics import held_memory
from tests.support.servers import Triton, gateway_before
from tests.support.wait import wait_until


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Triton]:
    folder = tmp_path_factory.mktemp("models")
    write_echo(folder, "echo", dims=-1)
    with Triton(folder, "echo") as triton:
        triton.wait()
        yield triton


@pytest.mark.fault("clients of every kind hold memory at once")
def test_inflated_body_is_charged_until_its_response(triton: Triton) -> None:
    hold = triton.repository / "echo" / "hold"
    hold.touch()
    tensor = {"name": "X", "datatype": "FP32", "shape": [2], "data": [-1000, 0]}
    body = orjson.dumps({"inputs": [tensor]}) + b" " * 900_000
    headers = {"Content-Encoding": "gzip"}
    with gateway_before(url_of(triton), **QUICK) as client, ThreadPoolExecutor(1) as pool:
        path = "/v2/models/echo/infer"
        wait_until(lambda: client.get("/v2/models/echo/ready").is_success)
        response = pool.submit(client.post, path, content=gzip.compress(body), headers=headers)
        wait_until(lambda: held_memory(client)["body"] == len(body))
        hold.unlink()
        assert response.result().status_code == 200
        wait_until(lambda: held_memory(client)["body"] == 0)
