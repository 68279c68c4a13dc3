"""OpenAI's API: embeddings, completions; and reranking."""

from __future__ import annotations

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
from gateway.inference import pipeline
from gateway.inference.body import Deadline, RequestBody
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
    opened = await pipeline.open_request(request, services, wanted.model, deadline=deadline)
    check_dimensions(opened.signature, wanted.dimensions)
    limits = services.payload_limits
    payloads = build_embedding_payloads(opened.signature, wanted.texts, limits)
    with await pipeline.admit(opened) as slot:
        inputs = await opened.converter.convert_all(payloads)
        results = await pipeline.run_inferences(opened, slot, payloads[0], inputs)
        render = partial(encode_embeddings, results, wanted)
        return await pipeline.render_results(opened, results, render)


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
    slot = Slot(services.admission, model, info.caller_name)
    timeout_s = await slot.acquire(deadline.remaining_s)
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
    opened = await pipeline.open_request(request, services, wanted.model, deadline=deadline)
    payloads = build_rerank_payloads(opened.signature, wanted, services.payload_limits)
    opened.charge.add(DEFAULT_CODEC.memory_factor * wanted.query_bytes + wanted.returned_bytes)
    with await pipeline.admit(opened) as slot:
        inputs = await opened.converter.convert_all(payloads)
        results = await pipeline.run_inferences(opened, slot, payloads[0], inputs)
        render = partial(encode_ranking, results, wanted)
        return await pipeline.render_results(opened, results, render, wanted.returned_bytes)


async def receive_json(
    request: Request, services: Services, parse: Callable[[bytes], T]
) -> tuple[T, Deadline]:
    """Return the parsed body, and the request's deadline.

    Raises the errors of `parse`, `BodyTooLarge`, `MemoryBudgetExceeded` or `DeadlinePassed`.
    """
    body = RequestBody(request.scope, request.receive)
    timeout_s = services.resolve_timeout_s(body.get_header(b"x-request-timeout"))
    deadline = Deadline.after(timeout_s)
    info: RequestInfo = request.scope["request_info"]
    limits = services.payload_limits
    read = body.read(limits.max_bytes, services.get_charge(info))
    data = await deadline.limit(read)
    if len(data) <= JSON_CODEC.max_inline_bytes:
        return parse(data), deadline
    decoders = services.decode_executor
    if len(data) <= JSON_CODEC.max_thread_bytes:
        work = decoders.run_in_thread(0, partial(parse, data))
    else:
        work = decoders.run_in_process(0, timeout_s, parse_large_json, parse, data, limits)
    return await deadline.limit(work), deadline
