"""`triton-gateway serve --workers 2`: several processes, one port, one metrics page."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import psutil
import pytest

from tests.support.fleet import write_echo
from tests.support.servers import Command, Triton, free_ports, workers
from tests.support.up import has_ended
from tests.support.wait import TIMEOUT_S, wait_until


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Command, str]]:
    """A gateway with two workers before a Triton with a model that is not loaded."""
    (port,) = free_ports(1)
    arguments = ("serve", "--port", str(port), "--workers", "2")
    models = tmp_path_factory.mktemp("models")
    write_echo(models, "echo")
    with Triton(models) as triton:
        triton.wait()
        environment = {"GATEWAY_TRITON_URLS": triton.options.url}
        with Command(*arguments, environment=environment) as command:
            command.wait_for("serving")
            yield command, f"http://127.0.0.1:{port}"


def get(url: str) -> httpx.Response:
    return httpx.get(url, timeout=TIMEOUT_S)


def count_requests(url: str) -> float:
    """Return the counted requests of /v2/health/live."""
    samples = [
        line
        for line in get(f"{url}/metrics").text.splitlines()
        if line.startswith("gateway_request_duration_seconds_count")
    ]
    return sum(float(line.split()[-1]) for line in samples if 'route="/v2/health/live"' in line)


def test_metrics_are_the_sum_of_all_workers(pair: tuple[Command, str]) -> None:
    _, url = pair
    before = count_requests(url)
    for _ in range(60):  # a connection each, so that both workers get some
        assert get(f"{url}/v2/health/live").status_code == 200
    wait_until(lambda: count_requests(url) >= before + 60)  # the other worker's are a second behind
    assert count_requests(url) == before + 60
    page = get(f"{url}/metrics").text
    kinds = [line for line in page.splitlines() if line.startswith("# TYPE")]
    assert len(kinds) == len(set(kinds))


def test_load_through_one_worker_is_known_to_the_others(pair: tuple[Command, str]) -> None:
    """Although GATEWAY_STATE is memory: here, and nothing is stored on a disk."""
    _, url = pair

    def read_states() -> list[tuple[str, bool]]:
        """Use a connection for each request, so that both workers get some."""
        answers = [get(f"{url}/v1/models").json()["models"][0] for _ in range(20)]
        return [(model.get("wished", ""), "behind" in model) for model in answers]

    def change(verb: str) -> int:
        url_of_call = f"{url}/v2/repository/models/echo/{verb}"
        return httpx.post(url_of_call, timeout=TIMEOUT_S).status_code

    assert change("load") == 200
    wait_until(lambda: read_states() == [("loaded", False)] * 20)
    assert change("unload") == 200
    wait_until(lambda: read_states() == [("unloaded", False)] * 20)


@pytest.mark.fault("a worker process is killed")
def test_killed_worker_is_replaced_while_the_other_serves(pair: tuple[Command, str]) -> None:
    command, url = pair
    wait_until(lambda: len(workers(command)) == 2)
    killed = workers(command)[0]
    killed.kill()

    def replaced() -> bool:
        assert get(f"{url}/livez").status_code == 200
        living = [worker for worker in workers(command) if not ended(worker)]
        return killed not in living and len(living) == 2

    wait_until(replaced)
    assert get(f"{url}/v2/health/live").status_code == 200
    line = command.wait_for("exited unexpectedly")
    assert f"worker {killed.pid} " in line
    assert "(signal 9)" in line
    wait_until(lambda: "gateway_workers_replaced_total 1.0" in get(f"{url}/metrics").text)


@pytest.mark.long
def test_gateway_reports_serving_only_when_a_worker_serves() -> None:
    """The workers are stopped as they start."""
    (port,) = free_ports(1)
    arguments = ("serve", "--port", str(port), "--workers", "2")
    with Command(*arguments, environment={"GATEWAY_TRITON_URLS": "127.0.0.1:9"}) as command:
        wait_until(lambda: len(workers(command)) == 2)
        for worker in workers(command):
            worker.suspend()
        assert "serving" not in command.output
        for worker in workers(command):
            worker.resume()
        command.wait_for("serving")
        assert get(f"http://127.0.0.1:{port}/livez").status_code == 200


@pytest.mark.long
def test_signal_to_every_process_stops_all_workers_cleanly() -> None:
    """A service manager sends SIGTERM to each, and Ctrl-C reaches the group of the terminal."""
    for number, status in ((signal.SIGTERM, 0), (signal.SIGINT, 0)):
        with serving_pair() as (command, _):
            started = processes(command)
            for process in started:
                process.send_signal(number)
            assert command.end() == status
            wait_until(lambda started=started: all(map(ended, started)))  # type: ignore[misc]
        assert "exited unexpectedly" not in command.output
        assert "Traceback" not in command.output


@pytest.mark.fault("the supervisor of the workers is killed")
def test_workers_stop_if_their_supervisor_is_killed() -> None:
    # A guard would kill the workers as well, and sometimes before they could end by themselves.
    with serving_pair(guarded=False) as (command, _):
        started = processes(command)
        os.kill(command.pid, signal.SIGKILL)
        command.wait_for("the supervisor of this worker exited unexpectedly")
        wait_until(lambda: all(map(ended, started)))


@contextmanager
def serving_pair(*, guarded: bool = True) -> Iterator[tuple[Command, str]]:
    """Two workers without a Triton."""
    (port,) = free_ports(1)
    environment = {"GATEWAY_TRITON_URLS": "127.0.0.1:9"}
    arguments = ("serve", "--port", str(port), "--workers", "2")
    with Command(*arguments, environment=environment, guarded=guarded) as command:
        command.wait_for("serving")
        wait_until(lambda: len(workers(command)) == 2)
        yield command, f"http://127.0.0.1:{port}"


def processes(command: Command) -> list[psutil.Process]:
    """Return the command and all its descendants."""
    process = psutil.Process(command.pid)
    return [process, *process.children(recursive=True)]


def ended(worker: psutil.Process) -> bool:
    try:
        return has_ended(worker)
    except psutil.NoSuchProcess:
        return True
