"""What the tests of jobs share."""

from __future__ import annotations

from typing import Any

import httpx

from tests.support.wait import wait_until

ASYNC = {"Prefer": "respond-async"}
JOBS_SECRET = "secret of the gateways of a test"
VECTOR = "/v1/models/vector_FP32/infer"
CANCELLABLE = "/v1/models/cancellable/infer"


def submit(client: httpx.Client, path: str = VECTOR, **options: Any) -> httpx.Response:
    options.setdefault("json", {"inputs": [[1.5, 2.5]]})
    headers = {**ASYNC, **options.pop("headers", {})}
    return client.post(path, headers=headers, **options)


def wait_for(client: httpx.Client, job: str) -> dict[str, Any]:
    """Return the document of a job when it has ended."""
    document: dict[str, Any] = {}

    def has_ended() -> bool:
        document.update(client.get(f"/v1/jobs/{job}", params={"wait": 20}).json())
        return document["state"] not in ("queued", "running")

    wait_until(has_ended)
    return document


def wait_for_state(client: httpx.Client, job: str, state: str) -> None:
    wait_until(lambda: client.get(f"/v1/jobs/{job}").json()["state"] == state)
