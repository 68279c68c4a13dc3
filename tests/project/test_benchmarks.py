"""The servers of the benchmarks do the same work, and its parts run; nothing is measured here."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest

from benchmarks import grpc_calls, in_process, peers, servers
from benchmarks.requests import Request, encode_v2_infer
from benchmarks.startup import IMPORTS
from benchmarks.workloads import EVENTS, Workload, build_workloads
from gateway.embedded.supervisor import EmbeddedTriton
from tests.capabilities.grpc_api.support.grpc_gateway import INFER, call_bytes, grpc_gateway
from tests.support.missing import format_reason
from tests.support.servers import ROOT, gateway_before, triton_on_free_ports

pytestmark = pytest.mark.long

WORKLOADS = build_workloads()
# The gateway decodes a JPEG at a reduced scale, so that its pixels are not quite the same.
TOLERANCE = 0.5


class Stage(NamedTuple):
    triton: EmbeddedTriton
    gateway: httpx.Client
    plain: httpx.Client


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with ExitStack() as stack:
        repository = stack.enter_context(servers.repository())
        triton = stack.enter_context(triton_on_free_ports(repository))
        gateway = stack.enter_context(gateway_before(triton.options.url))
        url, _ = stack.enter_context(servers.plain_fastapi(triton))
        yield Stage(triton, gateway, stack.enter_context(httpx.Client(base_url=url, timeout=60)))


def post(client: httpx.Client, path: str, request: Request) -> httpx.Response:
    response = client.post(path, content=request.body, headers=request.headers)
    assert response.status_code == 200, response.text
    return response


@pytest.mark.parametrize("work", WORKLOADS[:-1], ids=lambda work: work.title)
def test_plain_fastapi_and_the_gateway_return_the_same_values(work: Workload, stage: Stage) -> None:
    outputs = post(stage.gateway, f"/v1/models/{work.model}/infer", work.request).json()["outputs"]
    plain = post(stage.plain, work.plain_path, work.plain_request).json()
    expected = np.ravel(outputs["Y"])
    found = np.ravel(plain["Y"])
    assert np.allclose(expected, found, atol=TOLERANCE if "FP32" in work.title else 0)
    triton = httpx.Client(base_url=f"http://127.0.0.1:{stage.triton.options.http_port}")
    with triton:
        prepared = post(triton, work.prepared_path, work.prepared_request)
    assert len(prepared.content) > len(expected) * 4


def test_both_streams_have_every_event(stage: Stage) -> None:
    work = WORKLOADS[-1]
    responses = (
        post(stage.gateway, f"/v1/models/{work.model}/infer", work.request),
        post(stage.plain, work.plain_path, work.plain_request),
    )
    counts = [sum("NUMBER" in line for line in answer.iter_lines()) for answer in responses]
    assert counts == [EVENTS, EVENTS]


def test_proxies_of_the_comparison_return_the_bytes_of_triton(stage: Stage) -> None:
    request = encode_v2_infer(np.ones((1, 256), np.float32), "FP32")
    address = f"127.0.0.1:{stage.triton.options.http_port}"
    with (
        servers.bare_proxy(address) as (url, _),
        httpx.Client(base_url=url) as proxy,
        httpx.Client(base_url=f"http://{address}") as direct,
    ):
        path = "/v2/models/small/infer"
        bodies = [post(client, path, request).content for client in (proxy, proxy, direct)]
    assert bodies[0] == bodies[1] == bodies[2]
    message = grpc_calls.encode_infer_message(np.arange(256, dtype=np.float32).reshape(1, -1))
    with (
        grpc_gateway(stage.triton.options.url) as gateway,
        grpc_calls.grpc_forwarder(stage.triton) as (forwarder, _),
    ):
        responses = [call_bytes(each, INFER, message) for each in (gateway.address, forwarder)]
    assert responses[0] == responses[1]


def run_module(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", *arguments]
    environment: dict[str, Any] = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def test_counted_requests_succeed_in_one_process() -> None:
    ended = run_module("-m", in_process.__name__, "--warm-up", "1", "--count", "1")
    assert (ended.returncode, ended.stderr) == (0, "")


def test_measured_imports_exist() -> None:
    for statement in IMPORTS.values():
        ended = run_module("-c", statement)
        assert (ended.returncode, ended.stderr) == (0, ""), statement


def test_measurement_of_a_gpu_says_what_is_missing(tmp_path: Path) -> None:
    run = run_module("-m", "benchmarks.gpu", str(tmp_path), "--on", "cpu")
    problem = f"error: {tmp_path} is no virtual environment: it has no bin/python\n"
    assert (run.returncode, run.stderr) == (1, problem)


def test_unknown_table_is_refused() -> None:
    ended = run_module("-m", "benchmarks", "--only", "no-such-table")
    assert ended.returncode == 2
    assert "pass-through" in ended.stderr


@pytest.mark.parametrize("arguments", [["--async"], ["--sync"], ["--async", "--streaming"]])
def test_perf_analyzer_measures_the_gateway_over_grpc(stage: Stage, arguments: list[str]) -> None:
    try:
        program = peers.find_program("perf_analyzer")
    except servers.ServerNotStarted:
        pytest.skip(format_reason("perf_analyzer", "make bench-peers"))
    with grpc_gateway(stage.triton.options.url) as gateway:
        command = [program, "-i", "grpc", "-u", gateway.address, "-m", "small", "-b", "1"]
        command += ["--measurement-interval", "500", "--max-trials", "3", "-s", "999"]
        ended = subprocess.run(
            [*command, *arguments], capture_output=True, text=True, timeout=120, check=False
        )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "throughput" in ended.stdout
