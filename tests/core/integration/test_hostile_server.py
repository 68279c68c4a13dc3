"""The client and its commands against a server that is hostile, or anything but a gateway."""

from __future__ import annotations

import gzip
import io
import json
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import typer

from gateway.cli import build_command
from gateway.client import AsyncClient, Client, GatewayError
from gateway.client.arrays import encode_npy, encode_npz
from gateway.client.calls import build_json_request
from gateway.client.connection import find_options
from gateway.client.errors import INVALID_RESPONSE, InvalidRequest
from gateway.client.replies import LineBuffer, ResponseBuffer
from gateway.client.retries import Attempts
from gateway.client.transport import Transport
from gateway.commands import client_commands
from gateway.commands.target import complete_model_name
from gateway.messages import CommandError
from tests.support.scripted_server import ScriptedServer, respond
from tests.support.scripted_server import serving as serving_steps
from tests.support.terminal import call_in_terminal

KEY = "tgw_a-key-for-one-server"
# A screen that is cleared, a title, and text in the other direction.
EVIL = "a\x1b[2J\x1b]0;t\x07\x9b31m\u202eb"


@contextmanager
def serving(body: Any, **headers: str) -> Iterator[ScriptedServer]:
    """Serve bytes or a document at every path, or several by path."""
    is_by_path = isinstance(body, dict) and any(key.startswith("/") for key in body)
    bodies = (body if is_by_path else {"": body}).items()
    contents = {
        path: each if isinstance(each, bytes) else json.dumps(each).encode()
        for path, each in bodies
    }
    steps = {path: respond(content, **headers) for path, content in contents.items()}
    with serving_steps(by_path=steps) as server:
        yield server


# What is asked for, with the port of another server, and where it goes; None: it is not sent.
PATHS: dict[str, str | None] = {
    "/v1/models": "/v1/models",
    "/v1/models?after=../x&url=http://evil.example//": "/v1/models?after=../x&url=http://evil.example//",
    "/v1/models/..a/b..": "/v1/models/..a/b..",
    "http://127.0.0.1:{port}/v1/models": None,
    "HTTP://127.0.0.1:{port}/v1/models": None,
    "//127.0.0.1:{port}/v1/models": None,
    "https:127.0.0.1:{port}/v1/models": None,
    "@127.0.0.1:{port}/v1/models": None,
    ".evil.example/v1/models": None,
    ":{port}/v1/models": None,
    "v1/models": None,
    "": None,
    "?x": None,
    "/v1/models/m/../../../v2/repository/models/m/unload": None,
    "/v1/./models": None,
    "/..": None,
    "/v1/models\r\nX-Other: 1": None,
    "/v1/" + "x" * 70_000: None,
}


@pytest.mark.parametrize("path", PATHS, ids=lambda path: repr(path[:50]))
async def test_request_goes_to_a_path_of_its_own_server_or_nowhere(path: str) -> None:
    with serving({}) as own, serving({}) as other:
        asked = path.format(port=other.server_port)
        with Client(own.url, key=KEY, retries=0) as client:
            async with AsyncClient(own.url, key=KEY, retries=0) as async_client:
                if PATHS[path] is None:
                    with pytest.raises(InvalidRequest):
                        client.request("GET", asked)
                    with pytest.raises(InvalidRequest):
                        next(client.download(asked))
                    with pytest.raises(InvalidRequest):
                        await async_client.request("DELETE", asked)
                else:
                    client.request("GET", asked)
                    await async_client.request("GET", asked)
        asked_paths = [each["path"] for each in own.received]
        assert asked_paths == [PATHS[path]] * 2 * (PATHS[path] is not None)
        assert other.received == []


def test_client_asks_for_no_compression_and_reads_none() -> None:
    bomb = gzip.compress(bytes(64 << 20))
    for coding in ("gzip", "br", "zstd", "gzip, gzip", "x"):
        with serving(bomb, Content_Encoding=coding) as server, Client(server.url) as client:
            with pytest.raises(GatewayError, match="its response is compressed") as caught:
                client.request("GET", "/v1/models")
            assert caught.value.code == INVALID_RESPONSE
            with pytest.raises(GatewayError, match="its response is compressed"):
                next(client.download("/v1/models"))


@pytest.mark.parametrize(
    ("size", "is_read"), [(1 << 20, True), ((1 << 20) + 1, False), (9 << 20, False)]
)
def test_response_is_read_up_to_a_limit(size: int, is_read: bool) -> None:
    request = build_json_request("GET", "/v1/models")
    with serving(bytes(size)) as server:
        transport = Transport(find_options(server.url, "", None), max_bytes=1 << 20)
        try:
            if is_read:
                assert len(transport.read(request, Attempts(60, 0)).content) == size
                return
            with pytest.raises(GatewayError, match="is larger than 1048576 bytes") as caught:
                transport.read(request, Attempts(60, 0))
            assert caught.value.code == INVALID_RESPONSE
        finally:
            transport.close()


