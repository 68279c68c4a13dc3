"""OpenAI's API: embeddings, completions; and reranking."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any, Final, Generic, TypeVar, cast

from fastapi import APIRouter, Request, Response
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from gateway.callers import Right
from gateway.capabilities.openai.servers import OpenAIServers
from gateway.capabilities.openai.text_vectors import (
    ENCODING_FORMATS,
    MAX_TEXTS,
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
from gateway.http_client.client import UpstreamResponse
from gateway.http_client.connection import Headers, RequestNotSent
from gateway.inference import pipeline
from gateway.inference.body import Deadline, RequestBody
from gateway.inference.decode import convert_payloads
from gateway.inference.pipeline import ATTACHMENT_HEADERS, is_active_content
from gateway.media_types import EVENT_STREAM, JSON
from gateway.routes.dependencies import ServicesForInference
from gateway.routes.error_responses import serialize_openai_error
from gateway.routes.openapi import (
    COUNT_SCHEMA,
    ERROR_DESCRIPTIONS,
    OPENAI_ERROR_REFERENCE,
    REQUEST_HEADER_PARAMETERS,
    STREAM_CONTENT,
    STRING_SCHEMA,
    Schema,
    build_json_body,
    build_list_schema,
    build_object_schema,
    build_responses,
)
from gateway.routes.passthrough.sse import LineSeparatorEscaper
from gateway.services import ModelDescriber, Services
from gateway.telemetry.request_info import RequestInfo, RequestScope, measure_upstream_time
from gateway.telemetry.tracing import TRACE_CONTEXT_HEADERS
from gateway.tensors.codecs import DEFAULT_CODEC, JSON_CODEC
from gateway.tensors.json_body import parse_large_json
from gateway.tensors.signature import Signature

log = logging.getLogger(__name__)

FORWARDED_HEADERS: Final = frozenset((b"accept", *TRACE_CONTEXT_HEADERS))
RELAYED_HEADERS: Final = (b"content-type", b"retry-after")
NAME_SCHEMA: Final[Schema] = {"type": "string", "minLength": 1, "description": "Name of the model."}
POSITIVE_SCHEMA: Final[Schema] = {"type": ["integer", "null"], "minimum": 1}
TEXTS_SCHEMA: Final[Schema] = {
    "type": "array",
    "items": STRING_SCHEMA,
    "minItems": 1,
    "maxItems": MAX_TEXTS,
}
EMBEDDINGS_RESPONSE_SCHEMA: Final = build_object_schema(
    {
        "object": {"const": "list"},
        "data": {
            "type": "array",
            "items": build_object_schema(
                {
                    "object": {"const": "embedding"},
                    "index": COUNT_SCHEMA,
                    "embedding": {
                        "anyOf": [{"type": "array", "items": {"type": "number"}}, STRING_SCHEMA],
                        "description": "The vector, or the base64 of its little-endian FP32 values.",
                    },
                }
            ),
        },
        "model": STRING_SCHEMA,
        "usage": build_object_schema(
            {"prompt_tokens": COUNT_SCHEMA, "total_tokens": COUNT_SCHEMA},
            description="Always 0: Triton does not report tokens.",
        ),
    },
    title="Embeddings",
)
EMBEDDINGS_REQUEST_SCHEMA: Final[Schema] = {
    "title": "EmbeddingsRequest",
    "type": "object",
    "properties": {
        "model": NAME_SCHEMA,
        "input": {"anyOf": [STRING_SCHEMA, TEXTS_SCHEMA], "description": "A text, or texts."},
        "encoding_format": {"enum": [*ENCODING_FORMATS, None]},
        "dimensions": POSITIVE_SCHEMA
        | {"description": "Length of the vectors, if the model's config allows it."},
    },
    "required": ["model", "input"],
}
RERANK_RESPONSE_SCHEMA: Final = build_object_schema(
    {
        "model": STRING_SCHEMA,
        "results": {
            "type": "array",
            "items": build_object_schema(
                {
                    "index": COUNT_SCHEMA,
                    "relevance_score": {"type": "number"},
                    "document": build_object_schema({"text": STRING_SCHEMA}),
                },
                optional=("document",),
            ),
        },
    },
    title="Ranking",
)
RERANK_REQUEST_SCHEMA: Final[Schema] = {
    "title": "RankingRequest",
    "type": "object",
    "properties": {
        "model": NAME_SCHEMA,
        "query": {"type": "string", "minLength": 1},
        "documents": TEXTS_SCHEMA
        | {
            "items": {
                "anyOf": [
                    STRING_SCHEMA,
                    {
                        "type": "object",
                        "properties": {"text": STRING_SCHEMA},
                        "required": ["text"],
                    },
                ]
            }
        },
        "top_n": POSITIVE_SCHEMA | {"description": "Number of results; all by default."},
        "return_documents": {"type": ["boolean", "null"]},
    },
    "required": ["model", "query", "documents"],
}


def build_json_operation(schema: Schema) -> dict[str, Any]:
    return {**build_json_body(schema), "parameters": REQUEST_HEADER_PARAMETERS}


EMBEDDINGS_OPENAPI: Final = build_json_operation(EMBEDDINGS_REQUEST_SCHEMA)
EMBEDDINGS_RESPONSES: Final = build_responses(
    EMBEDDINGS_RESPONSE_SCHEMA,
    "A vector for each text.",
    *ERROR_DESCRIPTIONS,
    error_schema=OPENAI_ERROR_REFERENCE,
)
RERANK_OPENAPI: Final = build_json_operation(RERANK_REQUEST_SCHEMA)
RERANK_RESPONSES: Final = build_responses(
    RERANK_RESPONSE_SCHEMA, "The documents, best first.", *ERROR_DESCRIPTIONS
)
COMPLETION_REQUEST_SCHEMA: Final[Schema] = {
    "title": "CompletionRequest",
    "type": "object",
    "properties": {"model": NAME_SCHEMA},
    "required": ["model"],
    "description": "A request of OpenAI's API. The server reads everything but the model.",
}
COMPLETION_OPENAPI: Final = build_json_operation(COMPLETION_REQUEST_SCHEMA)
COMPLETION_RESPONSES: Final = build_responses(
    {"type": "object"},
    "The server's response.",
    *(*ERROR_DESCRIPTIONS, 501),
    error_schema=OPENAI_ERROR_REFERENCE,
    error_descriptions={501: "GATEWAY_OPENAI_URLS is not set."},
)
COMPLETION_RESPONSES[200]["content"] |= {EVENT_STREAM: STREAM_CONTENT[EVENT_STREAM]}
MODEL_FIELDS: Final[Schema] = {
    "id": STRING_SCHEMA,
    "object": {"const": "model"},
    "created": {"type": "integer"},
    "owned_by": STRING_SCHEMA,
}
LIST_FIELDS: Final[Schema] = {
    "object": {"const": "list"},
    "data": build_list_schema(
        build_object_schema(MODEL_FIELDS), "The same models, in OpenAI's format."
    ),
}
ERROR_SERIALIZERS: Final = dict.fromkeys(
    ("/v1/embeddings", "/v1/completions", "/v1/chat/completions"), serialize_openai_error
)


class OpenAIDescriber(ModelDescriber):
    """Adds the fields that OpenAI's clients read."""

    model_fields = MODEL_FIELDS
    list_fields = LIST_FIELDS

    def describe_list(self, models: Iterable[str]) -> Mapping[str, Any]:
        return {"object": "list", "data": list(map(build_openai_entry, models))}

    def describe_model(self, services: Services, signature: Signature) -> Mapping[str, Any]:
        return build_openai_entry(signature.model)


