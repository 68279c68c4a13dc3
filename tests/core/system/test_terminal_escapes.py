"""Terminal escapes of a model, Triton or a gateway: `up` and the commands print them escaped."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import orjson
import pytest
import typer

from gateway.commands import client_commands
from gateway.commands.target import complete_model_name
from tests.support.gateway_forks import run_gateway
from tests.support.up import Up, write_model

EVIL = "\x1b[2J\x1b]0;owned\x07\r\x9b31m\u202eback"
MARKS = ("\x1b", "\x07", "\r", "\x9b", "\u202e")

# Written by Triton's process itself, not through Triton's log.
WRITES = f"""
        for number in (1, 2):
            os.write(number, ({EVIL!r} + " on descriptor " + str(number) + chr(10)).encode())
"""


def assert_harmless(text: str) -> None:
    assert [mark for mark in MARKS if mark in text] == []


@pytest.mark.fault("terminal control sequences in the output of a model, a Triton or a gateway")
def test_terminal_escapes_in_the_output_of_models_and_triton_are_escaped(tmp_path: Path) -> None:
    write_model(tmp_path, WRITES.strip())
    with Up(tmp_path, "--log-verbose", "1") as up:
        up.wait_for("ready after")
        assert r"\x1b[2J" in up.wait_for("on descriptor 1")
        assert r"\u202eback" in up.wait_for("on descriptor 2")
    assert_harmless(up.output)


@pytest.mark.fault("terminal control sequences in the output of a model, a Triton or a gateway")
@pytest.mark.parametrize("flag", ["--exit-on-error", "--no-exit-on-error"])
def test_terminal_escapes_in_the_reason_of_a_failed_load_are_escaped(
    tmp_path: Path, flag: str
) -> None:
    write_model(tmp_path, f"raise ValueError({EVIL!r} + ' in the reason')")
    with Up(tmp_path, flag) as up:
        up.wait_for("in the reason")
        if flag == "--exit-on-error":
            assert up.end() == 1
    assert_harmless(up.output)


VERSION = {"version": EVIL, "state": EVIL}
MODEL = {
    "name": EVIL,
    "ready": True,
    "versions": [VERSION],
    "last_error": EVIL,
    "decoupled": False,
    "platform": EVIL,
    "max_batch_size": 0,
    "curl": f"curl {EVIL}",
    "inputs": [{"name": "IN", "datatype": "BYTES", "shape": [1]}],
    "outputs": [{"name": EVIL, "datatype": "BYTES", "shape": [1]}],
}
REPLICA = {"address": EVIL, "state": EVIL, "outstanding": 0, "models": {EVIL: EVIL}}
ERROR = {"error": f"{EVIL} is wrong", "code": EVIL, "request_id": EVIL}
ANSWERS = {
    "/v1/models": {"models": [MODEL | {"name": each} for each in (EVIL, "$(reboot)", "harmless")]},
    "/v1/models/m": MODEL,
    "/v1/models/n": MODEL,
    "/v1/models/n/infer": {
        **dict.fromkeys(("id", "state", "model", "kind"), EVIL),
        "progress": {"total": 1, "done": 0, "failed": 0},
    },
    "/v1/jobs/secret": {"secrets": [EVIL]},
    "/v1/replicas": {"replicas": [REPLICA]},
    "/readyz": {"ready": False, "replicas": {EVIL: EVIL}, "missing": {EVIL: {EVIL: EVIL}}},
}


class Hostile(BaseHTTPRequestHandler):
    """A gateway whose responses are valid, with terminal escapes in every string."""

    def answer(self) -> None:
        replicas = {"model": EVIL, "replicas": {EVIL: VERSION | {"reason": EVIL}}}
        managed = replicas if "/repository/" in self.path else {}
        body = orjson.dumps(ANSWERS.get(self.path, ERROR | managed))
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(200 if self.path in ANSWERS else 422)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = answer  # noqa: N815 - as the library calls them

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


@pytest.fixture(scope="module")
def hostile() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Hostile) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_names_of_models_that_a_shell_would_run_are_not_completed(hostile: str) -> None:
    context = typer.Context(typer.main.get_command(client_commands.cli))
    context.params = {"url": hostile}
    assert complete_model_name(context, "") == ["harmless"]


@pytest.mark.long
@pytest.mark.fault("terminal control sequences in the output of a model, a Triton or a gateway")
@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["models"], "stdout"),
        (["models", "--json"], "stdout"),
        (["replicas"], "stdout"),
        (["replicas", "--json"], "stdout"),
        (["ready"], "stderr"),
        (["ready", "--json"], "stdout"),
        (["load", "m"], "stderr"),
        (["unload", "m"], "stderr"),
        (["curl", "m"], "stdout"),
        (["describe", "m"], "stdout"),
        (["describe", "m", "--json"], "stdout"),
        (["infer", "m", "--text", "a"], "stderr"),
        (["infer", "m", "--text", EVIL], "stdout"),
        (["infer", "n", "--text", "a", "--async", "--no-wait"], "stdout"),
        (["jobs", "secret"], "stdout"),
        (["bench", "m", "--text", "a"], "stderr"),
    ],
    ids=" ".join,
)
def test_terminal_escapes_in_responses_of_a_gateway_are_escaped(
    hostile: str, arguments: list[str], shown: str
) -> None:
    run = run_gateway(*arguments, "--url", hostile)
    assert_harmless(run.stdout)
    assert_harmless(run.stderr)
    assert "u202eback" in getattr(run, shown)
    assert "Traceback" not in run.stderr
