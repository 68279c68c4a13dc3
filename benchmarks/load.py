"""A measurement with wrk, and the CPU time and memory of the server's processes."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.requests import Request

SCRIPT = """
local file = io.open(%s, "rb")
wrk.method, wrk.body = "POST", file:read("*a")
file:close()
wrk.headers = {%s}
done = function(summary, latency, requests)
    local errors = summary.errors
    io.write(string.format(
        "RESULT %%d %%d %%f %%f %%d\\n", summary.requests, summary.duration,
        latency:percentile(50), latency:percentile(99),
        errors.status + errors.connect + errors.read + errors.write + errors.timeout))
end
"""


# A connection waits a random time before each request, so that they do not send all at once.
PAUSE = """
delay = function()
    return math.random(0, %d)
end
"""
LONGER = (1, 4, 16)  # times the seconds, on a machine that is busy with something else


@dataclass(frozen=True)
class Measured:
    """Throughput and latency, and the CPU time per request and memory of the server's process tree."""

    requests_per_s: float
    p50_ms: float
    p99_ms: float
    cpu_us: float
    peak_mib: float
    growth_mib: float


def family(process: psutil.Process) -> list[psutil.Process]:
    return [process, *process.children(recursive=True)]


def cpu_s(process: psutil.Process) -> float:
    return sum(sum(member.cpu_times()[:2]) for member in family(process))


def memory_mib(process: psutil.Process) -> float:
    """Return the proportional set size (PSS): a page that several processes share counts once."""
    return sum(pss_kib(member.pid) for member in family(process)) / 1024


def pss_kib(pid: int) -> int:
    try:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except (FileNotFoundError, ProcessLookupError):  # it has exited
        return 0
    return next(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:"))


class Peak:
    """The peak memory of a process tree, sampled ten times per second."""

    def __init__(self, process: psutil.Process) -> None:
        self.mib = 0.0
        self._process = process
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def _watch(self) -> None:
        while not self._ended.wait(0.1):
            self.mib = max(self.mib, memory_mib(self._process))

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()


def measure(
    url: str,
    request: Request,
    server: psutil.Process,
    connections: int,
    seconds: float,
    max_pause_ms: int = 0,
) -> Measured:
    """Measure a server, for longer if no request ends. Raises `RuntimeError` if any request fails."""
    for factor in LONGER:
        measured = measure_once(
            url, request, server, connections, factor * seconds, max_pause_ms=max_pause_ms
        )
        if measured is not None:
            return measured
    raise RuntimeError(f"{url}: no request ended in {LONGER[-1] * seconds:g} s")


def measure_once(
    url: str,
    request: Request,
    server: psutil.Process,
    connections: int,
    seconds: float,
    *,
    max_pause_ms: int,
) -> Measured | None:
    """Measure a server. Return None if no request ended; raises `RuntimeError` if any failed."""
    wrk = shutil.which("wrk") or sys.exit(
        "make bench requires wrk: apt-get install wrk nginx-light"
    )
    with tempfile.TemporaryDirectory() as folder:
        body, script = Path(folder) / "body", Path(folder) / "post.lua"
        body.write_bytes(request.body)
        headers = ", ".join(
            f"[{json.dumps(k)}]={json.dumps(v)}" for k, v in request.headers.items()
        )
        pause = PAUSE % max_pause_ms if max_pause_ms else ""
        script.write_text(SCRIPT % (json.dumps(str(body)), headers) + pause)
        cpu_before_s, idle_mib = cpu_s(server), memory_mib(server)
        command = [wrk, "-t1", f"-c{connections}", f"-d{seconds:g}s", "--timeout", "30s"]
        with Peak(server) as peak:
            run = subprocess.run(
                [*command, "-s", str(script), url], capture_output=True, text=True, check=True
            )
        spent_s = cpu_s(server) - cpu_before_s
    result = re.search(r"RESULT (\d+) (\d+) ([\d.]+) ([\d.]+) (\d+)", run.stdout)
    if result is None or int(result[5]):
        raise RuntimeError(f"{url}: requests failed\n{run.stdout}")
    if not int(result[1]):
        return None
    count, duration_us, p50_us, p99_us = int(result[1]), *map(float, result.groups()[1:4])
    return Measured(
        requests_per_s=count / duration_us * 1e6,
        p50_ms=p50_us / 1e3,
        p99_ms=p99_us / 1e3,
        cpu_us=spent_s / count * 1e6,
        peak_mib=peak.mib,
        growth_mib=peak.mib - idle_mib,
    )