def build_openai_entry(name: str) -> dict[str, Any]:
    # OpenAI's clients require a time; Triton does not know when a model was made.
    return {"id": name, "object": "model", "created": 0, "owned_by": "triton"}


router = APIRouter(tags=["embeddings"])
T = TypeVar("T")
route_completion = partial(
    router.post, responses=COMPLETION_RESPONSES, openapi_extra=COMPLETION_OPENAPI
)


class NoOpenAIServer(GatewayError):
    status = 501
    code = "NO_OPENAI_SERVER"
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
    received = await receive_json(request, services, parse_embeddings_request)
    wanted = received.document
    opened = await pipeline.open_request(
        request, services, wanted.model, deadline=received.deadline
    )
    check_dimensions(opened.signature, wanted.dimensions)
    limits = services.payload_limits
    payloads = build_embedding_payloads(opened.signature, wanted.texts, limits)
    size_bytes = sum(map(len, wanted.texts))
    with await pipeline.admit(opened) as slot:
        inputs = await convert_payloads(opened, payloads, size_bytes)
        results = await pipeline.run_inferences(opened, slot, payloads[0].options, inputs)
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
    received = await receive_json(request, services, parse_completion_request)
    model = received.document.model
    body = received.document.body
    services.resolver.check_served_name(cast(RequestScope, request.scope), Right.infer, model)
    info: RequestInfo = request.scope["request_info"]
    slot = Slot(services.admission, model, info)
    timeout_s = await slot.acquire(received.deadline.remaining_s)
    try:
        headers = build_completion_headers(request.scope["headers"], len(body))
        path = request.scope["path"].encode()
        info.attempts += 1
        with measure_upstream_time():
            response = await servers.send(path, headers, body, timeout_s)
    except BaseException as exc:
        info.unsent_attempts += isinstance(exc, RequestNotSent)
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
    received = await receive_json(request, services, parse_rerank_request)
    wanted = received.document
    opened = await pipeline.open_request(
        request, services, wanted.model, deadline=received.deadline
    )
    payloads = build_rerank_payloads(opened.signature, wanted, services.payload_limits)
    opened.charge.add(DEFAULT_CODEC.memory_factor * wanted.query_bytes + wanted.returned_bytes)
    size_bytes = wanted.query_bytes + sum(map(len, wanted.documents))
    with await pipeline.admit(opened) as slot:
        inputs = await convert_payloads(opened, payloads, size_bytes)
        results = await pipeline.run_inferences(opened, slot, payloads[0].options, inputs)
        render = partial(encode_ranking, results, wanted)
        return await pipeline.render_results(opened, results, render, wanted.returned_bytes)


