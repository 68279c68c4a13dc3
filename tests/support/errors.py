"""Assertions on the error format."""

from __future__ import annotations

import httpx

# Words that show something of the inside, such as a file of a model or an exception of Python.
INTERNALS = ("/1/", ".py", "Traceback", "At:", "0x", "shm")


def assert_error(response: httpx.Response, status: int, code: str, words: str = "") -> None:
    """The shape of every error, and that it tells nothing of the inside."""
    assert response.status_code == status, response.text
    body = response.json()
    assert body.keys() == {"error", "code", "request_id"}
    assert body["code"] == code
    assert words in body["error"]
    assert body["request_id"] == response.headers["x-request-id"]
    for leaked in INTERNALS:
        assert leaked not in body["error"]
