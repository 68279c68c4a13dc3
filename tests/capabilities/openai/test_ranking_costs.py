"""What a ranking that returns its documents costs: memory, and time of the event loop."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.embedded.supervisor import EmbeddedTriton
from tests.support.errors import assert_error
from tests.support.measurements import assert_number
from tests.support.model_zoo.zoo import AS_WRITTEN, Zoo
from tests.support.servers import gateway

MIB = 1 << 20
RELEVANCE = "relevance"  # a model


@pytest.mark.long
@pytest.mark.fault("documents of megabytes that a ranking returns")
def test_documents_that_a_ranking_returns_are_charged_and_encoded_in_a_thread(
    zoo_triton: EmbeddedTriton,
) -> None:
    """A body of 7 MiB takes six times as much of the budget; what the response holds is charged, too."""
    body = {"model": RELEVANCE, "query": "a", "documents": ["b" * (7 * MIB)]}
    returning = {**body, "return_documents": True}
    settings = {"connect_timeout_s": "10", "max_bytes_in_flight": str(64 * MIB)}
    with gateway(zoo_triton.options.url, **settings) as (client, command):
        Zoo(client, AS_WRITTEN).load(RELEVANCE)
        assert client.post("/v1/rerank", json=body).status_code == 200
        refused = client.post("/v1/rerank", json=returning)
        assert refused.status_code == 413
        assert_error(refused, 413, "TOO_LARGE", "of memory")
        documents = ["b" * (6 * MIB)]
        answer = client.post("/v1/rerank", json={**returning, "documents": documents})
        assert answer.json()["results"][0]["document"]["text"] == documents[0]
        documents = ['"' * (2 * MIB)]  # to be escaped
        spent_s = []
        for more in ({}, {"return_documents": True}):
            before = event_loop_s(command.pid)
            for _ in range(10):
                client.post("/v1/rerank", json={**body, "documents": documents, **more})
            spent_s.append(event_loop_s(command.pid) - before)
    added_ms = (spent_s[1] - spent_s[0]) * 100
    assert_number("the event loop's time to return 2 MiB", added_ms, "ms", at_most=8)


def event_loop_s(pid: int) -> float:
    """The CPU time of a process's main thread."""
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9
