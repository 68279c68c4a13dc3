"""`triton-gateway rollout` with a real Triton: forwards, and back when the new version fails or is slow."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from math import inf
from pathlib import Path

import httpx
import pytest

from gateway.commands.errors import ClientError, UsageError
from gateway.commands.rollout import (
    Rollout,
    RolloutLimits,
    RolloutPlan,
    VersionTraffic,
    compute_p99_s,
    find_violation,
    parse_limits,
    parse_steps,
)
from gateway.commands.target import Target
from gateway.commands.top import ModelTraffic
from tests.capabilities.versions.support.versioned import (
    LABELS,
    NAME,
    V2_BODY,
    set_behaviour,
    write_versions,
)
from tests.support.fleet import QUICK
from tests.support.gateway_forks import run_gateway
from tests.support.keys import ADMIN, METRICS, bearer, entry, written
from tests.support.servers import ROOT, Triton, gateway_before
from tests.support.wait import TIMEOUT_S, wait_until

INFER = f"/v2/models/{NAME}/infer"
# The machine may be slow: only a version that is made slow exceeds this limit.
TOLERANT = ("--max-p99", "5s")


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_versions(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def triton(repository: Path) -> Iterator[Triton]:
    with Triton(repository, NAME) as running:
        running.wait()
        yield running


@pytest.fixture(scope="module", name="shared")
def shared_gateway(triton: Triton) -> Iterator[httpx.Client]:
    with gateway_before(triton.options.url, **QUICK) as client:
        wait_until(lambda: client.get(f"/v1/models/{NAME}").status_code == 200)
        yield client


@pytest.fixture
def client(shared: httpx.Client, repository: Path) -> httpx.Client:
    for version in (1, 2, 3):
        set_behaviour(repository, version)
    shared.delete(f"{LABELS}/default")
    return shared


@contextmanager
def traffic(client: httpx.Client) -> Iterator[None]:
    """Requests without a version."""
    done = threading.Event()

    def send() -> None:
        with httpx.Client(base_url=client.base_url, timeout=TIMEOUT_S) as own:
            while not done.wait(0.01):
                own.post(INFER, json=V2_BODY)

    threads = [threading.Thread(target=send) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        done.set()
        for thread in threads:
            thread.join()


def start(client: httpx.Client, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "gateway", "rollout", NAME, "--url", str(client.base_url)]
    return subprocess.Popen(
        [*command, *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def roll_out(client: httpx.Client, *arguments: str) -> tuple[int, str, str]:
    words = ("rollout", NAME, "--url", str(client.base_url), *arguments)
    ended = run_gateway(*words, timeout_s=2 * TIMEOUT_S)
    return ended.returncode, ended.stdout, ended.stderr


def default_label(client: httpx.Client) -> dict[str, object]:
    label = client.get(f"{LABELS}/default").json()
    return {key: label[key] for key in ("version", "versions", "sticky") if key in label}


def test_rollout_moves_a_label_step_by_step(client: httpx.Client) -> None:
    client.put(f"{LABELS}/default", json={"version": "1", "sticky": "key"}).raise_for_status()
    with traffic(client):
        status, printed, error = roll_out(
            client, "--from", "1", "--to", "2", "--steps", "20,50,100", "--every", "1", *TOLERANT
        )
    assert (status, error) == (0, "")
    steps = printed.splitlines()
    assert [step.split(":")[0] for step in steps] == ["20 %", "50 %", "100 %"]
    assert all("version 2: " in step and "0.0% failed" in step for step in steps)
    assert default_label(client) == {"version": "2", "sticky": "key"}
    assert client.post(INFER, json=V2_BODY).json()["model_version"] == "2"


def test_rollout_goes_back_if_the_version_fails(client: httpx.Client, repository: Path) -> None:
    set_behaviour(repository, 2, fail_every=10)
    with traffic(client):
        status, printed, error = roll_out(
            client, "--from", "1", "--to", "2", "--steps", "50,100", "--every", "1", *TOLERANT
        )
    assert status == 1
    assert "label default of model split is back on version 1: at 50 % for version 2" in error
    assert "requests failed" in error
    assert printed == ""
    assert default_label(client) == {"version": "1"}


@pytest.mark.long
def test_rollout_goes_back_if_the_version_is_slow(client: httpx.Client, repository: Path) -> None:
    set_behaviour(repository, 3, sleep_s=0.4)
    limits = ("--max-p99", "200ms", "--min-requests", "10")
    with traffic(client):
        status, _, error = roll_out(
            client, "--from", "1", "--to", "3", "--steps", "50,100", "--every", "1", *limits
        )
    assert status == 1
    assert "is back on version 1: at 50 % for version 3, its p99 is" in error
    assert "the limit is 200 ms" in error
    assert default_label(client) == {"version": "1"}


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_rollout_goes_back_if_it_is_interrupted(
    client: httpx.Client, number: signal.Signals
) -> None:
    running = start(client, "--from", "1", "--to", "2", "--steps", "50", "--every", "600")
    wait_until(lambda: default_label(client) == {"versions": {"1": 50, "2": 50}})
    running.send_signal(number)
    _, error = running.communicate(timeout=TIMEOUT_S)
    assert running.returncode != 0
    assert "is back on version 1: interrupted" in error
    assert default_label(client) == {"version": "1"}


@pytest.mark.long
def test_rollout_retries_to_go_back_until_it_can(
    client: httpx.Client, triton: Triton, tmp_path: Path
) -> None:
    allowed, watcher = entry(ADMIN, "admin"), entry(METRICS, "metrics")
    keys = written(tmp_path / "keys.yaml", [allowed, watcher])

    def count_rejections() -> int:
        page = own.get("/metrics", headers=bearer(METRICS)).text
        pattern = 'gateway_request_duration_seconds_count{.*status="4xx".*} (.*)'
        return round(sum(map(float, re.findall(pattern, page))))

    with gateway_before(triton.options.url, keys_file=str(keys), **QUICK) as own:
        own.headers.update(bearer(ADMIN))
        wait_until(lambda: own.get(f"/v1/models/{NAME}").status_code == 200)
        running = start(
            own, "--from", "1", "--to", "2", "--steps", "50", "--every", "600", "--key", ADMIN
        )
        wait_until(lambda: default_label(own) == {"versions": {"1": 50, "2": 50}})
        before = count_rejections()
        written(keys, [watcher])
        wait_until(lambda: count_rejections() >= before + 2)  # a poll, and the way back
        written(keys, [allowed, watcher])
        _, error = running.communicate(timeout=TIMEOUT_S)
        assert running.returncode == 1
        assert "is back on version 1: " in error
        assert default_label(own) == {"version": "1"}


def test_rollout_that_cannot_begin_changes_no_label(client: httpx.Client) -> None:
    status, _, error = roll_out(client, "--from", "1", "--to", "9")
    assert status == 1
    assert "version 9" in error
    assert "is back" not in error
    assert client.get(f"{LABELS}/default").status_code == 404
    client.put(f"{LABELS}/default", json={"version": "3"}).raise_for_status()
    status, _, error = roll_out(client, "--from", "1", "--to", "2")
    assert status == 1
    assert "label default means version 3; set it to version 1 first" in error
    assert default_label(client) == {"version": "3"}


class OtherServer(BaseHTTPRequestHandler):
    """A server that has no labels, and answers with a page."""

    def do_GET(self) -> None:
        self.send_error(404)

    def log_message(self, *_: object) -> None:
        pass


def test_server_that_is_not_a_gateway_is_reported() -> None:
    plan = RolloutPlan(NAME, "default", "1", "2", [100], 1.0, RolloutLimits())
    with ThreadingHTTPServer(("127.0.0.1", 0), OtherServer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        target = Target(f"http://127.0.0.1:{server.server_port}")
        with pytest.raises(ClientError, match="HTTP status 404"), target.connect() as client:
            Rollout(client, plan).run()
        server.shutdown()


# The limits.


def counted(count: int, failed: int = 0, *, slow: int = 0) -> ModelTraffic:
    """Return traffic of which all but `slow` requests took at most 10 ms, and those up to a second."""
    buckets = {0.01: float(count - slow), 1.0: float(count), inf: float(count)}
    return ModelTraffic(count, failed, 0.0, buckets)


@pytest.mark.parametrize(
    ("new", "old_p99_s", "words"),
    [
        (counted(100), inf, ""),
        (counted(100, 1), inf, ""),
        (counted(100, 2), inf, "2 of 100 requests failed (2.0%, the limit is 1.0%)"),
        (counted(19, 19), inf, ""),  # too few to judge
        (counted(100, slow=1), inf, ""),
        (counted(100, slow=50), inf, "its p99 is 980 ms, the limit is 500 ms"),
        (counted(100), 0.004, "2 times the 4 ms"),
        (counted(100), 0.006, ""),
    ],
)
def test_exceeded_limit_is_named(new: ModelTraffic, old_p99_s: float, words: str) -> None:
    limits = RolloutLimits(max_p99_s=0.5, max_p99_ratio=2)
    violation = find_violation(VersionTraffic(ModelTraffic(), new, old_p99_s), limits)
    assert words in violation
    assert bool(words) == bool(violation)


def test_counts_of_a_restarted_gateway_begin_again() -> None:
    before, after = VersionTraffic(counted(50), counted(9, 3)), VersionTraffic(counted(60))
    assert after.is_reset_after(before)
    assert not before.is_reset_after(before)
    assert after.new.subtract(before.new) == after.new
    assert counted(9, 4).subtract(counted(5, 3)).failed == 1


def test_quantile_is_interpolated_as_by_prometheus() -> None:
    assert compute_p99_s(ModelTraffic()) == inf
    assert compute_p99_s(counted(100)) == pytest.approx(0.0099)
    assert compute_p99_s(counted(100, slow=99)) == pytest.approx(0.99, rel=0.01)
    beyond = ModelTraffic(100, 0, 0.0, {0.01: 0.0, inf: 100.0})
    assert compute_p99_s(beyond) == 0.01


def test_steps_and_limits_of_the_command_are_parsed() -> None:
    assert parse_steps("5,25,100") == [5, 25, 100]
    for text in ("", "0", "5,5", "50,25", "101", "a", "5,,10", "5.5"):
        with pytest.raises(UsageError, match="rising percentages"):
            parse_steps(text)
    assert parse_limits("0.5%", "2x", 7) == RolloutLimits(0.005, inf, 2, 7)
    assert parse_limits("1%", "250ms", 7) == RolloutLimits(0.01, 0.25, inf, 7)
    assert parse_limits("1%", "1.5s", 7) == RolloutLimits(0.01, 1.5, inf, 7)
    for errors, p99 in (("1", "2x"), ("x%", "2x"), ("1%", "2"), ("1%", "fast")):
        with pytest.raises(UsageError, match="must be"):
            parse_limits(errors, p99, 7)
