"""The gateway's metrics page."""

from __future__ import annotations

import re

import httpx


def metric(client: httpx.Client, series: str) -> float:
    """The value of a series of the gateway, by its name and labels; 0 without it."""
    lines = client.get("/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{series} "))


def held_memory(client: httpx.Client) -> dict[str, float]:
    """The bytes of the memory budget that are in use, by kind."""
    page = client.get("/metrics").text
    pairs = re.findall(r'^gateway_request_memory_bytes\{kind="(\w+)"\} (\S+)', page, re.M)
    return {kind: float(value) for kind, value in pairs}
