"""Codecs for texts to vectors (OpenAI's embeddings API) and to scores (reranking), and of completions. Pure.

Which tensors are the texts and the results follows from the model's signature; parameters of its config
decide where there are several: `gateway.embedding.<output>`, `gateway.score.<output>`,
`gateway.query.<input>`.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import orjson

from gateway.errors import InputMismatch, MalformedRequest, ModelFault, TooLarge
from gateway.media_types import JSON, TEXT
from gateway.messages import MAX_MODEL_NAME_CHARS, join_names, quote_text
from gateway.tensors.dtypes import DatatypeKind
from gateway.tensors.inputs import check_row_count
from gateway.tensors.json_body import parse_json_body
from gateway.tensors.outputs import EncodedBody, InferResult
from gateway.tensors.payload import Part, Payload, PayloadLimits, PayloadOptions
from gateway.tensors.signature import Signature, TensorSpec

MAX_TEXTS: Final = 2048
MODEL_KEY: Final = "model"
ENCODING_FORMATS: Final = ("float", "base64")
EMBEDDING_HINT: Final = "embedding"
SCORE_HINT: Final = "score"
QUERY_HINT: Final = "query"
DIMENSIONS_PARAMETER: Final = "gateway.embedding_dimensions"
# Triton does not report tokens.
NO_USAGE: Final = {"prompt_tokens": 0, "total_tokens": 0}


@dataclass(frozen=True, kw_only=True)
class TextRequest:
    """A request with texts, of which a model makes a vector or, with a query, a score each."""

    model: str
    texts: list[str]
    encoding_format: str = ENCODING_FORMATS[0]
    dimensions: int | None = None
    query: str = ""
    query_bytes: int = 0  # of the queries, of which one is sent with each text
    top_n: int | None = None  # the number of results; None for all


@dataclass(frozen=True)
class CompletionRequest:
    model: str
    body: bytes


# Requests.


def parse_embeddings_request(body: bytes) -> TextRequest:
    """Ignore unknown keys, as clients send their own. Raises `MalformedRequest` or `TooLarge`."""
    document = parse_object(body)
    encoding_format = document.get("encoding_format") or ENCODING_FORMATS[0]
    if encoding_format not in ENCODING_FORMATS:
        raise MalformedRequest(f'"encoding_format" must be {join_names(ENCODING_FORMATS)}')
    value = document.get("input")
    texts = [value] if isinstance(value, str) else value
    if isinstance(texts, list) and any(type(item) in (int, list) for item in texts):
        raise MalformedRequest(
            '"input" has tokens, which the model\'s own tokenizer makes of texts; send texts '
            "(langchain-openai: check_embedding_ctx_length=False)"
        )
    return TextRequest(
        model=parse_model_name(document),
        texts=check_texts(texts, "input"),
        encoding_format=encoding_format,
        dimensions=parse_count(document, "dimensions"),
    )


def parse_rerank_request(body: bytes) -> TextRequest:
    """Accept documents as strings or objects with `text`. Raises `MalformedRequest` or `TooLarge`."""
    document = parse_object(body)
    items = document.get("documents")
    if isinstance(items, list):
        items = [item.get("text") if isinstance(item, dict) else item for item in items]
    texts = check_texts(items, "documents")
    query = parse_string(document, "query")
    return TextRequest(
        model=parse_model_name(document),
        texts=texts,
        query=query,
        query_bytes=len(query.encode(errors="surrogatepass")) * len(texts),
        top_n=parse_count(document, "top_n"),
    )


def parse_completion_request(body: bytes) -> CompletionRequest:
    """Return a request whose body names no other model. Raises `MalformedRequest`.

    The body is encoded again, because a server may use another one of several keys `model`, for which the
    caller has no right. Some servers ignore the case of keys.
    """
    document = parse_object(body)
    for key in document:
        if key != MODEL_KEY and key.lower() == MODEL_KEY:
            raise MalformedRequest(f'unknown key {quote_text(key)}; write "model" in lower case')
    try:
        return CompletionRequest(parse_model_name(document), orjson.dumps(document))
    except orjson.JSONEncodeError:  # it can read more levels than it can write
        raise MalformedRequest("the body has too many levels of nested values") from None


def parse_object(body: bytes) -> dict[str, Any]:
    document = parse_json_body(body)
    if not isinstance(document, dict):
        raise MalformedRequest("the body must be a JSON object")
    return document


def parse_string(document: dict[str, Any], key: str) -> str:
    value = document.get(key)
    if not isinstance(value, str) or not value:
        raise MalformedRequest(f'"{key}" must be a non-empty string')
    return value


def parse_model_name(document: dict[str, Any]) -> str:
    name = parse_string(document, "model")
    if len(name) > MAX_MODEL_NAME_CHARS:
        raise MalformedRequest(f'"model" can have at most {MAX_MODEL_NAME_CHARS} characters')
    return name


def parse_count(document: dict[str, Any], key: str) -> int | None:
    value = document.get(key)
    if value is not None and (type(value) is not int or value < 1):
        raise MalformedRequest(f'"{key}" must be a positive integer')
    return value


def check_texts(texts: Any, key: str) -> list[str]:
    if isinstance(texts, list) and len(texts) > MAX_TEXTS:
        raise TooLarge(f'"{key}" can have at most {MAX_TEXTS} texts; got {len(texts)}')
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise MalformedRequest(f'"{key}" must be a non-empty list of strings')
    return texts


# The tensors of a model.


def build_embedding_payloads(
    signature: Signature, request: TextRequest, limits: PayloadLimits
) -> list[Payload]:
    """Return one payload, or one for each text if the model has no batch dimension.

    Raises `InputMismatch` for a model that does not turn texts into vectors, or `TooLarge`.
    """
    (text,) = find_text_inputs(signature, 1, "embeddings")
    output = find_float_output(signature, EMBEDDING_HINT)
    check_dimensions(signature, output, request.dimensions)
    return build_text_payloads(signature, output, {text.name: request.texts}, limits)


def build_rerank_payloads(
    signature: Signature, request: TextRequest, limits: PayloadLimits
) -> list[Payload]:
    """Like `build_embedding_payloads`, for a model that turns a query and a document into a score.

    The query, which is sent with each document, counts each time towards the size of a body.
    """
    count = len(request.texts)
    if request.query_bytes > limits.max_bytes:
        raise TooLarge(
            f"the query is sent with each of the {count} documents, which takes {request.query_bytes} bytes; "
            f"the limit is {limits.max_bytes} bytes; send a shorter query or fewer documents"
        )
    inputs = find_text_inputs(signature, 2, "reranking")
    hinted = [tensor for tensor in inputs if has_hint(signature, QUERY_HINT, tensor)]
    query = hinted[0] if hinted else inputs[0]
    (document,) = (tensor for tensor in inputs if tensor is not query)
    columns = {query.name: [request.query] * count, document.name: request.texts}
    output = find_float_output(signature, SCORE_HINT)
    return build_text_payloads(signature, output, columns, limits)


def build_text_payloads(
    signature: Signature,
    output: TensorSpec,
    columns: Mapping[str, Sequence[str]],
    limits: PayloadLimits,
) -> list[Payload]:
    count = max(map(len, columns.values()))
    check_row_count(signature, count, limits)
    parts = {name: [Part(text, TEXT) for text in texts] for name, texts in columns.items()}
    options = PayloadOptions((output.name,))
    if signature.has_batch_dimension:
        return [Payload(parts, options, instance_count=count)]
    return [
        Payload({name: [column[row]] for name, column in parts.items()}, options)
        for row in range(count)
    ]


def find_text_inputs(signature: Signature, count: int, use: str) -> list[TensorSpec]:
    required = signature.required_inputs
    texts = [tensor for tensor in required if tensor.datatype.kind is DatatypeKind.BYTES]
    if len(texts) != count or len(required) != count:
        raise InputMismatch(
            f"model {quote_text(signature.model)} does not support {use}: it must have "
            f"{count} required input{'s' * (count > 1)}, of the datatype BYTES; its required inputs "
            f"are {join_names(f'{quote_text(each.name)} ({each.datatype.name})' for each in required)}"
        )
    return texts


def find_float_output(signature: Signature, hint: str) -> TensorSpec:
    outputs = signature.outputs.values()
    floats = [tensor for tensor in outputs if tensor.datatype.kind is DatatypeKind.FLOAT]
    chosen = [tensor for tensor in floats if has_hint(signature, hint, tensor)] or floats
    if len(chosen) != 1:
        raise InputMismatch(
            f"model {quote_text(signature.model)} has {len(floats)} floating-point outputs; embeddings and "
            f"reranking require one, or the parameter gateway.{hint}.OUTPUT in the model's config"
        )
    return chosen[0]


def has_hint(signature: Signature, hint: str, tensor: TensorSpec) -> bool:
    return f"gateway.{hint}.{tensor.name}" in signature.parameters


def check_dimensions(signature: Signature, output: TensorSpec, dimensions: int | None) -> None:
    """Check that the model's config allows vectors of this length. Raises `InputMismatch`."""
    allowed = signature.parameters.get(DIMENSIONS_PARAMETER, "").replace(",", " ").split()
    if dimensions is None or str(dimensions) in allowed or output.shape[-1:] == (dimensions,):
        return
    values = join_names(allowed) if allowed else "only full vectors"
    raise InputMismatch(
        f"model {quote_text(signature.model)} does not support {dimensions} dimensions; its config "
        f"allows {values} ({DIMENSIONS_PARAMETER})"
    )


