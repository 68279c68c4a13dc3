"""Standard error is a pipe that is not read: requests are answered, lines are dropped and counted."""

from __future__ import annotations

import json
import os
import re
import signal
from contextlib import closing, suppress
from http.client import HTTPConnection
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import httpx
import pytest

from tests.support.servers import Command, free_ports
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from typing_extensions import Self

# A path of this length makes a line of the log that long: some hundreds fill pipe and queue.
LONG = "/nothing/" + "x" * 8_000
REQUESTS = 1_000
DROPPED = "log lines were dropped because they were not read in time"


class Unread(Command):
    """`triton-gateway serve`, whose output is a pipe that is read when the test says so."""

    def __init__(self, *arguments: str, log_format: str = "console") -> None:
        (port,) = free_ports(1)
        environment = {
            "GATEWAY_TRITON_URLS": "http://127.0.0.1:1",
            "GATEWAY_LOG_FORMAT": log_format,
        }
        command = ("serve", "--port", str(port), *arguments)
        super().__init__(*command, environment=environment, unread=True)
        self.url = f"http://127.0.0.1:{port}"
        self.client = httpx.Client(base_url=self.url, timeout=30)

    def answers(self) -> bool:
        with suppress(httpx.HTTPError):
            return self.client.get("/livez").status_code == 200
        return False

    def ask(self, times: int) -> set[int]:
        """The statuses of that many requests on a new connection, by a client that costs little."""
        statuses = set()
        with closing(HTTPConnection(urlsplit(self.url).netloc, timeout=30)) as connection:
            for _ in range(times):
                connection.request("GET", LONG)
                with connection.getresponse() as response:
                    response.read()
                statuses.add(response.status)
        return statuses

    def dropped(self) -> int:
        page = self.client.get("/metrics").text
        (found,) = re.findall(r"^gateway_log_lines_dropped_total (\d+)", page, re.MULTILINE)
        return int(found)

    def logged(self) -> int:
        return sum("/nothing/" in line for line in self.lines)

    def count_dropped_in_log(self, *, as_json: bool) -> list[int]:
        """Return the number of dropped lines in each line of the log that reports some."""
        found = [line for line in self.lines if DROPPED in line]
        if as_json:
            found = [json.loads(line)["message"] for line in found]
        return [int(re.findall(rf"(\d+) {DROPPED}", line)[0]) for line in found]

    def __enter__(self) -> Self:
        wait_until(self.answers)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.client.close()
        super().__exit__(kind)


@pytest.mark.fault("standard error is a pipe that nobody reads")
@pytest.mark.parametrize("log_format", ["console", pytest.param("json", marks=pytest.mark.long)])
def test_requests_are_answered_and_dropped_lines_are_counted_in_the_log(log_format: str) -> None:
    with Unread(log_format=log_format) as server:
        assert server.ask(REQUESTS) == {404}  # it stopped for good when the pipe was full
        wait_until(server.dropped)
        server.read()
        wait_until(lambda: any(DROPPED in line for line in server.lines))
        assert server.ask(1) == {404}
        # Lines of /metrics and /livez may be missing as well; those are few.
        wait_until(lambda: 0 <= server.logged() + server.dropped() - (REQUESTS + 1) <= 20)
        # The line is dropped a moment before it is counted.
        wait_until(
            lambda: (
                sum(server.count_dropped_in_log(as_json=log_format == "json")) == server.dropped()
            )
        )


@pytest.mark.long
@pytest.mark.fault("standard error is a pipe that nobody reads")
def test_gateway_ends_at_sigterm_while_its_log_is_not_read() -> None:
    with Unread() as server:
        server.ask(REQUESTS)
        os.kill(server.pid, signal.SIGTERM)
        assert server.process.wait(60) == 0


@pytest.mark.long
@pytest.mark.fault("standard error is a pipe that nobody reads")
def test_workers_serve_and_end_while_their_log_is_not_read() -> None:
    with Unread("--workers", "2") as server:
        for _ in range(8):  # connections, each to one of the two workers
            assert server.ask(REQUESTS // 2) == {404}
        wait_until(server.dropped)
        os.kill(server.pid, signal.SIGTERM)
        assert server.process.wait(60) == 0


def test_last_log_lines_are_written_before_the_end() -> None:
    with Unread() as server:
        server.read()
        for number in range(50):
            assert server.client.get(f"/last/{number}").status_code == 404
        os.kill(server.pid, signal.SIGTERM)
        assert server.process.wait(60) == 0
        wait_until(lambda: sum("GET /last/" in line for line in server.lines) == 50)


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_last_log_lines_of_workers_are_written_before_the_end(number: signal.Signals) -> None:
    with Unread("--workers", "2") as server:
        server.read()
        for at in range(50):
            assert httpx.get(f"{server.url}/last/{at}", timeout=30).status_code == 404
        os.kill(server.pid, number)
        server.process.wait(60)
        wait_until(lambda: sum("GET /last/" in line for line in server.lines) == 50)
