"""Time to the first result of a decoupled model, compared with Triton's own client."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import httpx
import numpy as np
import tritonclient.grpc as triton_grpc

from benchmarks import servers
from gateway.embedded.supervisor import EmbeddedTriton

ROUNDS = 100
BODY = {"inputs": {"COUNT": [1], "SECONDS": [0.0]}}
EVENTS = {"Accept": "text/event-stream"}


class Direct:
    """Triton's gRPC client on one connection."""

    def __init__(self, client: triton_grpc.InferenceServerClient) -> None:
        self._client = client
        self._arrived = threading.Event()
        self._inputs = []
        for name, kind, value in (
            ("COUNT", "INT32", np.int32(1)),
            ("SECONDS", "FP32", np.float32(0)),
        ):
            tensor = triton_grpc.InferInput(name, [1], kind)
            self._inputs.append(tensor.set_data_from_numpy(np.array([value])))
        client.start_stream(lambda result, error: self._arrived.set())

    def first_event_s(self) -> float:
        self._arrived.clear()
        started = time.perf_counter()
        self._client.async_stream_infer("ticking", self._inputs)
        self._arrived.wait()
        return time.perf_counter() - started


def first_event_s(client: httpx.Client) -> float:
    started = time.perf_counter()
    with client.stream("POST", "/v1/models/ticking/infer", json=BODY, headers=EVENTS) as response:
        pieces = response.iter_raw()
        next(pieces)
        took_s = time.perf_counter() - started
        for _ in pieces:
            pass
    return took_s


def table(triton: EmbeddedTriton, stack: ExitStack, seconds: float, count: int) -> Iterator[str]:
    url, _ = stack.enter_context(servers.gateway(triton.options.url))
    client = stack.enter_context(httpx.Client(base_url=url, timeout=60))
    address = f"127.0.0.1:{triton.options.grpc_port}"
    direct = Direct(stack.enter_context(triton_grpc.InferenceServerClient(address)))
    first_event_s(client)
    direct.first_event_s()
    # The clients take turns, so that a slow moment of the machine affects both.
    pairs = [(direct.first_event_s(), first_event_s(client)) for _ in range(ROUNDS)]
    direct_s, gateway_s = (statistics.median(column) for column in zip(*pairs, strict=True))
    yield "\n**The first event of a stream, sequential requests**\n"
    yield "| | p50 ms | of Triton's client |"
    yield "|---|---|---|"
    yield f"| Triton's client, gRPC | {direct_s * 1e3:.2f} | 1.00 |"
    yield f"| gateway /v1, httpx | {gateway_s * 1e3:.2f} | {gateway_s / direct_s:.2f} |"