# Responses.


def encode_embeddings(results: Sequence[InferResult], request: TextRequest) -> EncodedBody:
    """Return the response in OpenAI's format. Raises `ModelFault` for anything but a vector per text."""
    entries = []
    for index, row in enumerate(list_rows(results, len(request.texts))):
        vector = encode_vector(shorten_vector(row, request.dimensions), request.encoding_format)
        entry = {"object": "embedding", "index": index, "embedding": vector}
        # One after another, because each holds the GIL.
        entries.append(orjson.Fragment(orjson.dumps(entry, option=orjson.OPT_SERIALIZE_NUMPY)))
    document = {"object": "list", "data": entries, "model": request.model, "usage": NO_USAGE}
    return EncodedBody(orjson.dumps(document), JSON)


def encode_ranking(results: Sequence[InferResult], request: TextRequest) -> EncodedBody:
    """Return the documents with their scores, best first. Raises `ModelFault` for several scores each."""
    scores = []
    for row in list_rows(results, len(request.texts)):
        if row.size != 1:
            raise ModelFault(f"the model returned {row.size} scores for a document; expected one")
        scores.append(float(row[0]))
    order = sorted(range(len(scores)), key=lambda index: -scores[index])
    ranked = [
        {"index": index, "relevance_score": scores[index]} for index in order[: request.top_n]
    ]
    return EncodedBody(orjson.dumps({"model": request.model, "results": ranked}), JSON)


