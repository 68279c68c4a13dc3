"""OpenAI's API: embeddings, completions; and reranking."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any, Final, Generic, TypeVar, cast

from fastapi import APIRouter, Request, Response

from gateway.callers import Right
from gateway.capabilities.openai.schemas import (
    COMPLETION_REQUEST,
    COMPLETION_RESPONSES,
    EMBEDDINGS_REQUEST,
    EMBEDDINGS_RESPONSES,
    LIST_FIELDS,
    MODEL_FIELDS,
    RERANK_REQUEST,
    RERANK_RESPONSES,
)
from gateway.capabilities.openai.servers import OpenAIServers, RelayedResponse
from gateway.capabilities.openai.text_vectors import (
    TextRequest,
    build_embedding_payloads,
    build_rerank_payloads,
    encode_embeddings,
    encode_ranking,
    parse_completion_request,
    parse_embeddings_request,
    parse_rerank_request,
)
from gateway.capacity.admission import Slot
from gateway.errors import GatewayError
from gateway.http_client.connection import RequestNotSent
from gateway.inference import pipeline
from gateway.inference.body import Deadline, RequestBody
from gateway.inference.decode import convert_payloads
from gateway.routes.dependencies import ServicesForInference
from gateway.routes.error_responses import serialize_openai_error
from gateway.services import ModelDescriber, Services
from gateway.telemetry.request_info import RequestInfo, RequestScope, measure_upstream_time
from gateway.tensors.codecs import DEFAULT_CODEC, JSON_CODEC, parse_body_type, to_utf8_json
from gateway.tensors.json_body import parse_large_json
from gateway.tensors.outputs import EncodedBody, InferResult
from gateway.tensors.payload import Payload, PayloadLimits
from gateway.tensors.signature import Signature

T = TypeVar("T")
ERROR_SERIALIZERS: Final = dict.fromkeys(
    ("/v1/embeddings", "/v1/completions", "/v1/chat/completions"), serialize_openai_error
)
router = APIRouter(tags=["embeddings"])


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


# Embeddings and rankings.


@router.post(
    "/v1/embeddings",
    operation_id="create_embeddings",
    responses=EMBEDDINGS_RESPONSES,
    openapi_extra=EMBEDDINGS_REQUEST,
)
async def create_embeddings(request: Request, services: ServicesForInference) -> Response:
    """Return a vector for each text, from any model with a text input and a floating-point output."""
    received = await receive_json(request, services, parse_embeddings_request)
    return await run_texts(request, services, received, build_embedding_payloads, encode_embeddings)


@router.post(
    "/v1/rerank",
    operation_id="rerank",
    responses=RERANK_RESPONSES,
    openapi_extra=RERANK_REQUEST,
)
async def rerank(request: Request, services: ServicesForInference) -> Response:
    """Return the documents with their scores, best first, from any model with two text inputs."""
    received = await receive_json(request, services, parse_rerank_request)
    return await run_texts(request, services, received, build_rerank_payloads, encode_ranking)


async def run_texts(
    request: Request,
    services: Services,
    received: ReceivedDocument[TextRequest],
    build_payloads: Callable[[Signature, TextRequest, PayloadLimits], list[Payload]],
    encode: Callable[[list[InferResult], TextRequest], EncodedBody],
) -> Response:
    wanted = received.document
    opened = await pipeline.open_request(
        request, services, wanted.model, deadline=received.deadline
    )
    payloads = build_payloads(opened.signature, wanted, services.payload_limits)
    opened.charge.add(DEFAULT_CODEC.memory_factor * wanted.query_bytes)
    size_bytes = wanted.query_bytes + sum(map(len, wanted.texts))
    with await pipeline.admit(opened) as slot:
        inputs = await convert_payloads(opened, payloads, size_bytes)
        results = await pipeline.run_inferences(opened, slot, payloads[0].options, inputs)
        return await pipeline.render_results(opened, results, partial(encode, results, wanted))


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
    limits = services.payload_limits
    charge = services.get_charge(request.scope["request_info"])
    data = await deadline.limit(body.read(limits.max_bytes, charge))
    parse = partial(parse_document, parse, body.content_type)
    if len(data) <= JSON_CODEC.max_inline_bytes:
        return ReceivedDocument(parse(data), deadline)
    decoders = services.decode_executor
    if len(data) <= JSON_CODEC.max_thread_bytes:
        work = decoders.run_in_thread(partial(parse, data))
    else:
        work = decoders.run_in_process(parse_large_json, parse, data, limits)
    return ReceivedDocument(await deadline.limit(work), deadline)


def parse_document(parse: Callable[[bytes], T], content_type: str, data: bytes) -> T:
    """Parse a body in the charset of its type, which a process can do."""
    return parse(to_utf8_json(data, parse_body_type(content_type).parameters))


# Completions.


class NoOpenAIServer(GatewayError):
    status = 501
    code = "NO_OPENAI_SERVER"
    message = (
        "this gateway knows no server for completions; set GATEWAY_OPENAI_URLS to the addresses of vLLM or "
        "Triton's OpenAI frontend"
    )


route_completion = partial(
    router.post, responses=COMPLETION_RESPONSES, openapi_extra=COMPLETION_REQUEST
)


@route_completion("/v1/chat/completions", operation_id="create_chat_completion")
@route_completion("/v1/completions", operation_id="create_completion")
async def create_completion(request: Request, services: ServicesForInference) -> Response:
    """Forward the request to a server of `GATEWAY_OPENAI_URLS`, and relay its response or stream."""
    servers = services.find(OpenAIServers)
    if servers is None:
        raise NoOpenAIServer
    received = await receive_json(request, services, parse_completion_request)
    model = received.document.model
    scope = cast(RequestScope, request.scope)
    services.resolver.check_served_name(scope, Right.infer, model)
    info: RequestInfo = scope["request_info"]
    with Slot(services.admission, model, info) as slot:
        await slot.acquire(received.deadline.remaining_s)
        info.attempts += 1
        try:
            with measure_upstream_time():
                response = await servers.send(scope, received.document.body, received.deadline)
        except RequestNotSent:
            info.unsent_attempts += 1
            raise
        if (
            response.status == HTTPStatus.OK
        ):  # the name is a model's, and may be the value of a label
            info.model = servers.get_model_label(model)
        return RelayedResponse(response, received.deadline.timeout_s, slot.transfer())
