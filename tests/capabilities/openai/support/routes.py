"""For whom the routes of OpenAI's API are."""

from __future__ import annotations

from tests.support.keys import INFERENCE
from tests.support.routes import Row

ROWS = (
    Row("POST", "/v1/embeddings", INFERENCE, body=b'{"model": "text_ensemble", "input": "a text"}'),
    Row(
        "POST", "/v1/rerank", INFERENCE, 422, b'{"model": "core", "query": "a", "documents": ["b"]}'
    ),
    Row("POST", "/v1/completions", INFERENCE, 501),
    Row("POST", "/v1/chat/completions", INFERENCE, 501),
)
