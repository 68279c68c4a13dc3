"""The gateway's metrics page."""

from __future__ import annotations

import httpx


def metric(client: httpx.Client, series: str) -> float:
    """The value of a series of the gateway, by its name and labels; 0 without it."""
    lines = client.get("/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{series} "))
