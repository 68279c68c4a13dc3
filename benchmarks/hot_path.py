"""What the gateway adds to every request besides passing it on, part by part, in this process alone."""

from __future__ import annotations

import hashlib
import tempfile
import timeit
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import yaml
from starlette.types import Scope

from gateway.admission import AdmissionQueue
from gateway.auth import Authenticator, authorize
from gateway.keys import KeysFile, Right
from gateway.metrics import Metrics
from gateway.rate_limit import UNLIMITED_PATHS, RateLimiter
from gateway.request_info import RequestInfo, current_request_info
from gateway.tracing import choose_request_id

KEY, MODEL = "tgw_benchmark", "small"
TIMES, REPEAT = 20_000, 7


def keys_file(folder: Path, **more: object) -> KeysFile:
    entry = {"name": "bench", "sha256": hashlib.sha256(KEY.encode()).hexdigest(), **more}
    path = folder / f"{len(more)}.yaml"
    path.write_text(yaml.safe_dump({"keys": [{**entry, "roles": ["infer"], "models": ["sm*"]}]}))
    file = KeysFile(path)
    file.load()
    return file


def parts(folder: Path) -> Mapping[str, Callable[[], object]]:
    headers = [(b"host", b"localhost"), (b"authorization", f"Bearer {KEY}".encode())]
    scope: Scope = {"path": f"/v2/models/{MODEL}/infer", "headers": headers, "type": "http"}
    metrics = Metrics()
    gate = AdmissionQueue(2048, 1024, 512, metrics)
    access = Authenticator(keys_file(folder))
    rates = RateLimiter(metrics)
    notes = scope["notes"] = RequestInfo("0" * 32)
    notes.route, notes.model = "/v2", MODEL

    def accounts() -> None:
        made = RequestInfo(choose_request_id(headers))
        current_request_info.set(made)
        metrics.in_flight["/v2"] += 1
        made.route, made.model = "/v2", MODEL
        metrics.in_flight["/v2"] -= 1
        metrics.observe(made, 200, 0.003)

    def flush() -> None:
        metrics.observe(notes, 200, 0.003)
        metrics.flush()

    def keys_and_limits() -> None:
        caller = notes.caller = access.authenticate(scope)
        if caller.requests_per_second is not None and scope["path"] not in UNLIMITED_PATHS:
            raise AssertionError
        authorize(scope, Right.infer, MODEL)
        gate.try_acquire(MODEL)
        gate.release(MODEL)

    def rate() -> None:
        step = rates.count_request("bench", 1_000_000)
        try:
            step.send(None)
        except StopIteration:
            return
        raise AssertionError("it waits for something")

    return {
        "request id, notes and counts": accounts,
        "key, role, model and a place": keys_and_limits,
        "requests per second, for a key that has a rate": rate,
        "twice a second for each model: its counts are passed on": flush,
    }


def table() -> Iterator[str]:
    """Microseconds of each call at best: the machine is shared."""
    yield "\n**The gateway's own accounts, by part, in one process without a network**\n"
    yield "| | µs |"
    yield "|---|---|"
    with tempfile.TemporaryDirectory() as folder:
        for name, part in parts(Path(folder)).items():
            spent_s = min(timeit.repeat(part, number=TIMES, repeat=REPEAT)) / TIMES
            yield f"| {name} | {spent_s * 1e6:.1f} |"
