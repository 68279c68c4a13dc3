"""Requests of texts: what is refused, and which tensors the texts become."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from gateway.capabilities.openai.text_vectors import (
    build_embedding_payloads,
    build_rerank_payloads,
    parse_completion_request,
    parse_embeddings_request,
    parse_rerank_request,
)
from gateway.errors import GatewayError
from gateway.tensors.payload import PayloadLimits
from gateway.tensors.signature import build_signature

PARSERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "embed": (parse_embeddings_request, {"model": "m", "input": "a"}),
    "rank": (parse_rerank_request, {"model": "m", "query": "q", "documents": ["1", {"text": "2"}]}),
    "chat": (parse_completion_request, {"model": "m", "messages": []}),
}


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        ("embed", {"input": []}, "list of strings"),
        ("embed", {"input": ["a", None]}, "list of strings"),
        ("embed", {"input": {}}, "list of strings"),
        ("embed", {"input": [1, 2]}, "check_embedding_ctx_length=False"),
        ("embed", {"input": [[1, 2], [3]]}, "tokens"),
        ("embed", {"encoding_format": "hex"}, "float and base64"),
        *(("embed", {"dimensions": value}, "positive integer") for value in (0, True, "4")),
        *(("embed", {"model": value}, '"model" must be') for value in (7, "", None)),
        ("embed", {"model": "m" * 257}, "at most 256 characters"),
        ("rank", {"documents": []}, "list of strings"),
        ("rank", {"documents": [{}]}, "list of strings"),
        ("rank", {"top_n": 0}, "positive integer"),
        ("rank", {"query": ""}, '"query" must be a non-empty string'),
        # Which one of several keys counts differs between servers.
        ("chat", {"Model": "secret"}, "unknown key 'Model'; write \"model\" in lower case"),
        ("chat", {"model": "m" * 257}, "at most 256 characters"),
    ],
)
def test_invalid_request_is_refused(kind: str, change: dict[str, Any], words: str) -> None:
    parse, document = PARSERS[kind]
    assert parse(orjson.dumps({**document, "unknown": 1}))
    with pytest.raises(GatewayError, match=words):
        parse(orjson.dumps({**document, **change}))
    for body in (b"", b"[]", b"{", b'"text"'):
        with pytest.raises(GatewayError):
            parse(body)


def test_completion_is_encoded_again_with_one_model() -> None:
    body = b'{"model": "a", "mod\\u0065l": "b", "messages": ["\xc3\xa9"]}'
    request = parse_completion_request(body)
    assert (request.model, request.body) == ("b", '{"model":"b","messages":["é"]}'.encode())
    with pytest.raises(GatewayError, match="too many levels"):
        parse_completion_request(b'{"model": "a", "messages": ' + b"[" * 1000 + b"]" * 1000 + b"}")


TEXT, OTHER = ({"name": name, "datatype": "BYTES", "shape": [-1, 1]} for name in ("A", "B"))
NUMBER = {"name": "N", "datatype": "INT32", "shape": [-1, 1]}
VECTOR, SCORE = ({"name": name, "datatype": "FP32", "shape": [-1, 4]} for name in ("V", "S"))
LENGTHS = "gateway.embedding_dimensions"


@pytest.mark.parametrize(
    ("kind", "change", "inputs", "outputs", "hint", "expected"),
    [
        ("embed", {}, [TEXT], [VECTOR], "", {"A": ["a"]}),
        ("embed", {"input": ["b", "c"]}, [TEXT], [VECTOR], "", {"A": ["b", "c"]}),
        ("embed", {}, [TEXT], [VECTOR, SCORE], "gateway.embedding.S", {"A": ["a"]}),
        ("embed", {}, [TEXT], [VECTOR, SCORE], "", "2 floating-point outputs"),
        ("embed", {}, [TEXT], [NUMBER], "", "0 floating-point outputs"),
        ("embed", {}, [NUMBER], [VECTOR], "", "does not support embeddings"),
        ("embed", {}, [TEXT, OTHER], [VECTOR], "", "does not support embeddings"),
        ("embed", {"dimensions": 4}, [TEXT], [VECTOR], "", {"A": ["a"]}),
        ("embed", {"dimensions": 3}, [TEXT], [VECTOR], f"{LENGTHS}=2, 3", {"A": ["a"]}),
        ("embed", {"dimensions": 1}, [TEXT], [VECTOR], f"{LENGTHS}=2, 3", "allows 2 and 3"),
        ("embed", {"dimensions": 3}, [TEXT], [VECTOR], "", "only full vectors"),
        ("rank", {}, [TEXT, OTHER], [SCORE], "", {"A": ["q", "q"], "B": ["1", "2"]}),
        ("rank", {}, [TEXT, OTHER], [SCORE], "gateway.query.B", {"B": ["q", "q"], "A": ["1", "2"]}),
        ("rank", {}, [TEXT], [SCORE], "", "does not support reranking"),
        ("rank", {"query": "q" * 501}, [TEXT, OTHER], [SCORE], "", "takes 1002 bytes"),
    ],
)
def test_texts_become_the_tensors_that_the_model_has(
    kind: str,
    change: dict[str, Any],
    inputs: list[dict[str, Any]],
    outputs: list[dict[str, Any]],
    hint: str,
    expected: dict[str, list[str]] | str,
) -> None:
    parse, document = PARSERS[kind]
    build: Any = build_embedding_payloads if kind == "embed" else build_rerank_payloads
    name, _, value = hint.partition("=")
    parameters = {name: {"string_value": value or "yes"}} if name else {}
    metadata = {"name": "m", "inputs": inputs, "outputs": outputs}
    signature = build_signature(metadata, {"max_batch_size": 4, "parameters": parameters})
    request = parse(orjson.dumps({**document, **change}))
    if isinstance(expected, str):
        with pytest.raises(GatewayError, match=expected):
            build(signature, request, PayloadLimits(max_bytes=1000))
        return
    (payload,) = build(signature, request, PayloadLimits(max_bytes=1000))
    values = {name: [part.value for part in parts] for name, parts in payload.parts.items()}
    assert values == expected
