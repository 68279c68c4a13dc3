"""OpenAI's API: embeddings, completions; and reranking."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from typing import TypeVar

from fastapi import APIRouter, Request, Response

from gateway.callers import Right
from gateway.capabilities.openai.completions import RelayedResponse, build_completion_headers
from gateway.capabilities.openai.description import (
    COMPLETION_OPENAPI,
    COMPLETION_RESPONSES,
    EMBEDDINGS_OPENAPI,
    EMBEDDINGS_RESPONSES,
    RERANK_OPENAPI,
    RERANK_RESPONSES,
)
from gateway.capabilities.openai.servers import OpenAIServers
from gateway.capabilities.openai.text_vectors import (
    build_embedding_payloads,
    build_rerank_payloads,
    check_dimensions,
    encode_embeddings,
    encode_ranking,
    parse_completion_request,
    parse_embeddings_request,
    parse_rerank_request,
)
from gateway.capacity.admission import Slot
from gateway.errors import GatewayError
from gateway.inference.body import RequestBody
from gateway.inference.exchange import limit_time, open_exchange
from gateway.routes.dependencies import ServicesForInference
from gateway.services import Services
from gateway.telemetry.request_info import RequestInfo
from gateway.tensors.codecs import DEFAULT_CODEC, JSON_CODEC
from gateway.tensors.json_body import parse_large_json

router = APIRouter(tags=["embeddings"])
T = TypeVar("T")
route_completion = partial(
    router.post, responses=COMPLETION_RESPONSES, openapi_extra=COMPLETION_OPENAPI
)


class NoOpenAIServer(GatewayError):
    status, code = 501, "NO_OPENAI_SERVER"
    message = (
        "this gateway knows no server for completions; set GATEWAY_OPENAI_URLS to the addresses of vLLM or "
        "Triton's OpenAI frontend"
    )


@router.post(
    "/v1/embeddings",
    operation_id="create_embeddings",
    summary="Embeddings of texts, in OpenAI's format",
    responses=EMBEDDINGS_RESPONSES,
    openapi_extra=EMBEDDINGS_OPENAPI,
)
async def create_embeddings(request: Request, services: ServicesForInference) -> Response:
    """Return a vector for each text, from any model with a text input and a floating-point output."""
    wanted, deadline = await receive_json(request, services, parse_embeddings_request)
    with await open_exchange(request, services, wanted.model, deadline=deadline) as exchange:
        check_dimensions(exchange.signature, wanted.dimensions)
        limits = services.payload_limits
        payloads = build_embedding_payloads(exchange.signature, wanted.texts, limits)
        results = await exchange.run_payloads(payloads)
        return await exchange.build_response(results, partial(encode_embeddings, results, wanted))


@route_completion(
    "/v1/chat/completions",
    operation_id="create_chat_completion",
    summary="Chat completion by an OpenAI server",
)
@route_completion(
    "/v1/completions", operation_id="create_completion", summary="Completion by an OpenAI server"
)
async def create_completion(request: Request, services: ServicesForInference) -> Response:
    """Forward the request to a server of `GATEWAY_OPENAI_URLS`, and relay its response or stream."""
    servers = services.find(OpenAIServers)
    if servers is None:
        raise NoOpenAIServer
    (model, body), deadline = await receive_json(request, services, parse_completion_request)
    services.resolver.check_served_name(request.scope, Right.infer, model)
    info: RequestInfo = request.scope["request_info"]
    timeout_s = deadline - asyncio.get_running_loop().time()
    slot = Slot(services.admission, model, info.caller_name)
    timeout_s = await slot.acquire(timeout_s)
    try:
        headers = build_completion_headers(request.scope["headers"], len(body))
        path = request.scope["path"].encode()
        response = await servers.send(path, headers, body, timeout_s)
    except BaseException:
        slot.release()
        raise
    if response.status == HTTPStatus.OK:  # so that the name is a model's, and may be a label value
        info.model = servers.get_model_label(model)
    return RelayedResponse(response, timeout_s, slot)


@router.post(
    "/v1/rerank",
    operation_id="rerank",
    summary="Rank documents by their relevance to a query",
    responses=RERANK_RESPONSES,
    openapi_extra=RERANK_OPENAPI,
)
async def rerank(request: Request, services: ServicesForInference) -> Response:
    """Return the documents with their scores, best first, from any model with two text inputs."""
    wanted, deadline = await receive_json(request, services, parse_rerank_request)
    with await open_exchange(request, services, wanted.model, deadline=deadline) as exchange:
        limits = services.payload_limits
        payloads = build_rerank_payloads(exchange.signature, wanted, limits)
        held_bytes = DEFAULT_CODEC.memory_factor * wanted.query_bytes + wanted.returned_bytes
        exchange.charge.add(held_bytes)
        results = await exchange.run_payloads(payloads)
        render = partial(encode_ranking, results, wanted)
        return await exchange.build_response(results, render, wanted.returned_bytes)


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
