"""`triton-gateway doctor --conformance`, before a real Triton and before one whose responses are edited."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace

import httpx
import pytest
from pydantic import SecretStr

from gateway.capabilities.capability import FAILED, OK, Finding
from gateway.config.settings import Settings
from gateway.doctor import conformance
from gateway.doctor.conformance import Behaviour, Examination, Variant, ask_one
from gateway.embedded.supervisor import EmbeddedTriton
from gateway.fleet.replica import Replica, parse_replica_url
from gateway.messages import print_message
from gateway.triton.restricted_api import RestrictedApi
from tests.support.doctor import examine
from tests.support.edited_triton import KEEPS_CALLS, Edit, EditedTriton, edited_triton
from tests.support.fleet import write_echo
from tests.support.servers import COMPLETE_CONFIGS, ROOT, BriefTriton, triton_with

SECRET = RestrictedApi("secret-header", "the-secret-of-the-test")
LOAD = b"RepositoryModelLoad"
# By the name of a behaviour: a release that differs in it.
EDITS = {
    "server": Edit(b'"version"', b'"release"', b"GET /v2 "),
    "index": Edit(b"200 OK", b"403 Forbidden", b"POST /v2/repository/index "),
    "restricted API": Edit(b"403 Forbidden", b"200 OK", b"POST /v2/repository/index "),
    "unknown model": Edit(b"unknown model", b"other model"),
    "signature": Edit(b'"max_batch_size":1', b'"max_batch_size":8'),
    "binary tensors": Edit(b"RESULT", b"ANSWER"),
    "gRPC inference": Edit(b"RESULT", b"ANSWER", b"ModelInfer"),
    "unknown version": Edit(b"unknown model", b"other model"),
    "mismatch": Edit(b"batch-size", b"number of rows"),
    "malformed request": Edit(b"parse the request JSON", b"understand the"),
    "statistics": Edit(b'"inference_count"', b'"inferences"'),
    "metrics": Edit(b"nv_inference_pending_request_count", b"nv_inference_pending_request_gauge"),
    "failure": Edit(b"Failed to process the request|500 Internal", b"400 Refused"),
    "full queue": Edit(b"queue size", b"number of requests"),
    "cancellation": KEEPS_CALLS,
    "failed load": Edit(conformance.FAILURE_MESSAGE.encode(), b"no reason"),
    "decoupled model": Edit(b"decoupled transaction", b"kind of transaction"),
    "stream": Edit(b"triton_final_response", b"triton_other_response"),
    "failure in a stream": Edit(b"Failed to process the request", b"Refused the request"),
    "generate_stream": Edit(b"data: ", b"text: "),
    "sequence": Edit(b"START flag", b"first flag"),
    "unload": Edit(b"400 Bad Request", b"200 OK", b"/ready "),
    "not ready": Edit(b"has no available versions", b"is at no place"),
}
GROUPS: Sequence[tuple[Variant | None, Sequence[Behaviour]]] = (
    (None, (conformance.SERVER, conformance.INDEX, *conformance.WITHOUT_MODEL)),
    (conformance.QUEUED, (*conformance.ANY_MODEL, *conformance.WITH_STEPS)),
    (conformance.DECOUPLED, conformance.OF_DECOUPLED),
    (conformance.STATEFUL, conformance.OF_SEQUENCES),
)


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedTriton]:
    folder = tmp_path_factory.mktemp("models")
    write_echo(folder, "echo")
    arguments = (*COMPLETE_CONFIGS, "--strict-readiness=true")
    options = triton_with((folder,), ("echo",), arguments).options
    with BriefTriton(replace(options, restricted_api=SECRET), on_message=print_message) as triton:
        yield triton


@pytest.fixture(scope="module")
def edited(triton: EmbeddedTriton) -> Iterator[EditedTriton]:
    with edited_triton(triton.options) as edited:
        yield edited


def ask(url: str) -> tuple[int, dict[str, dict[str, str]]]:
    return examine("--conformance", url, GATEWAY_TRITON_RESTRICTED_API=SECRET.setting)


def select_names(found: dict[str, dict[str, str]], status: str) -> set[str]:
    return {name for name, finding in found.items() if finding["status"] == status}


def test_embedded_triton_conforms_and_is_left_as_it_was(triton: EmbeddedTriton) -> None:
    status, found = ask(triton.options.url)
    assert select_names(found, "ok") == found.keys(), found
    assert status == 0
    url = f"http://127.0.0.1:{triton.options.http_port}/v2"
    index = httpx.post(f"{url}/repository/index", headers={SECRET.key: SECRET.secret}).json()
    assert [model["name"] for model in index if model.get("state") == "READY"] == ["echo"]
    assert httpx.get(f"{url}/health/ready").is_success


@pytest.mark.parametrize(
    ("edit", "loaded", "words"),
    [
        (Edit(b"", b"explicit model load / unload is not allowed", LOAD), "warning", "explicit"),
        (Edit(b"", b"unable to find backend library for backend 'python'", LOAD), "failed", ""),
    ],
    ids=["another control mode", "no backend"],
)
def test_conformance_says_what_it_could_not_ask(
    edited: EditedTriton, edit: Edit, loaded: str, words: str
) -> None:
    with edited.having(edit):
        status, found = ask(edited.url)
    assert found["load"]["status"] == loaded
    assert words in found["load"]["message"]
    assert status == (loaded == "failed")
    assert found["unknown model"]["status"] == found["repository"]["status"] == "ok"
    assert "not asked" in found["cancellation"]["message"]


def test_conformance_uses_an_onnx_model_without_the_python_backend(edited: EditedTriton) -> None:
    no_python = Edit(b"", b"unable to find backend library for backend 'python'", b'"python"')
    with edited.having(no_python):
        status, found = ask(edited.url)
    assert "onnxruntime" in found["load"]["message"]
    skipped = {each.name for each in conformance.WITH_PYTHON}
    assert select_names(found, "warning") == skipped
    assert select_names(found, "failed") == set(), [found["unload"], found["not ready"]]
    assert status == 0


def test_conformance_ends_where_nothing_else_can_be_asked(triton: EmbeddedTriton) -> None:
    status, found = ask(f"http://127.0.0.1:{triton.options.metrics_port}")
    assert (status, list(found)) == (1, ["server"])
    status, found = examine("--conformance", triton.options.url)
    assert (status, list(found)) == (1, ["server", "index"])
    assert "GATEWAY_TRITON_RESTRICTED_API" in found["index"]["message"]


async def ask_edited(edited: EditedTriton) -> dict[str, tuple[Finding, Finding]]:
    """Return the findings of each behaviour with its edit and without."""
    settings = Settings(triton_restricted_api=SecretStr(SECRET.setting))
    examination = Examination(Replica(parse_replica_url(edited.url), settings))
    findings: dict[str, tuple[Finding, Finding]] = {}

    async def ask_twice(behaviour: Behaviour) -> None:
        with edited.having(EDITS[behaviour.name]):
            differing = await ask_one(examination, behaviour)
        findings[behaviour.name] = (differing, await ask_one(examination, behaviour))

    for variant, behaviours in GROUPS:
        if variant is not None:
            await examination.load(variant)
        for behaviour in behaviours:
            await ask_twice(behaviour)
    for behaviour in conformance.AFTER_UNLOAD:
        await ask_twice(behaviour)
    examination.replica.close()
    return findings


@pytest.mark.long
def test_each_behaviour_can_be_found_to_differ(
    edited: EditedTriton, subtests: pytest.Subtests
) -> None:
    findings = asyncio.run(ask_edited(edited))
    assert findings.keys() == EDITS.keys()
    for name, (differing, conforming) in findings.items():
        with subtests.test(name):
            assert differing.status == FAILED, differing
            assert differing.advice
            assert conforming.status == OK, conforming


def test_document_explains_each_line() -> None:
    text = (ROOT / "docs/operate/troubleshooting.md").read_text()
    assert all(f"`{name}`" in text for name in (*EDITS, "load", "repository"))
