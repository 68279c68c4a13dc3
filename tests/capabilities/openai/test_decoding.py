"""Large bodies of the API are parsed by the pool of decoding processes."""

from __future__ import annotations

import pytest

from gateway.capabilities.openai.text_vectors import (
    parse_completion_request,
    parse_embeddings_request,
    parse_rerank_request,
)
from gateway.capacity.decoding import DecodePool
from gateway.errors import MalformedRequest
from gateway.tensors.json_body import parse_large_json
from gateway.tensors.payload import PayloadLimits
from tests.support.wait import TIMEOUT_S

MIB = 1 << 20


async def test_process_that_parses_a_body_does_not_import_the_application() -> None:
    """Its imports would take longer than any body."""
    pool = DecodePool(1, 256 * MIB)
    try:
        for parse in (parse_embeddings_request, parse_rerank_request, parse_completion_request):
            with pytest.raises(MalformedRequest):
                await pool.run(parse_large_json, (parse, b"{}", PayloadLimits()), TIMEOUT_S)
        imported = await pool.run(eval, ("{*__import__('sys').modules}",), TIMEOUT_S)
    finally:
        await pool.close()
    assert "gateway.capabilities.openai.text_vectors" in imported
    assert imported.isdisjoint({"fastapi", "gateway.services"})
