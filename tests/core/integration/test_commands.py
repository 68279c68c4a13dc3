"""The commands that use a gateway, as processes, with the real gateway and the real tritonserver."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from gateway.client.many import run_ordered
from gateway.commands import bench, errors
from gateway.commands.flags import InferFlags
from gateway.commands.records import encode_text_record, resume_output
from gateway.commands.top import ERRORS, REQUESTS, Snapshot, Traffic, render_snapshot
from gateway.embedded.supervisor import EmbeddedTriton
from tests.support.gateway_forks import run_gateway
from tests.support.keys import entry, written
from tests.support.model_zoo.zoo import SHARED, Names, write_repository
from tests.support.servers import ROOT, gateway_before, triton_on_free_ports
from tests.support.terminal import call_in_terminal
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


DONE = b'{"input":"a","outputs":{}}\n'
FAILED = b'{"input":"b","error":"it was not there","code":"X"}\n'
# A file, and what stays of it; None: it cannot be resumed.
RESUMED: list[tuple[bytes, bytes | None]] = [
    (b"", b""),
    (DONE + FAILED + DONE, DONE + DONE),
    (DONE + FAILED[:-4], DONE),
    (DONE + DONE[:-1], DONE),
    (b"no record\n", None),
    (b"[]\n", None),
    (b'{"outputs":{}}\n', None),
]


@pytest.mark.parametrize(("content", "kept"), RESUMED)
def test_resume_keeps_the_records_of_inputs_that_succeeded(
    tmp_path: Path, content: bytes, kept: bytes | None
) -> None:
    (file := tmp_path / "out.jsonl").write_bytes(content)
    if kept is None:
        with pytest.raises(errors.UsageError, match="a line is not a record of infer"):
            resume_output(file)
    else:
        assert resume_output(file) == Counter({"a": kept.count(DONE)})
    assert file.read_bytes() == (content if kept is None else kept)
    assert [each.name for each in tmp_path.iterdir()] == ["out.jsonl"]


def test_output_file_is_continued_or_overwritten_if_this_is_said(
    gateway: Gateway, tmp_path: Path
) -> None:
    paths = text_files(tmp_path, 2)
    output = tmp_path / "out.jsonl"
    arguments: list[str | Path] = ["infer", TEXTS, *paths, paths[0], "--output", output]
    assert gateway.run(*arguments).returncode == 0
    lines = output.read_text().splitlines(keepends=True)
    assert lines[2] == lines[0]  # the same input
    output.write_text(lines[0])
    assert gateway.run(*arguments, "--resume").returncode == 0
    assert output.read_text() == "".join(lines)
    one = ("infer", TEXTS, paths[1], "--output", output)
    assert "--resume continues it" in gateway.fails(2, *one)
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


@pytest.mark.parametrize("waits_for", [["-"], ["pipe.txt"], ["pipe.txt", "--lines"]])
def test_infer_that_waits_for_an_input_ends_at_a_signal(
    gateway: Gateway, tmp_path: Path, waits_for: list[str]
) -> None:
    (tmp_path / "a.txt").write_text("a")
    os.mkfifo(tmp_path / "pipe.txt")
    inputs = [name if name.startswith("-") else tmp_path / name for name in ["a.txt", *waits_for]]
    pipe = subprocess.PIPE
    running = gateway.start("infer", TEXTS, *inputs, stdin=pipe, stdout=pipe, stderr=pipe)
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
    shown = call_in_terminal("infer", TEXTS, "what is this?", environment=gateway.environment)
    assert "1 succeeded" in shown
    assert "{" not in shown


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


NOWHERE = "http://127.0.0.1:9"
ADDRESS = r"127\.0\.0\.1:\d+"
# The key, a command, its exit status, and an expression for what it prints: an error as one sentence.
COMMANDS: list[tuple[str, tuple[str, ...], int, str]] = [
    (ADMIN, ("infer", TEXTS, "nothing*.png"), 2, "no such file or folder"),
    (ADMIN, ("infer", TEXTS, "no/file"), 2, "--text sends it as a text"),
    (ADMIN, ("infer", TEXTS, "no file.PNG"), 2, "--text sends it as a text"),
    (ADMIN, ("infer", NUMBERS, "a word"), 2, "is not a single text"),
    (ADMIN, ("infer", TEXTS), 2, "nothing to infer"),
    (ADMIN, ("infer", NUMBERS, "--text", "a", "--batch", "2"), 2, "has no batch dimension"),
    (ADMIN, ("infer", TICKS, "--text", "a", "--batch", "2"), 2, "returns any number of responses"),
    (ADMIN, ("infer", TEXTS, "--text", "a", "--resume"), 2, "--output FILE"),
    (ADMIN, ("models", "--url", "ftp://there"), 2, "is not a valid gateway URL"),
    (ADMIN, ("infer", TEXTS, "a", "--url", NOWHERE), 3, f"cannot reach the gateway at {NOWHERE}: "),
    ("tgw_wrong", ("infer", TEXTS, "--text", "a"), 4, "key"),
    ("", ("models",), 4, "use --key KEY"),
    (WEAK, ("load", TEXTS), 4, "admin"),
    (ADMIN, ("describe", "nothing"), 1, "(?i)not found"),
    (ADMIN, ("bench", IMAGES), 2, "pass a FILE"),
    (ADMIN, ("bench", TEXTS, "--concurrency", "1,x"), 2, "must be numbers up to 1024"),
    (ADMIN, ("replicas", "--json", "cordon", "a"), 2, "write --json after cordon"),
    (ADMIN, ("models",), 0, rf"(?m)^{TEXTS} +ready +1 +1 ready$"),
    (ADMIN, ("models", "--ready", "--filter", TEXTS[1:].upper()), 0, rf"^MODEL.*\n{TEXTS} .*\n$"),
    (ADMIN, ("replicas",), 0, rf"STATE +IN FLIGHT +.*\n{ADDRESS} +ready +\d+ .* {len(ALL)} ready\n$"),
    (ADMIN, ("ready",), 0, "^ready\n$"),
    (ADMIN, ("ready", "--json"), 0, '"ready": true'),
    (ADMIN, ("infer", TEXTS, "what is this?", "--format", "text"), 0, r"text:1\n  \S+  what is this\?\n"),
    (ADMIN, ("infer", TEXTS, "--text=-x", "--text=a\nb", "--batch=2"), 0, r'"-x"}}\n.*"a\\nb"}}\n$'),
    (ADMIN, ("curl", TEXTS), 0, r'^curl .* -H "Authorization: Bearer \$TRITON_GATEWAY_KEY"\n$'),
    (ADMIN, ("describe", NUMBERS), 0, rf"(?s)^model +{NUMBERS}\nstate +ready\n.* FP32 .*\ntry it\ncurl"),
    (ADMIN, ("top",), 0, rf"(?s)^1/1 replicas up.* in flight.* without requests: .*{TEXTS}"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(COMMANDS)))
def test_command_prints_what_it_says_or_one_sentence(gateway: Gateway, number: int) -> None:
    key, arguments, status, words = COMMANDS[number]
    caller = Gateway(gateway.url, key)
    if status:
        shown = caller.fails(status, *arguments)
    else:
        ended = caller.run(*arguments)
        assert ended.returncode == 0, ended.stderr
        shown = ended.stdout
    assert re.search(words, shown), shown
    assert not key or key not in shown


def test_gateway_that_is_not_ready_fails_the_command() -> None:
    with gateway_before(NOWHERE) as idle:
        sentence = Gateway(str(idle.base_url), "").fails(1, "ready")
    assert sentence.startswith("not ready: 127.0.0.1:9 is down: ")


def test_request_as_printed_works(gateway: Gateway) -> None:
    """Of `curl` and of `describe`, in a shell with the key."""
    for model, value in ((TEXTS, "some text"), (NUMBERS, [0.5, 0.5])):
        line = gateway.run("describe", model).stdout.splitlines()[-1]
        assert line == gateway.run("curl", model).stdout.rstrip()
        environment = {**os.environ, "TRITON_GATEWAY_KEY": ADMIN}
        answer = subprocess.run(["bash", "-c", line], env=environment, capture_output=True)
        assert value_of(json.loads(answer.stdout)) == value


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


TEXT_INPUT = {"name": "T", "datatype": "BYTES", "example": "a text"}
NUMBER_INPUT = {"name": "N", "datatype": "FP32", "example": "[1, 2]"}
IMAGE_INPUT = {"name": "I", "datatype": "UINT8", "example": "data:image/png;base64,AA=="}
WITHOUT = {"name": "W", "datatype": "FP32"}
CURL = "curl -s -d 'some text' -H 'Content-Type: text/plain' http://gateway/v1/models/m/infer"
# The inputs of a model, and the body that is measured without a file.
EXAMPLES: list[tuple[list[dict[str, Any]], bytes]] = [
    ([TEXT_INPUT, NUMBER_INPUT], b'{"inputs": {"T": "a text", "N": [1, 2]}}'),
    (
        [IMAGE_INPUT, {**WITHOUT, "optional": True}],
        b'{"inputs": {"I": {"b64": "data:image/png;base64,AA=="}}}',
    ),
    ([TEXT_INPUT, WITHOUT], b"some text"),
    ([], b"some text"),
]


@pytest.mark.parametrize(("inputs", "body"), EXAMPLES)
def test_bench_sends_the_example_of_the_model(inputs: list[dict[str, Any]], body: bytes) -> None:
    assert bench.build_example({"inputs": inputs, "curl": CURL}).content == body


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


@contextmanager
def in_terminal(gateway: Gateway, *arguments: str | Path) -> Iterator[tuple[Any, int]]:
    """Yield the process of a command, and the terminal to which it writes."""
    mine, its = pty.openpty()
    running = gateway.start(*arguments, stdin=its, stdout=its, stderr=its)
    try:
        yield running, mine
    finally:
        running.kill()
        running.wait()
        os.close(mine)
        os.close(its)


def test_top_shows_the_fleet_in_a_terminal_until_ctrl_c(gateway: Gateway) -> None:
    with in_terminal(gateway, "top", "--interval", "0.1") as (running, terminal):
        assert b"1/1 replicas up" in seen_until(terminal, TEXTS.encode())
        running.send_signal(signal.SIGINT)
        seen_until(terminal, b"\x1b[?1049l")  # the screen is as it was before
        assert running.wait(60) == 0


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


def test_progress_is_shown_in_a_terminal(gateway: Gateway, tmp_path: Path) -> None:
    (tmp_path / "pause.json").write_text('{"inputs": 0.3}')
    output = tmp_path / "out.jsonl"
    arguments = ("infer", PAUSES, tmp_path / "pause.json", "--output", output)
    with in_terminal(gateway, *arguments) as (running, terminal):
        seen_until(terminal, b"0/1")
        seen_until(terminal, b"1 succeeded, 0 failed")
        assert running.wait(60) == 0
    assert len(records(output.read_text())) == 1


async def test_tasks_keep_the_order_and_run_at_most_their_number_of_jobs() -> None:
    running = 0
    most = 0

    async def numbers(count: int) -> AsyncIterator[int]:
        for number in range(count):
            yield number
        raise OSError("the source")

    async def do(number: int) -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep((0, 0.001, 0.01)[number * 7 % 3])
        running -= 1
        if number == 150:
            raise OSError("a job")
        return number

    for count, message in ((100, "the source"), (300, "a job")):
        tasks = run_ordered(do, numbers(count), 7)
        expected = range(min(count, 150))
        assert [await anext(tasks) for _ in expected] == [*expected]
        with pytest.raises(OSError, match=message):
            await anext(tasks)
        assert most == 7


@pytest.mark.long
def test_shell_completes_commands_and_names_of_models(gateway: Gateway) -> None:
    nobody = {"TRITON_GATEWAY_URL": NOWHERE}
    flags = f"--url {gateway.url} --key {ADMIN}"
    for words, environment, offered in (
        ("", nobody, {"up", "serve", "key", "infer", "models", "top", "bench"}),
        ("describe ", gateway.environment, set(ALL)),
        (f"infer {TEXTS[:-1]}", gateway.environment, {TEXTS}),
        (f"load {flags} {TEXTS[:-1]}", nobody, {TEXTS}),
    ):
        assert offered <= complete(words, environment)
    # Without a gateway or a valid key there is nothing to complete, and no error.
    wrong_key = {"TRITON_GATEWAY_URL": gateway.url, "TRITON_GATEWAY_KEY": "tgw_wrong"}
    for environment in (nobody, wrong_key):
        assert complete("describe ", environment) == set()


def complete(words: str, environment: Mapping[str, str]) -> set[str]:
    """Return what the shell offers after these words, without an error of the command."""
    question = {
        "_TRITON_GATEWAY_COMPLETE": "complete_bash",
        "COMP_WORDS": f"triton-gateway {words}",
        "COMP_CWORD": str(words.count(" ") + 1),
    }
    ended = subprocess.run(
        command(), env={**os.environ, **question, **environment}, capture_output=True, text=True
    )
    assert not ended.stderr
    return set(ended.stdout.split())


def test_help_groups_the_commands_fits_80_columns_and_gives_examples() -> None:
    text = run_gateway("--help").stdout
    titles = ["Start a gateway", "Use models", "Manage models and replicas", "Watch and diagnose"]
    places = [text.index(title) for title in [*titles, " Check this machine"]]
    assert places == sorted(places)
    assert "Start here:\n    triton-gateway up " in text
    for name in ("up", "serve", "infer", "bench", "describe", "push", "rm", "doctor"):
        text = run_gateway(name, "--help").stdout
        assert re.search(rf"Examples:\s+(GATEWAY_\S+ )?triton-gateway {name}\b", text)
        assert max(map(len, text.splitlines())) <= 80
    options = run_gateway("infer", "--help").stdout
    for name in signature(InferFlags).parameters:
        assert f"--{name.removeprefix('is_').replace('_', '-')} " in options  # none is cut
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
