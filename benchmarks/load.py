"""One measurement: wrk against a URL, and what it cost the server's processes."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import psutil

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


@dataclass(frozen=True)
class Request:
    """What is posted."""

    body: bytes
    headers: dict[str, str]


@dataclass(frozen=True)
class Measured:
    """`cpu_us` is the processor time of the server's process tree per request."""

    requests_per_s: float
    p50_ms: float
    p99_ms: float
    cpu_us: float
    memory_mib: float


def family(process: psutil.Process) -> list[psutil.Process]:
    return [process, *process.children(recursive=True)]


def cpu_s(process: psutil.Process) -> float:
    return sum(sum(member.cpu_times()[:2]) for member in family(process))


def measure(
    url: str, request: Request, server: psutil.Process, connections: int, seconds: float
) -> Measured:
    """Raises when a single request failed: a fast error is no throughput."""
    wrk = shutil.which("wrk") or sys.exit("make bench needs wrk: apt-get install wrk nginx-light")
    with tempfile.TemporaryDirectory() as folder:
        body, script = Path(folder) / "body", Path(folder) / "post.lua"
        body.write_bytes(request.body)
        headers = ", ".join(
            f"[{json.dumps(k)}]={json.dumps(v)}" for k, v in request.headers.items()
        )
        script.write_text(SCRIPT % (json.dumps(str(body)), headers))
        before = cpu_s(server)
        run = subprocess.run(
            [wrk, "-t1", f"-c{connections}", f"-d{seconds:g}s", "-s", str(script), url],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        spent = cpu_s(server) - before
    found = re.search(r"RESULT (\d+) (\d+) ([\d.]+) ([\d.]+) (\d+)", run.stdout)
    if found is None or int(found[5]):
        raise RuntimeError(f"{url}: requests failed\n{run.stdout}")
    count, duration_us, p50_us, p99_us = int(found[1]), *map(float, found.groups()[1:4])
    memory = sum(member.memory_info().rss for member in family(server)) / 2**20
    return Measured(
        count / duration_us * 1e6, p50_us / 1e3, p99_us / 1e3, spent / count * 1e6, memory
    )