@dataclass(frozen=True)
class ReceivedDocument(Generic[T]):
    document: T
    deadline: Deadline


async def receive_json(
    request: Request, services: Services, parse: Callable[[bytes], T]
) -> ReceivedDocument[T]:
    """Read and parse the body.

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
        return ReceivedDocument(parse(data), deadline)
    decoders = services.decode_executor
    if len(data) <= JSON_CODEC.max_thread_bytes:
        work = decoders.run_in_thread(partial(parse, data))
    else:
        work = decoders.run_in_process(parse_large_json, parse, data, limits)
    return ReceivedDocument(await deadline.limit(work), deadline)


def build_completion_headers(headers: Headers, length: int) -> Headers:
    forwarded = [pair for pair in headers if pair[0] in FORWARDED_HEADERS]
    framing = [(b"content-length", b"%d" % length), (b"content-type", JSON.encode())]
    return [*framing, *forwarded]


class RelayedResponse(StreamingResponse):
    """The response of a server, as it arrives. A client disconnect closes the server's connection."""

    def __init__(self, response: UpstreamResponse, timeout_s: float, slot: Slot) -> None:
        headers = {
            name.decode(): value.decode("latin-1")
            for name in RELAYED_HEADERS
            if (value := response.header(name))
        }
        if is_active_content(headers.get("content-type", "")):
            headers |= ATTACHMENT_HEADERS
        self._response = response
        self._slot = slot
        super().__init__(relay_chunks(response, timeout_s), response.status, headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except GatewayError as exc:
            # The response has started: the server closes the connection, so that clients see the error.
            log.warning("the response was aborted: %s", exc.detail)
        finally:
            self._response.close()
            self._slot.release()


async def relay_chunks(response: UpstreamResponse, timeout_s: float) -> AsyncIterator[bytes]:
    """Yield the body; the timeout applies to each chunk."""
    escaper = LineSeparatorEscaper() if response.is_event_stream else None
    while True:
        response.set_timeout(timeout_s)
        with measure_upstream_time():
            chunk = await response.next_chunk()
        if escaper is not None:
            chunk = escaper.feed(chunk, is_last=response.is_complete)
        yield chunk
        if response.is_complete:
            return
        # A task group does not cancel a task whose next piece is there already, in each pass of the loop.
        await asyncio.sleep(0)
