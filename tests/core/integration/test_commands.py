"""The commands that use a gateway, as processes, with the real gateway and the real tritonserver."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import random
import re
import select
import signal
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from gateway.client.many import run_ordered
from gateway.commands import errors
from gateway.commands.records import encode_text_record
from gateway.commands.top import ERRORS, REQUESTS, Snapshot, Traffic, render_snapshot
from gateway.embedded.supervisor import EmbeddedTriton
from tests.support.gateway_forks import run_gateway
from tests.support.keys import entry, written
from tests.support.model_zoo.zoo import SHARED, Names, quoted, write_repository
from tests.support.servers import ROOT, free_ports, gateway_before, triton_on_free_ports
from tests.support.wait import wait_until

ADMIN, WEAK = "tgw_admin-of-these-tests", "tgw_infer-of-these-tests"
NAMES = Names(seed=11)
MODELS = ("single_BYTES", "nhwc", "plain_vector_FP32", "sleeping", "ticking")
ALL = TEXTS, IMAGES, NUMBERS, PAUSES, TICKS = [NAMES.model(name) for name in MODELS]


@dataclass(frozen=True)
class Gateway:
    """A gateway as the environment of the commands names it."""

    url: str
    key: str = ADMIN

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "TRITON_GATEWAY_URL": self.url, "TRITON_GATEWAY_KEY": self.key}

    def start(self, *arguments: str | Path, **options: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen(command(*arguments), env=self.environment, cwd=ROOT, **options)

    def run(self, *arguments: str | Path, given: str = "") -> subprocess.CompletedProcess[str]:
        return run_gateway(*arguments, environment=self.environment, given=given)

    def fails(self, status: int, *arguments: str | Path) -> str:
        """Return the sentence that a command prints, and nothing else, when it fails."""
        ended = self.run(*arguments)
        assert (ended.returncode, ended.stdout) == (status, ""), ended
        (sentence,) = ended.stderr.splitlines()
        return sentence.removeprefix("triton-gateway: ")


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "gateway", *map(str, arguments)]


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedTriton]:
    """A Triton of this module alone, because its models are listed and unloaded."""
    folder = tmp_path_factory.mktemp("models")
    write_repository(folder, NAMES, [model for model in SHARED if model.name in MODELS])
    with triton_on_free_ports(folder) as triton:
        yield triton


@pytest.fixture(scope="module")
def gateway(triton: EmbeddedTriton, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    entries = [entry(ADMIN, "admin", name="admin"), entry(WEAK, "infer", name="infer")]
    keys = written(tmp_path_factory.mktemp("keys") / "keys.yaml", entries)
    with gateway_before(triton.options.url, keys_file=str(keys)) as client:
        yield Gateway(str(client.base_url).rstrip("/"))


def records(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def names_of(text: str) -> list[str]:
    return [record["input"] for record in records(text)]


def value_of(record: Mapping[str, Any]) -> Any:
    (value,) = record["outputs"].values()
    return value


def text_files(folder: Path, count: int) -> list[Path]:
    """Write files in separate folders, so that their order is not that of their creation."""
    paths = [folder / str(number % 3) / f"{number:04}.txt" for number in range(count)]
    for path in paths:
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(f"text of {path.name}")
    return sorted(paths)


def pause_files(folder: Path, seconds: Sequence[float]) -> list[Path]:
    """Write a file for each pause of a model, in the order in which they are read."""
    paths = sorted(folder / str(number % 3) / f"{number:04}.json" for number in range(len(seconds)))
    for path, pause_s in zip(paths, seconds, strict=True):
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(json.dumps({"inputs": pause_s}))
    return paths


def image_files(folder: Path, count: int, broken: int) -> list[Path]:
    """Small, every one another; the broken ones are among them."""
    folder.mkdir()
    paths = [folder / f"{number:04}.png" for number in range(count)]
    for number, path in enumerate(paths):
        Image.fromarray(np.full((6, 4, 3), number % 251, np.uint8)).save(path)
    for path in paths[7 :: count // broken]:
        path.write_bytes(b"\x89PNG of which nothing else is there")
    return paths


@pytest.mark.long
def test_folder_with_broken_files_fails_only_these_in_batches_or_alone(
    gateway: Gateway, tmp_path: Path
) -> None:
    paths = image_files(tmp_path / "images", 50, broken=2)
    paths[3].unlink()
    paths[3].symlink_to("nowhere")
    alone = gateway.run("infer", IMAGES, tmp_path / "images")
    assert alone.returncode == 1
    assert names_of(alone.stdout) == [str(path) for path in paths]
    codes = {3: "UNREADABLE", 7: "BAD_IMAGE", 32: "BAD_IMAGE"}
    for number, record in enumerate(records(alone.stdout)):
        if number in codes:
            assert record["code"] == codes[number]
        else:
            assert np.unique(max(record["outputs"].values(), key=str)).tolist() == [number]
    summary, *listed = alone.stderr.splitlines()
    assert summary.startswith("47 succeeded, 3 failed")
    assert len(listed) == 3
    assert listed[1].startswith(f"  {paths[7]}: ")
    batched = gateway.run("infer", IMAGES, tmp_path / "images", "--batch", "8")
    assert (batched.returncode, batched.stdout) == (1, alone.stdout)


@pytest.mark.long
def test_run_over_2000_images_is_exact_after_an_interrupt_a_resume_and_a_bad_file(
    gateway: Gateway, tmp_path: Path
) -> None:
    count = 2000
    paths = image_files(tmp_path / "images", count, broken=1)  # the eighth
    output = tmp_path / "results.jsonl"
    arguments = ("infer", IMAGES, str(tmp_path / "images"), "--output", str(output))
    running = gateway.start(*arguments, stderr=subprocess.PIPE)

    def some_are_written() -> bool:
        assert running.poll() is None
        return output.exists() and len(output.read_bytes().splitlines()) >= 100

    wait_until(some_are_written)
    running.send_signal(signal.SIGINT)
    _, message = running.communicate(timeout=60)
    assert running.returncode == 130
    done = names_of(output.read_text())
    assert 100 <= len(done) < count
    assert done == [str(path) for path in paths[: len(done)]]
    rest = f"{len(done)} of {count} inputs are done; run the same command with --resume to continue"
    assert f"interrupted: {rest}" in message.decode()
    assert "--resume continues it" in gateway.fails(2, *arguments)
    ended = gateway.run(*arguments, "--resume", "--batch", "8")
    assert ended.returncode == 1
    skipped = len(done) - 1  # the bad file is sent again
    assert f"{count - skipped - 1} succeeded, 1 failed, {skipped} skipped" in ended.stderr
    written = {record["input"]: record for record in records(output.read_text())}
    assert len(output.read_bytes().splitlines()) == len(written) == count
    for number, path in enumerate(paths):
        record = written[str(path)]
        if number == 7:
            assert record["code"] == "BAD_IMAGE"
        else:
            values = max(record["outputs"].values(), key=str)
            assert np.unique(values).tolist() == [number % 251]


def test_resume_repeats_inputs_that_failed_or_were_cut_off(
    gateway: Gateway, tmp_path: Path
) -> None:
    paths = text_files(tmp_path, 4)
    output = tmp_path / "results.jsonl"
    arguments: list[str | Path] = ["infer", TEXTS, *paths, paths[0], "--output", output]
    assert gateway.run(*arguments).returncode == 0
    lines = output.read_text().splitlines(keepends=True)
    assert lines[4] == lines[0]  # the same input
    failed = json.dumps({"input": str(paths[1]), "error": "it was not there", "code": "X"}) + "\n"
    output.write_text("".join((lines[0], failed, lines[2], lines[3][:-4])))
    assert gateway.run(*arguments, "--resume").returncode == 0
    assert output.read_text() == "".join((lines[0], lines[2], lines[1], lines[3], lines[4]))

    output.write_text("no record\n")
    assert "a line is not a record of infer" in gateway.fails(2, *arguments, "--resume")
    one = ("infer", TEXTS, paths[1], "--output", output)
    assert "--resume continues it" in gateway.fails(2, *one)
    output.write_text("".join(lines))
    assert gateway.run(*one, "--overwrite").returncode == 0
    assert output.read_text() == lines[1]


def test_lines_of_standard_input_are_answered_as_they_arrive(gateway: Gateway) -> None:
    running = gateway.start(
        "infer", TEXTS, "-", stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert running.stdin is not None
    assert running.stdout is not None
    for number, text in enumerate(("one", "", "drei ü"), 1):
        running.stdin.write(f"{text}\n".encode())
        running.stdin.flush()
        record = json.loads(running.stdout.readline())
        assert (record["input"], value_of(record)) == (f"-:{number}", text)
    rest, message = running.communicate(b"the last without an end", timeout=60)
    assert [value_of(record) for record in records(rest.decode())] == ["the last without an end"]
    assert (running.returncode, message[:22]) == (0, b"4 succeeded, 0 failed,")


def test_infer_that_waits_for_a_line_ends_at_a_signal(gateway: Gateway) -> None:
    running = gateway.start(
        "infer", TEXTS, "-", stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert running.stdin is not None
    assert running.stdout is not None
    running.stdin.write(b"one\n")
    running.stdin.flush()
    assert b"one" in running.stdout.readline()
    running.send_signal(signal.SIGTERM)
    running.communicate(timeout=60)
    assert running.returncode == 143


@pytest.mark.long
def test_pipes_are_read_only_if_they_are_named(gateway: Gateway, tmp_path: Path) -> None:
    text_files(tmp_path, 2)
    os.mkfifo(pipe := tmp_path / "0" / "pipe.txt")
    listed = [f"{tmp_path}/0/0000.txt", f"{tmp_path}/1/0001.txt"]
    for named in (tmp_path, tmp_path / "*" / "*.txt"):
        assert names_of(gateway.run("infer", TEXTS, named).stdout) == listed
    for flag, name in (("--concurrency=2", pipe), ("--lines", f"{pipe}:1")):
        running = gateway.start("infer", TEXTS, listed[1], pipe, flag, stdout=subprocess.PIPE)
        pipe.write_text("through a pipe")  # waits until it is read
        _, record, *_ = records(running.communicate(timeout=60)[0].decode())
        assert (running.returncode, record["input"]) == (0, str(name))
        assert "through a pipe" in str(value_of(record))


@pytest.mark.long
@pytest.mark.parametrize("flag", ["--batch=1", "--lines"])
def test_infer_that_waits_for_a_pipe_ends_at_a_signal(
    gateway: Gateway, tmp_path: Path, flag: str
) -> None:
    (path,) = text_files(tmp_path, 1)
    os.mkfifo(pipe := tmp_path / "pipe.txt")
    running = gateway.start(
        "infer", TEXTS, path, pipe, flag, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert running.stdout is not None
    assert running.stdout.readline()  # the file before it is answered
    running.send_signal(signal.SIGTERM)
    _, message = running.communicate(timeout=60)
    assert running.returncode == 128 + signal.SIGTERM
    assert message.decode().splitlines()[-1].startswith("interrupted: ")


def test_infer_ends_if_its_output_is_closed(gateway: Gateway, tmp_path: Path) -> None:
    (tmp_path / "many.txt").write_text("a line\n" * 3000)
    running = gateway.start(
        "infer", TEXTS, tmp_path / "many.txt", "--lines",
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert running.stdout is not None
    assert value_of(json.loads(running.stdout.readline())) == "a line"
    running.stdout.close()
    assert running.wait(60) == 141
    assert running.stderr is not None
    assert running.stderr.read() == b""
    running.stderr.close()


def test_inputs_of_every_kind_are_read(gateway: Gateway, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([1.5, 2], np.float32))
    (tmp_path / "b.json").write_text('{"inputs": [3, 4]}')
    np.savez(tmp_path / "c.npz", np.array([5], np.float32))
    ended = gateway.run("infer", NUMBERS, f"{tmp_path}/*.np?", tmp_path / "b.json")
    assert ended.returncode == 0, ended.stdout
    assert [value_of(record) for record in records(ended.stdout)] == [[1.5, 2.0], [5.0], [3.0, 4.0]]
    (tmp_path / "slow.json").write_text('{"inputs": 5}')
    slow = gateway.run("infer", PAUSES, tmp_path / "slow.json", "--timeout", "0.3")
    assert records(slow.stdout)[0]["code"] == "DEADLINE_PASSED"
    texts = gateway.run("infer", TEXTS, "--text", "-x", "--text", 'a,\n"b"', "--batch", "2")
    assert [value_of(record) for record in records(texts.stdout)] == ["-x", 'a,\n"b"']


def test_word_that_is_no_file_is_a_text(gateway: Gateway, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("from a file")
    ended = gateway.run("infer", TEXTS, "what is this?", tmp_path / "a.txt", "x" * 300)
    texts = ["what is this?", "x" * 300, "from a file"]
    assert [value_of(record) for record in records(ended.stdout)] == texts
    shown = gateway.run("infer", TEXTS, "what is this?", "--format", "text").stdout
    assert re.fullmatch(r"text:1\n  \S+  what is this\?\n", shown)
    mine, its = pty.openpty()
    running = gateway.start("infer", TEXTS, "what is this?", stdout=its, stderr=its)
    os.close(its)
    assert b"{" not in seen_until(mine, b"1 succeeded")
    assert running.wait(60) == 0
    os.close(mine)


def test_readable_record_shows_texts_and_the_beginning_of_others() -> None:
    table: dict[str, tuple[Any, str]] = {
        "text": ("one\ntwo", "  Y  one\n     two\n"),
        "object": ({"label": "7", "odd": False}, '  Y  {"label":"7","odd":false}\n'),
        "vector": ([0.5] * 384, f"  Y  [{'0.5,' * 49}0.5 …\n"),
        "empty": ("", "  Y  \n"),
    }
    for name, (value, shown) in table.items():
        record = {"input": name, "outputs": {"Y": value}}
        assert encode_text_record(record).decode() == f"{name}\n{shown}"


@pytest.mark.long
def test_model_with_several_responses_has_them_in_one_record(
    gateway: Gateway, tmp_path: Path
) -> None:
    counts = {"three.json": 3, "none.json": 0, "fails.json": -2}
    for name, count in counts.items():
        inputs = {NAMES.tensor("COUNT"): count, NAMES.tensor("SECONDS"): 0.0}
        (tmp_path / name).write_text(json.dumps({"inputs": inputs}))
    ended = gateway.run("infer", TICKS, *(tmp_path / name for name in counts))
    three, none, fails = records(ended.stdout)
    assert three["outputs"][NAMES.tensor("NUMBER")] == [[0], [1], [2]]
    assert none["outputs"] == {}
    assert set(fails) == {"input", "error", "code"}
    assert (fails["code"], bool(fails["error"])) == ("MODEL_FAULT", True)
    assert "2 succeeded, 1 failed" in ended.stderr
    assert ended.returncode == 1
    assert "any number of responses" in gateway.fails(2, "infer", TICKS, tmp_path, "--batch", "2")
    brief = ("--seconds", "0.1", "--concurrency", "2", "--json")
    (level,) = json.loads(gateway.run("bench", TICKS, tmp_path / "three.json", *brief).stdout)
    assert level["failed"] == 0 < level["requests"]
    assert fails["error"] in gateway.fails(1, "bench", TICKS, tmp_path / "fails.json", *brief)


@pytest.mark.long
def test_infer_retries_what_an_overloaded_gateway_refuses(
    triton: EmbeddedTriton, tmp_path: Path
) -> None:
    """A stream holds the only place until each request was put off.

    Takes long: the client waits longer from one try to the next.
    """
    pauses = tmp_path / "pauses"
    pause_files(pauses, [0.01] * 3)
    declared = tmp_path / "models.yaml"
    declared.write_text("models: [nonesuch]")
    settings = {"max_inflight": "1", "max_queue": "0", "models_file": str(declared)}
    with gateway_before(triton.options.url, **settings) as client:
        limited = Gateway(str(client.base_url), key="")
        assert limited.fails(1, "ready") == "not ready: nonesuch cannot be served"
        inputs = {NAMES.tensor("COUNT"): 10_000, NAMES.tensor("SECONDS"): 0.05}
        with client.stream(
            "POST", f"/v1/models/{quoted(TICKS)}/infer", json={"inputs": inputs},
            headers={"Accept": "application/x-ndjson"},
        ) as stream:  # fmt: skip
            lines = stream.iter_lines()  # the stream is closed with its iterator
            assert "outputs" in next(lines)
            refused = limited.run("infer", PAUSES, pauses, "--retries", "0")
            assert [record["code"] for record in records(refused.stdout)] == ["OVERLOADED"] * 3
            running = limited.start(
                "infer", PAUSES, pauses, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
            wait_until(lambda: refusals(client) >= 6)
        output, message = running.communicate(timeout=60)
        assert (running.returncode, len(records(output.decode()))) == (0, 3)
        again = re.search(r"3 succeeded, 0 failed, in (.*) s ", message.decode())
        assert again is not None, message
        assert float(again[1]) >= 1  # as Retry-After says
        running = limited.start(
            "infer", PAUSES, "-", "--retries", "1",
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        assert running.stdin is not None
        assert running.stdout is not None
        running.stdin.write(b"no number\n")
        running.stdin.flush()
        assert b"DOES_NOT_FIT_MODEL" in running.stdout.readline()
    # The gateway has ended.
    _, message = running.communicate(b"another line\n", timeout=60)
    assert running.returncode == 3
    sentence = f"at {limited.url}: Connection refused; 1 inputs are done "
    assert sentence in message.decode()


def refusals(client: httpx.Client) -> float:
    """Return the number of requests that were refused for lack of a slot."""
    page = client.get("/metrics").text
    (count,) = re.findall(r'^gateway_requests_shed_total\{reason="queue_full"\} (\S+)$', page, re.M)
    return float(count)


def test_command_that_fails_prints_one_sentence_and_has_its_exit_status(
    gateway: Gateway, tmp_path: Path, subtests: pytest.Subtests
) -> None:
    wrong_key = Gateway(gateway.url, "tgw_wrong")
    infer_key = Gateway(gateway.url, WEAK)
    no_key = Gateway(gateway.url, "")
    unreachable = f"http://127.0.0.1:{free_ports(1)[0]}"
    one = (TEXTS, "--text", "a")
    two = (NUMBERS, "--text", "a", "--batch", "2")
    table: list[tuple[Gateway, int, tuple[str | Path, ...], str]] = [
        (gateway, 2, ("infer", TEXTS, tmp_path / "nothing*.png"), "no such file or folder"),
        (gateway, 2, ("infer", TEXTS, "no/file"), "--text sends it as a text"),
        (gateway, 2, ("infer", TEXTS, "no file.PNG"), "--text sends it as a text"),
        (gateway, 2, ("infer", NUMBERS, "a word"), "is not a single text"),
        (gateway, 2, ("infer", TEXTS), "nothing to infer"),
        (gateway, 2, ("infer", *two), "has no batch dimension"),
        (gateway, 2, ("infer", *one, "--resume"), "--output FILE"),
        (gateway, 2, ("models", "--url", "ftp://there"), "is not a valid gateway URL"),
        (gateway, 3, ("infer", *one, "--url", unreachable), f"cannot reach the gateway at {unreachable}: "),
        (wrong_key, 4, ("infer", *one), "key"),
        (no_key, 4, ("models",), "use --key KEY"),
        (infer_key, 4, ("load", TEXTS), "admin"),
    ]  # fmt: skip
    with gateway_before(unreachable) as idle:
        table.append((Gateway(str(idle.base_url)), 1, ("ready",), "not ready: "))
        for caller, status, arguments, words in table:
            with subtests.test(words):
                sentence = caller.fails(status, *arguments)
                assert words in sentence
                assert "tgw_wrong" not in sentence


class OpenAIServer(BaseHTTPRequestHandler):
    """A server that lists models in another format."""

    def do_GET(self) -> None:
        body = b'{"object": "list", "data": []}' if self.path == "/v1/models" else b"[]"
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def test_server_that_is_not_a_gateway_is_named(gateway: Gateway) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), OpenAIServer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        for what, reason in (
            (
                "models",
                "the response of {} has no field 'models'; check that the URL is the gateway's",
            ),
            ("replicas", "the server at {} is not a gateway: its response is not a JSON object"),
        ):
            sentence = gateway.fails(3, what, "--url", url)
            assert sentence == reason.format(f"{url}/v1/{what}")
        server.shutdown()


def test_models_and_replicas_are_listed_as_tables_or_json(
    gateway: Gateway, triton: EmbeddedTriton
) -> None:
    assert re.search(rf"^{TEXTS} +ready +1 +1 ready$", gateway.run("models").stdout, re.MULTILINE)
    listed = json.loads(gateway.run("models", "--json").stdout)
    assert {model["name"] for model in listed if model["ready"]} == set(ALL)
    chosen = gateway.run("models", "--ready", "--filter", TEXTS[1:].upper(), "--json").stdout
    assert [model["name"] for model in json.loads(chosen)] == [TEXTS]
    address = f"127.0.0.1:{triton.options.http_port}"
    table = gateway.run("replicas").stdout
    assert re.search(rf"^{address} +ready +0 .* {len(ALL)} ready$", table, re.MULTILINE), table
    assert json.loads(gateway.run("replicas", "--json").stdout)[0]["address"] == address


def test_load_unload_and_ready_report_each_replica(
    gateway: Gateway, triton: EmbeddedTriton
) -> None:
    address = f"127.0.0.1:{triton.options.http_port}"
    unloaded = gateway.run("unload", NUMBERS)
    assert unloaded.returncode == 0
    assert re.search(rf"^{NUMBERS} +{address} +not loaded", unloaded.stdout, re.MULTILINE)
    listed = gateway.run("models").stdout
    assert re.search(rf"^{NUMBERS} +not loaded .* +unloaded by the API$", listed, re.MULTILINE)
    assert NUMBERS not in gateway.run("models", "--ready").stdout
    loaded = gateway.run("load", "nonesuch", NUMBERS, "--json")
    assert loaded.returncode == 1
    assert "failed to load 'nonesuch'" in loaded.stderr
    assert "triton-gateway models lists the models" in loaded.stderr
    (report,) = json.loads(loaded.stdout)
    assert report == {
        "model": NUMBERS, "state": "READY", "replicas": {address: {"state": "READY"}},
    }  # fmt: skip
    assert json.loads(gateway.run("ready", "--json").stdout)["ready"] is True


def test_curl_line_works_as_printed(gateway: Gateway) -> None:
    line = gateway.run("curl", TEXTS).stdout
    assert ADMIN not in line
    answer = subprocess.run(
        line, shell=True, env=gateway.environment, capture_output=True, timeout=60
    )
    assert value_of(json.loads(answer.stdout)) == "some text"


@pytest.mark.long
def test_bench_reports_each_level_as_table_or_json(gateway: Gateway) -> None:
    brief = ("--seconds", "0.1", "--concurrency", "1,3")
    ended = gateway.run("bench", TEXTS, *brief)
    assert ended.returncode == 0, ended.stderr
    assert re.search(r"^3 +\d+( +\d+\.\d){5} +0$", ended.stdout, re.MULTILINE)
    levels = json.loads(gateway.run("bench", TEXTS, "--text", "a", *brief, "--json").stdout)
    assert [level["concurrency"] for level in levels] == [1, 3]
    for level in levels:
        assert level["failed"] == 0 < level["requests"]
        assert 0 < level["p50_ms"] <= level["p99_ms"] <= level["max_ms"]
    assert "pass a FILE" in gateway.fails(2, "bench", IMAGES, *brief)


def seen_until(terminal: int, words: bytes) -> bytes:
    """Return the output of a terminal up to these words."""
    shown = b""

    def all_is_shown() -> bool:
        nonlocal shown
        if select.select([terminal], [], [], 0)[0]:
            shown += os.read(terminal, 65536)
        return words in shown

    wait_until(all_is_shown)
    return shown


def test_top_shows_the_fleet_in_a_terminal(gateway: Gateway) -> None:
    mine, its = pty.openpty()
    running = gateway.start("top", "--interval", "0.1", stdin=its, stdout=its, stderr=its)
    try:
        shown = seen_until(mine, TEXTS.encode())
        assert b"1/1 replicas up" in shown
        assert b"in flight" in shown
        running.send_signal(signal.SIGINT)
        seen_until(mine, b"\x1b[?1049l")  # the screen is as it was before
        assert running.wait(60) == 0
    finally:
        running.kill()
        running.wait()
        os.close(mine)
        os.close(its)
    assert TEXTS in gateway.run("top").stdout


def test_top_fits_80_columns_and_folds_models_without_requests() -> None:
    long_name = "a" * 30 + "-of-the-second-team"
    names = [long_name, *(f"model-{number}" for number in range(40))]
    models = [{"name": name, "ready": True, "versions": []} for name in names]
    replica = {
        "address": "10.11.12.13:8000", "state": "DOWN", "outstanding": 0,
        "models": dict.fromkeys(names, "READY"), "reason": "the replica cannot be reached",
    }  # fmt: skip
    gauges = {"in flight": 1.0, "waiting": 0.0}
    counts: Traffic = defaultdict(float, {REQUESTS: 20, ERRORS: 10})
    traffic: list[dict[str, Traffic]] = [{}, {long_name: counts}]
    before, now = (
        Snapshot(time_s, models, [replica], gauges, refusals, each)
        for time_s, refusals, each in zip((0, 2), (1, 9), traffic, strict=True)
    )
    console = Console(width=80)
    with console.capture() as captured:
        console.print(render_snapshot(now, before))
    lines = captured.get().splitlines()
    assert max(map(len, lines)) <= 80
    fleet = "0/1 replicas up, 10.0 requests/s, 5.0 errors/s, 1 in flight, 0 waiting, 4.0 refused/s"
    assert " ".join(map(str.strip, lines[:2])) == fleet
    assert re.search(
        r"^aaaaaaaaaaa…-second-team +ready +10\.0 +5\.0 ", captured.get(), re.MULTILINE
    )
    assert lines[-1].startswith("40 without requests: model-0, model-1, ")


def test_progress_is_shown_only_in_a_terminal(gateway: Gateway, tmp_path: Path) -> None:
    pause_files(tmp_path, [0.1] * 4)
    mine, its = pty.openpty()
    running = gateway.start("infer", PAUSES, tmp_path, stdout=subprocess.PIPE, stderr=its)
    try:
        seen_until(mine, b"/4")
        shown = seen_until(mine, b"4 succeeded, 0 failed")
        assert b"4 succeeded, 0 failed" in shown
        output, _ = running.communicate(timeout=60)
        assert len(records(output.decode())) == 4
    finally:
        running.kill()
        running.wait()
        os.close(mine)
        os.close(its)


async def numbers(count: int) -> AsyncIterator[int]:
    for number in range(count):
        yield number


async def test_tasks_keep_the_order_and_run_at_most_their_number_of_jobs() -> None:
    draw = random.Random(3)
    delays_s = [draw.choice((0, 0.001, 0.01)) for _ in range(300)]
    running = 0
    most = 0

    async def do(number: int) -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(delays_s[number])
        running -= 1
        return number

    tasks = run_ordered(do, numbers(300), 7)
    assert [number async for number in tasks] == list(range(300))
    assert most == 7


async def test_error_of_the_source_or_of_a_job_is_raised_in_its_turn() -> None:
    async def source() -> AsyncIterator[int]:
        yield 0
        raise OSError("the source")

    async def do(number: int) -> int:
        if number == 2:
            raise OSError("a job")
        return number

    for jobs, results, message in ((source(), [0], "the source"), (numbers(9), [0, 1], "a job")):
        tasks = run_ordered(do, jobs, 2)
        assert [await anext(tasks) for _ in results] == results
        with pytest.raises(OSError, match=message):
            await anext(tasks)
        await tasks.aclose()


@pytest.mark.long
def test_shell_completes_commands_and_names_of_models(gateway: Gateway) -> None:
    commands = {"up", "serve", "key", "infer", "models", "top", "bench"}
    assert commands <= set(complete("triton-gateway "))
    assert set(complete("triton-gateway describe ", **gateway.environment)) >= set(ALL)
    assert complete(f"triton-gateway infer {TEXTS[:-1]}", **gateway.environment) == [TEXTS]
    nobody = {"TRITON_GATEWAY_URL": "http://127.0.0.1:9"}
    words = f"triton-gateway load --url {gateway.url} --key {ADMIN} {TEXTS[:-1]}"
    assert complete(words, **nobody) == [TEXTS]
    # Without a gateway or a valid key there is nothing to complete, and no error.
    assert complete("triton-gateway describe ", **nobody) == []
    wrong_key = {"TRITON_GATEWAY_URL": gateway.url, "TRITON_GATEWAY_KEY": "tgw_wrong"}
    assert complete("triton-gateway describe ", **wrong_key) == []


def complete(words: str, **environment: str) -> list[str]:
    """Return what the shell offers after these words, without an error of the command."""
    question = {
        "_TRITON_GATEWAY_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(words.count(" ")),
    }
    ended = subprocess.run(
        command(),
        env={**os.environ, **question, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert not ended.stderr
    return ended.stdout.split()


def test_describe_prints_a_request_that_works(gateway: Gateway) -> None:
    ended = gateway.run("describe", NUMBERS)
    assert ended.returncode == 0, ended.stderr
    assert ADMIN not in ended.stdout
    lines = [line.split() for line in ended.stdout.splitlines()]
    assert ["model", NUMBERS] in lines
    assert ["state", "ready"] in lines
    assert any("FP32" in line for line in lines)
    request = subprocess.run(
        ["bash", "-c", ended.stdout.splitlines()[-1]],
        env={**os.environ, "TRITON_GATEWAY_KEY": ADMIN},
        capture_output=True,
        text=True,
    )
    assert json.loads(request.stdout)["model"] == NUMBERS
    described = json.loads(gateway.run("describe", NUMBERS, "--json").stdout)
    assert described["name"] == NUMBERS
    assert "not found" in gateway.fails(1, "describe", "nothing").lower()


def test_help_groups_the_commands_and_gives_examples() -> None:
    def show_help(*arguments: str) -> str:
        return run_gateway(*arguments, "--help").stdout

    text = show_help()
    titles = ["Start a gateway", "Use models", "Manage models and replicas", "Watch and diagnose"]
    places = [text.index(title) for title in titles]
    assert places == sorted(places)
    assert re.search(r"doctor +Check this machine", text[places[-1] :])
    for name in ("up", "serve", "infer", "bench", "describe", "push", "rm", "doctor"):
        text = show_help(name)
        assert re.search(rf"Examples:\s+(GATEWAY_\S+ )?triton-gateway {name}\b", text)
        assert "…" not in text  # no name of an option is cut
        assert max(map(len, text.splitlines())) <= 80


def test_first_words_lead_to_the_commands() -> None:
    assert "Start here:\n    triton-gateway up " in run_gateway("--help").stdout
    ended = run_gateway("modles")
    assert (ended.returncode, "Did you mean 'models'?" in ended.stderr) == (2, True)


@pytest.mark.long
@pytest.mark.parametrize(
    "arguments",
    [
        "--version",
        "--help",
        "up --help",
        "key create shop --file keys.yaml",
        "models --url http://127.0.0.1:9",
    ],
)
def test_command_that_serves_nothing_does_not_import_the_server(
    arguments: str, tmp_path: Path
) -> None:
    server = {"fastapi", "starlette", "grpc", "tritonclient", "numpy", "uvicorn"}
    program = (
        "import atexit, sys\n"
        "from gateway.__main__ import main\n"
        f"atexit.register(lambda: print('imported', *{server} & set(sys.modules), file=sys.stderr))\n"
        "main()"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program, *arguments.split()],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == (3 if "--url" in arguments else 0), ended
    assert arguments != "--version" or re.fullmatch(r"triton-gateway \d+\.\d+\.\d+\n", ended.stdout)
    assert ended.stderr.splitlines()[-1] == "imported"


def test_exit_statuses_are_all_documented() -> None:
    rows = re.findall(r"^\| (\d+) \| ", (ROOT / "docs/use/cli.md").read_text(), re.MULTILINE)
    family: list[type[errors.ClientError]] = [
        errors.ClientError,
        *errors.ClientError.__subclasses__(),
    ]
    assert {int(row) for row in rows} == {0, 130, 141, 143} | {error.status for error in family}