def test_line_is_kept_up_to_a_limit() -> None:
    buffer = ResponseBuffer("http://gateway", 10)
    buffer.add(b"12345")
    buffer.add(b"67890")
    with pytest.raises(GatewayError, match="is larger than 10 bytes"):
        buffer.add(b"1")
    assert buffer.take() == b"1234567890"
    buffer.add(b"another")
    lines = LineBuffer("http://gateway")
    assert [lines.feed(data) for data in (b"a", b"b\nc\nd", b"\n\n", b"e")] == [
        [],
        [b"ab", b"c"],
        [b"d", b""],
        [],
    ]
    assert lines.take() == b"e"


def deflate(entries: Mapping[str, bytes]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    return file.getvalue()


ARCHIVES = {
    "a bomb": deflate({"Y.npy": bytes(64 << 20)}),
    "many": deflate({f"{number}.npy": bytes(1 << 20) for number in range(64)}),
    "one array": encode_npy([1.5]),
    "no array": encode_npz({"Y": [1.5]}).replace(b"NUMPY", b"NUMPX"),
    "a huge shape": encode_npz({"Y": [1.5]}).replace(b"(1,), }    ", b"(1<<60,), }")
}  # fmt: skip


@pytest.mark.parametrize("name", ARCHIVES)
def test_archive_that_becomes_larger_than_the_response_is_refused(name: str) -> None:
    model = {
        "name": "m",
        "ready": True,
        "versions": [],
        "outputs": [{"name": "Y", "datatype": "FP32", "shape": [1]}],
    }
    archive = ARCHIVES[name]
    answers = {"/v1/models/m": model, "/v1/models/m/infer": archive}
    with serving(answers, content_type="application/x-npz") as server:
        with Client(server.url, retries=0) as client, pytest.raises(GatewayError) as caught:
            client.infer("m", "x")
        assert caught.value.code == INVALID_RESPONSE


MODEL = {
    "name": "m", "ready": True, "versions": ["1"], "platform": "p", "decoupled": False, "max_batch_size": 0,
    "inputs": [], "outputs": [], "curl": "curl",
}  # fmt: skip
REPLICA = {"address": "a", "state": "UP", "outstanding": 0, "models": {"m": "READY"}}
EVENT = {"time": "t", "action": "load", "outcome": "ok"}
# A command, and what a server answers that is not a gateway.
SHAPES: list[tuple[str, Any]] = [
    ("models", {"models": None}),
    ("models", {"models": [None]}),
    ("models", {"models": ["m"]}),
    ("models", {"models": [{**MODEL, "versions": [1]}]}),
    ("models", {"models": [{**MODEL, "replicas": ["a"]}]}),
    ("models", {"models": [{**MODEL, "wished": []}]}),
    ("models --filter m", {"models": [{"name": 5}]}),
    ("replicas", {"replicas": [{}]}),
    ("replicas", {"replicas": [{**REPLICA, "ejected_for_s": "soon"}]}),
    ("replicas", {"replicas": [{**REPLICA, "models": [[]]}]}),
    ("replicas drain a", {}),
    ("ready", {}),
    ("ready", {"ready": False, "replicas": 5}),
    ("load m", {"replicas": {"a": None}, "model": "m"}),
    ("unload m", {"replicas": []}),
    ("describe m", {**MODEL, "inputs": [{"name": "X"}]}),
    ("describe m", {**MODEL, "inputs": [{"name": "X", "datatype": "FP32", "shape": ["a"]}]}),
    ("describe m", {**MODEL, "name": 5}),
    ("curl m", {**MODEL, "curl": None}),
    ("curl m", {"name": "m", "ready": True, "versions": []}),
    ("events", {"events": {"a": 1}}),
    ("events", {"events": [{**EVENT, "changes": [{}]}]}),
    ("events --follow", {"events": [EVENT]}),
    ("top", {"/v1/models": {"models": [{}]}, "/v1/replicas": {"replicas": [{}]}, "/metrics": b""}),
    ("infer m --text x", {**MODEL, "inputs": "text"}),
    ("infer m x", {**MODEL, "inputs": [{"name": 1, "datatype": 2, "shape": 3}]}),
    ("bench m", {**MODEL, "curl": "curl 'unclosed"}),
    ("bench m", {**MODEL, "curl": ""}),
    ("pull m", {"files": [{"path": "1/a"}]}),
    ("pull m", {"files": [{"path": "1/a", "bytes": "5", "sha256": ""}]}),
    ("pull m", {"files": [5]}),
    ("doctor", {"ready": True, "missing": [], "replicas": [{"address": 1}]}),
]  # fmt: skip


@pytest.mark.parametrize(("command", "answer"), SHAPES)
def test_document_of_another_shape_is_one_sentence(command: str, answer: Any) -> None:
    arguments = [*command.split(), "--url"]
    with serving(answer) as server, pytest.raises(CommandError) as caught:
        build_command()(args=[*arguments, server.url], standalone_mode=False, obj={})
    assert caught.value.status == 3, caught.value
    sentence = str(caught.value)
    assert server.url in sentence
    assert "check that the URL is the gateway's" in sentence or "is not a gateway" in sentence


EVIL_MODEL = {
    **MODEL,
    "name": EVIL,
    "curl": f"curl {EVIL}",
    "last_error": EVIL,
    "platform": EVIL,
    "versions": [],
}
EVIL_EVENT = {**EVENT, "caller": EVIL, "changes": [{"subject": EVIL, "from": EVIL, "to": [EVIL]}]}
EVIL_TENSOR = {"name": EVIL, "datatype": EVIL, "shape": [1], "content_type": EVIL}


EVIL_JOB = {
    **dict.fromkeys(("id", "state", "model", "kind", "created"), EVIL),
    "progress": {"total": 1, "done": 0, "failed": 0},
}


def answer_inference(document: Any) -> dict[str, Any]:
    return {"/v1/models/m": MODEL, "/v1/models/m/infer": document}


# A command in a terminal, and an answer with control sequences in each text.
COMMANDS: list[tuple[str, Any]] = [
    ("models", {"models": [EVIL_MODEL]}),
    ("models --json", {"models": [EVIL_MODEL]}),
    ("replicas", {"replicas": [{**REPLICA, "address": EVIL, "reason": EVIL}]}),
    ("replicas cordon a", {"address": EVIL, "cordoned": True, "outstanding": EVIL, "sequences": 0}),
    ("ready", {"ready": True, "missing": {EVIL: EVIL}}),
    ("ready", {"ready": False, "replicas": {EVIL: EVIL}}),
    ("load m", {"model": EVIL, "replicas": {EVIL: {"state": EVIL, "reason": EVIL}}}),
    ("describe m", {**EVIL_MODEL, "inputs": [EVIL_TENSOR], "outputs": [EVIL_TENSOR]}),
    ("curl m", EVIL_MODEL),
    ("events", {"events": [EVIL_EVENT]}),
    ("events --json", {"events": [EVIL_EVENT]}),
    ("infer m --text x", answer_inference({"outputs": {EVIL: [EVIL, {EVIL: EVIL}]}})),
    ("infer m --text x --json", answer_inference({"outputs": {EVIL: EVIL}})),
    ("top", {"/": {"models": [EVIL_MODEL], "replicas": [REPLICA]}, "/metrics": b""}),
    ("doctor", {"ready": True, "models": [EVIL_MODEL], "replicas": [{**REPLICA, "address": EVIL}]}),
    ("pull m", {"files": [{"path": f"../{EVIL}", "bytes": 1, "sha256": EVIL}]}),
    ("unload m", {"model": EVIL, "replicas": {EVIL: {"state": EVIL, "reason": EVIL}}}),
    ("infer m --text x", answer_inference({"error": EVIL, "code": EVIL})),
    ("infer m --text x --async --no-wait", answer_inference(EVIL_JOB)),
    ("bench m --text x", answer_inference({"error": EVIL, "code": EVIL})),
    ("jobs secret", {"secrets": [EVIL]}),
    ("jobs get j", EVIL_JOB),
    ("label delete m l", {"label": EVIL}),
]


@pytest.mark.fault("terminal control sequences in the output of a model, a Triton or a gateway")
@pytest.mark.parametrize(("command", "answer"), COMMANDS)
def test_no_control_sequence_of_a_server_reaches_the_terminal(command: str, answer: Any) -> None:
    with serving(answer) as server:
        words = call_in_terminal(*command.split(), "--url", server.url)
    assert [line for line in words.split("\r\n") if not line.isprintable()] == []
    assert "a\\x1b[2J" in words or "a\\u001b[2J" in words, words


def test_names_of_models_that_a_shell_would_run_are_not_completed() -> None:
    models = [{**MODEL, "name": name, "versions": []} for name in (EVIL, "$(reboot)", "harmless")]
    context = typer.Context(typer.main.get_command(client_commands.cli))
    with serving({"models": models}) as server:
        context.params = {"url": server.url}
        assert complete_model_name(context, "") == ["harmless"]
