"""What an exception becomes that is nobody's sentence."""

from __future__ import annotations

import asyncio
import logging

import orjson
import pytest
from starlette.requests import Request

from gateway.app import HANDLED
from gateway.errors import render


def test_too_little_memory_is_503_and_no_fault_of_the_gateways(
    caplog: pytest.LogCaptureFixture,
) -> None:
    request = Request({"type": "http", "request_id": "r"})
    with caplog.at_level(logging.INFO):
        response = asyncio.run(render(request, MemoryError()))
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    body = orjson.loads(response.body)
    assert (body["code"], body["request_id"]) == ("OUT_OF_MEMORY", "r")
    levels = [record.levelname for record in caplog.records if record.name == "gateway.errors"]
    assert levels == ["WARNING"]
    assert MemoryError in HANDLED  # else the server logs it as a fault of the application