def list_rows(results: Sequence[InferResult], count: int) -> list[np.ndarray]:
    rows = [row for result in results for row in iterate_rows(result)]
    if len(rows) != count:
        raise ModelFault(f"the model returned {len(rows)} vectors for {count} texts")
    return rows


def iterate_rows(result: InferResult) -> Iterator[np.ndarray]:
    ((name, array),) = result.arrays.items()
    if array.dtype != np.float64:
        array = array.astype(np.float32)
    if not np.isfinite(array).all():
        raise ModelFault(f"the model returned NaN or infinity in output {quote_text(name)}")
    for row in array if result.signature.has_batch_dimension else [array]:
        if max(np.shape(row), default=1) != np.size(row):  # e.g. a vector for each token
            raise ModelFault(
                f"output {quote_text(name)} is not one vector for each text; its shape is "
                f"{list(np.shape(row))}"
            )
        yield np.ravel(row)


def shorten_vector(vector: np.ndarray, dimensions: int | None) -> np.ndarray:
    """Return the first values with the length 1, as OpenAI's API does."""
    if dimensions is None or dimensions >= len(vector):
        return vector
    norm = float(np.linalg.norm(vector[:dimensions]))
    return vector[:dimensions] / norm if norm else vector[:dimensions]


def encode_vector(vector: np.ndarray, encoding_format: str) -> Any:
    if encoding_format == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return np.ascontiguousarray(vector)
