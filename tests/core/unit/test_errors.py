"""Responses to unexpected exceptions."""

from __future__ import annotations

import ast
import gc
import logging
import weakref

import orjson
import pytest
from starlette.requests import Request
from starlette.responses import Response

from gateway.app import HANDLED_EXCEPTIONS
from gateway.commands.errors import COMMAND_HINTS
from gateway.errors import MalformedRequest
from gateway.routes.error_responses import render_error
from tests.support.source import package_trees


async def test_memory_error_is_answered_with_503(
    caplog: pytest.LogCaptureFixture,
) -> None:
    request = Request({"type": "http", "path": "/", "request_id": "r"})
    with caplog.at_level(logging.INFO):
        response = await render_error(request, MemoryError())
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    body = orjson.loads(response.body)
    assert (body["code"], body["request_id"]) == ("OUT_OF_MEMORY", "r")
    levels = [
        record.levelname
        for record in caplog.records
        if record.name == "gateway.routes.error_responses"
    ]
    assert levels == ["WARNING"]
    assert (
        MemoryError in HANDLED_EXCEPTIONS
    )  # else the server logs it as a fault of the application


async def test_answered_error_does_not_keep_the_request() -> None:
    """Its traceback would hold the frames, and with them the body, until the garbage collector comes."""

    class Body:
        pass

    async def fail(body: Body) -> None:
        try:
            raise ValueError("what was found")
        except ValueError:
            raise MalformedRequest("what is said") from None

    async def answer(body: Body) -> Response:
        try:
            await fail(body)
        except MalformedRequest as exc:
            error: Exception = exc  # stays in this frame, as in those of the framework
        return await render_error(Request({"type": "http", "path": "/", "request_id": "r"}), error)

    body = Body()
    held = weakref.ref(body)
    gc.disable()
    try:
        assert (await answer(body)).status_code == 400
        del body
        assert held() is None
    finally:
        gc.enable()


def test_advice_that_commands_translate_is_given_by_the_gateway() -> None:
    texts = [
        node.value
        for module, tree in package_trees().items()
        if not module.startswith("gateway.commands.")
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    for hint in COMMAND_HINTS:
        assert any(hint in text for text in texts), hint
