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

from gateway.client.errors import translate_hints as translate_for_python
from gateway.commands.errors import translate_hints
from gateway.errors import MalformedRequest
from gateway.routes.error_responses import render_error
from tests.support.source import package_trees


async def test_memory_error_is_answered_with_503(
    caplog: pytest.LogCaptureFixture,
) -> None:
    request = Request({"type": "http", "path": "/", "headers": [], "request_id": "r"})
    with caplog.at_level(logging.INFO):
        response = render_error(request, MemoryError())
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    body = orjson.loads(response.body)
    assert (body["code"], body["request_id"]) == ("OUT_OF_MEMORY", "r")
    levels = [
        record.levelname
        for record in caplog.records
        if record.name == "gateway.routes.error_responses"
    ]
    assert levels == ["WARNING"]


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
        return render_error(
            Request({"type": "http", "path": "/", "headers": [], "request_id": "r"}), error
        )

    body = Body()
    held = weakref.ref(body)
    gc.disable()
    try:
        assert (await answer(body)).status_code == 400
        del body
        assert held() is None
    finally:
        gc.enable()


# What the gateway advises, and the same for Python and for the commands.
ADVICE = [
    ("GET /v1/models lists the models", "models() lists the models",
     "triton-gateway models lists the models"),
    ("load it with POST /v2/repository/models/m/load, or try again", "load it with load(), or try again",
     "load it with triton-gateway load, or try again"),
    ("GET /v1/replicas lists the replicas", "request('GET', '/v1/replicas') lists the replicas",
     "triton-gateway replicas lists the replicas"),
    ("GET /readyz shows the reason", "request('GET', '/readyz') shows the reason",
     "triton-gateway replicas shows the reason"),
    ("set a longer timeout with X-Request-Timeout, in seconds", "pass a longer timeout_s",
     "use a longer --timeout"),
    ("send Authorization: Bearer KEY or X-API-Key: KEY", "pass key=… or set TRITON_GATEWAY_KEY",
     "use --key KEY or TRITON_GATEWAY_KEY"),
    ('send {"parameters": {"unload_dependents": true}}', "pass dependents=True", "use --dependents"),
    ('send a file as {"b64": "BASE64"}', "pass a file as a Path or bytes", "pass a file as a Path or bytes"),
    ("stream them with POST /v1/models/m/infer and Accept: text/event-stream, or over gRPC with ModelStreamInfer",  # noqa: E501 - one sentence
     "stream() yields them", "stream() yields them"),
]  # fmt: skip


@pytest.mark.parametrize(("advice", "for_python", "for_commands"), ADVICE)
def test_advice_of_the_gateway_is_translated(
    advice: str, for_python: str, for_commands: str
) -> None:
    assert translate_for_python(f"no; {advice}") == f"no; {for_python}"
    assert translate_hints(for_python) == for_commands
    texts = {
        node.value
        for module, tree in package_trees().items()
        if not module.startswith(("gateway.commands.", "gateway.client."))
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    assert any(advice in text or (len(text) > 15 and text in f"; {advice}") for text in texts)
