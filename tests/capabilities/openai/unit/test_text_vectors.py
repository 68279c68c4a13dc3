"""Which inputs of a model the query and the documents of a ranking are."""

from __future__ import annotations

import pytest

from gateway.capabilities.openai.text_vectors import build_rerank_payloads, parse_rerank_request
from gateway.tensors.payload import PayloadLimits
from gateway.tensors.signature import build_signature


@pytest.mark.parametrize(("named", "query", "document"), [("", "A", "B"), ("B", "B", "A")])
def test_query_is_the_first_input_or_the_one_that_the_config_names(
    named: str, query: str, document: str
) -> None:
    texts = [{"name": name, "datatype": "BYTES", "shape": [-1, 1]} for name in ("A", "B")]
    scores = [{"name": "SCORE", "datatype": "FP32", "shape": [-1, 1]}]
    parameters = {f"gateway.query.{named}": {"string_value": "yes"}} if named else {}
    signature = build_signature(
        {"name": "m", "inputs": texts, "outputs": scores},
        {"max_batch_size": 4, "parameters": parameters},
    )
    request = parse_rerank_request(b'{"model": "m", "query": "q", "documents": ["1", "2"]}')
    (payload,) = build_rerank_payloads(signature, request, PayloadLimits())
    values = {name: [part.value for part in parts] for name, parts in payload.parts.items()}
    assert values == {query: ["q", "q"], document: ["1", "2"]}
