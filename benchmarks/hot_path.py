"""CPU time of the gateway's own work per request, by part, without a network."""

from __future__ import annotations

import tempfile
import timeit
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

from starlette.types import Scope

from benchmarks.credentials import KEY, write_keys_file
from benchmarks.run import Run
from gateway.access.auth import CORE_PATHS, Authenticator, authorize
from gateway.access.keys import KeysFile
from gateway.access.limits import RateLimiter
from gateway.callers import Right
from gateway.capabilities.installed import RULE_PARSERS
from gateway.capacity.admission import AdmissionQueue
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.request_info import RequestInfo, current_request_info
from gateway.telemetry.tracing import create_request_id, find_request_id

MODEL = "small"
TIMES, REPEAT = 20_000, 7


def build_parts(folder: Path) -> Mapping[str, Callable[[], object]]:
    headers = [(b"host", b"localhost"), (b"authorization", f"Bearer {KEY}".encode())]
    scope: Scope = {"path": f"/v2/models/{MODEL}/infer", "headers": headers, "type": "http"}
    metrics = Metrics()
    admission = AdmissionQueue(2048, 1024, 512, metrics)
    access = Authenticator(KeysFile(write_keys_file(folder), RULE_PARSERS))
    rates = RateLimiter(metrics)
    info = scope["request_info"] = RequestInfo("0" * 32)
    info.route, info.model = "/v2", MODEL

    def observe() -> None:
        new_info = RequestInfo(find_request_id(headers) or create_request_id())
        current_request_info.set(new_info)
        metrics.in_flight["/v2"] += 1
        new_info.route, new_info.model = "/v2", MODEL
        metrics.in_flight["/v2"] -= 1
        metrics.observe(new_info, 200, 0.003)

    def flush() -> None:
        metrics.observe(info, 200, 0.003)
        metrics.flush()

    def authorize_and_admit() -> None:
        caller = info.caller = access.authenticate(scope)
        if caller.limits is not None and scope["path"] not in CORE_PATHS.unlimited:
            raise AssertionError
        authorize(scope, Right.infer, MODEL)
        admission.try_acquire(MODEL)
        admission.release(MODEL)

    def count_request() -> None:
        coroutine = rates.count_request("bench", 1_000_000)
        try:
            coroutine.send(None)
        except StopIteration:
            return
        raise AssertionError("the rate limiter must not wait")

    return {
        "request ID, request info and metrics": observe,
        "authentication, authorization and admission": authorize_and_admit,
        "rate limit, for keys with one": count_request,
        "flush of a model's counts, twice a second": flush,
    }


def table(stack: ExitStack, run: Run) -> Iterator[str]:
    yield "\n**The gateway's own work per request, by part, without a network**\n"
    yield "| | µs |"
    yield "|---|---|"
    with tempfile.TemporaryDirectory() as folder:
        for name, part in build_parts(Path(folder)).items():
            spent_s = min(timeit.repeat(part, number=TIMES, repeat=REPEAT)) / TIMES
            yield f"| {name} | {spent_s * 1e6:.1f} |"
