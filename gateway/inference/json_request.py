"""JSON bodies that name their model, and are received before the exchange with it begins."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from starlette.requests import Request

from gateway.inference.body import RequestBody
from gateway.inference.exchange import limit_time
from gateway.services import Services
from gateway.telemetry.request_info import RequestInfo
from gateway.tensors.codecs import JSON_CODEC
from gateway.tensors.json_body import parse_large_json

T = TypeVar("T")


async def receive_json(
    request: Request, services: Services, parse: Callable[[bytes], T]
) -> tuple[T, float]:
    """Return the parsed body, and the request's deadline on the event loop's clock.

    Raises the errors of `parse`, `BodyTooLarge`, `MemoryBudgetExceeded` or `DeadlinePassed`.
    """
    body = RequestBody(request.scope, request.receive)
    timeout_s = services.resolve_timeout_s(body.get_header(b"x-request-timeout"))
    deadline = asyncio.get_running_loop().time() + timeout_s
    info: RequestInfo = request.scope["request_info"]
    limits = services.payload_limits
    read = body.read(limits.max_bytes, services.get_charge(info))
    data = await limit_time(read, deadline, timeout_s)
    if len(data) <= JSON_CODEC.max_inline_bytes:
        return parse(data), deadline
    decoders = services.decode_executor
    if len(data) <= JSON_CODEC.max_thread_bytes:
        work = decoders.run_in_thread(0, partial(parse, data))
    else:
        work = decoders.run_in_process(0, timeout_s, parse_large_json, parse, data, limits)
    return await limit_time(work, deadline, timeout_s), deadline
