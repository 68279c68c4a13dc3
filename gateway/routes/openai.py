"""Texts to vectors in OpenAI's format, and reranking."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter, Request, Response

from gateway.inference.exchange import open_exchange
from gateway.inference.json_request import receive_json
from gateway.openapi.openai import (
    EMBEDDINGS_OPENAPI,
    EMBEDDINGS_RESPONSES,
    RERANK_OPENAPI,
    RERANK_RESPONSES,
)
from gateway.routes.dependencies import ServicesForInference
from gateway.tensors.text_vectors import (
    build_embedding_payloads,
    build_rerank_payloads,
    check_dimensions,
    encode_embeddings,
    encode_ranking,
    parse_embeddings_request,
    parse_rerank_request,
)

router = APIRouter(tags=["embeddings"])


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
        payloads = build_embedding_payloads(exchange.signature, wanted.texts)
        results = await exchange.run_payloads(payloads)
        return await exchange.build_response(results, partial(encode_embeddings, results, wanted))


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
        results = await exchange.run_payloads(build_rerank_payloads(exchange.signature, wanted))
        return await exchange.build_response(results, partial(encode_ranking, results, wanted))
