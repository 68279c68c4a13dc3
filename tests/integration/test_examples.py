"""The example models on one real tritonserver: what their READMEs print, and how they behave."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from gateway.triton.embedded import CannotStart, EmbeddedTriton
from tests.support.documents import READMES, examples, matches
from tests.support.servers import ROOT, gateway_before, triton_on_free_ports
from tests.support.wait import wait_until

REPOSITORY = ROOT / "triton_repo_examples"
MODELS = sorted(folder.name for folder in REPOSITORY.iterdir())
EVENTS, LINES = "text/event-stream", "application/x-ndjson"
TEXT = {"Content-Type": "text/plain"}
GIVES_UP = 28  # curl's status when its `-m` is over
ERRORS = re.findall(
    r"^\| `(\w+)` \| (\d{3}) \| `(\w+)` \|$",
    (REPOSITORY / "errors/README.md").read_text(),
    re.MULTILINE,
)


class Log:
    """What Triton says, and when."""

    def __init__(self) -> None:
        self.lines: list[tuple[float, str]] = []

    def hear(self, line: str) -> None:
        self.lines.append((time.time(), line))

    def wait_for(self, words: str, since: float) -> float:
        """When it first said these words."""
        heard: list[float] = []

        def said() -> bool:
            heard.extend(when for when, line in self.lines if when >= since and words in line)
            return bool(heard)

        wait_until(said)
        return heard[0]


@pytest.fixture(scope="module")
def log() -> Log:
    return Log()


@pytest.fixture(scope="module")
def triton(log: Log) -> Iterator[EmbeddedTriton]:
    assert (REPOSITORY / "own_env/python_env/.ready").exists(), "run `make examples` first"
    with triton_on_free_ports(REPOSITORY, auto_complete=True, say=log.hear) as triton:
        yield triton


@pytest.fixture(scope="module")
def client(triton: EmbeddedTriton) -> Iterator[httpx.Client]:
    with gateway_before(triton.options.url) as client:
        yield client


def asked(client: httpx.Client, model: str, inputs: Any, **parameters: Any) -> Any:
    """The outputs, or the only one."""
    body = {"inputs": inputs, "parameters": parameters}
    answer = client.post(f"/v1/models/{model}/infer", json=body)
    assert answer.status_code == 200, answer.text
    outputs = answer.json()["outputs"]
    return next(iter(outputs.values())) if len(outputs) == 1 else outputs


@pytest.mark.parametrize("readme", READMES, ids=lambda readme: readme.parent.name)
def test_a_readme_prints_what_it_says(client: httpx.Client, readme: Path) -> None:
    """In their order: they may build on one another."""
    commands = list(examples([readme]))
    assert commands
    for _, command, answer in commands:
        words = shlex.split(
            command.replace("http://127.0.0.1:8080", str(client.base_url).rstrip("/"))
        )
        assert words[0] == "curl"
        run = subprocess.run(words, capture_output=True, text=True, timeout=30)
        assert run.returncode == (GIVES_UP if "-m" in words else 0), run.stderr
        assert matches(answer, run.stdout.strip()), run.stdout


def test_every_model_has_a_readme_and_a_row_in_the_overview() -> None:
    overview = (ROOT / "docs/examples.md").read_text()
    assert sorted(re.findall(r"^\| \[(\w+)\]\(", overview, re.MULTILINE)) == MODELS
    assert [readme.parent.name for readme in READMES] == MODELS


def test_every_config_is_one_that_the_official_image_reads() -> None:
    read = []
    for path in REPOSITORY.glob("*/**/*.pbtxt"):
        config = text_format.Parse(path.read_text(), ModelConfig())
        assert (config.name, config.backend) == (path.relative_to(REPOSITORY).parts[0], "python")
        read.append(config.name)
    assert sorted([*read, "auto_config"]) == MODELS


@pytest.mark.parametrize(("error", "status", "code"), ERRORS)
def test_an_error_of_a_model_becomes_the_status_that_the_readme_says(
    client: httpx.Client, error: str, status: str, code: str
) -> None:
    answer = client.post("/v1/models/errors/infer", content=error, headers=TEXT)
    assert (answer.status_code, answer.json()["code"]) == (int(status), code)
    streamed = client.post(
        "/v1/models/errors/infer", content=error, headers={**TEXT, "Accept": EVENTS}
    )
    expected = (500, "MODEL_FAULT") if error == "RAISE" else (422, "REFUSED_BY_MODEL")
    assert (streamed.status_code, streamed.json()["code"]) == expected


def test_the_readme_says_it_of_every_error_there_is(client: httpx.Client) -> None:
    answer = client.post("/v1/models/errors/infer", content="which", headers=TEXT)
    named = set(re.findall(r"[A-Z_]{4,}", answer.json()["error"])) - {"CODE"}
    assert len(named) == 9
    assert named == {error for error, _, _ in ERRORS}


@pytest.mark.parametrize(
    ("path", "accept", "body"),
    [
        ("/v1/models/countdown/infer", EVENTS, {"inputs": {"FROM": 4, "SECONDS": 0.1}}),
        ("/v1/models/countdown/infer", LINES, {"inputs": {"FROM": 4, "SECONDS": 0.1}}),
        ("/v1/models/tokens/infer", EVENTS, {"inputs": {"text_input": "the", "stream": True}}),
        ("/v2/models/tokens/generate_stream", EVENTS, {"text_input": "the", "stream": True}),
    ],
    ids=["events", "lines", "text as events", "generate_stream"],
)
def test_answers_arrive_as_they_are_made(
    client: httpx.Client, path: str, accept: str, body: object
) -> None:
    with client.stream("POST", path, json=body, headers={"Accept": accept}) as answer:
        arrived = [time.perf_counter() for line in answer.iter_lines() if '"model' in line]
    assert len(arrived) >= 5
    made_within_s = 0.05 * len(arrived) if "tokens" in path else 0.1 * len(arrived)
    assert arrived[-1] - arrived[0] > made_within_s / 2


def test_one_instance_counts_for_many_at_the_same_time(client: httpx.Client) -> None:
    def count(_: int) -> list[int]:
        headers = {"Accept": LINES}
        body = {"inputs": {"FROM": 3, "SECONDS": 0.3}}
        answer = client.post("/v1/models/countdown/infer", json=body, headers=headers)
        return [json.loads(line)["outputs"]["NUMBER"][0] for line in answer.text.splitlines()]

    began = time.perf_counter()
    with ThreadPoolExecutor(5) as pool:
        counted = list(pool.map(count, range(5)))
    assert counted == [[3, 2, 1, 0]] * 5
    assert time.perf_counter() - began < 5 * 0.9 / 2


@pytest.mark.parametrize(
    ("model", "inputs", "accept"),
    [
        ("countdown", {"FROM": 100, "SECONDS": 0.1}, EVENTS),
        ("cancellable", [100], EVENTS),
        ("cancellable", [100], "application/json"),
    ],
)
def test_who_leaves_ends_the_work_within_half_a_second(
    client: httpx.Client, log: Log, model: str, inputs: object, accept: str
) -> None:
    body = json.dumps({"inputs": inputs}).encode()
    head = (
        f"POST /v1/models/{model}/infer HTTP/1.1\r\nHost: x\r\nAccept: {accept}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    began = time.time()
    with socket.create_connection((client.base_url.host, client.base_url.port), 10) as connection:
        connection.sendall(head.encode() + body)
        time.sleep(0.3)  # so that it is at work
    left = time.time()
    seen = log.wait_for(f"{model}: cancelled", began)
    print(f"seen by {model} after {seen - left:.2f} s")
    assert 0 < seen - left < 0.5


def test_two_sequences_do_not_mix(client: httpx.Client) -> None:
    def add(sequence: int, value: int, **parameters: bool) -> Any:
        return asked(client, "counter", value, sequence_id=sequence, **parameters)

    totals = [add(101, 1, sequence_start=True), add(202, 10, sequence_start=True)]
    totals += [add(101, 1), add(202, 10), add(202, 10, sequence_end=True)]
    totals += [add(101, 1, sequence_end=True)]
    assert totals == [1, 10, 2, 20, 30, 3]
    assert add(101, 5, sequence_start=True, sequence_end=True) == 5
    ended = {"inputs": 1, "parameters": {"sequence_id": 101}}
    answer = client.post("/v1/models/counter/infer", json=ended)
    assert (answer.status_code, answer.json()["code"]) == (409, "SEQUENCE_NOT_RUNNING")


def test_a_short_request_does_not_wait_for_the_long_ones_that_it_shares_executions_with(
    client: httpx.Client,
) -> None:
    def executions() -> float:
        page = client.get("/metrics").text
        found = re.search(r'nv_inference_exec_count\{.*model="reschedule".*\} (\d+)', page)
        return float(found[1]) if found else 0

    before = executions()
    with ThreadPoolExecutor(4) as pool:
        long = [pool.submit(asked, client, "reschedule", 931386509544713451) for _ in range(4)]
        wait_until(lambda: executions() > before)
        assert asked(client, "reschedule", 6) == 8
        assert not any(request.done() for request in long)
        assert [request.result() for request in long] == [2283] * 4
    assert executions() - before < 3 * 2284


def test_each_request_of_a_batch_gets_its_own_rows(client: httpx.Client) -> None:
    texts = [[f"{letter}{number}" for number in range(1 + number % 3)]
             for number, letter in enumerate("abcdefgh")]  # fmt: skip
    with ThreadPoolExecutor(8) as pool:
        raised = list(pool.map(lambda rows: asked(client, "upper", rows), texts))
    assert raised == [[text.upper() for text in rows] for rows in texts]


def test_a_version_that_is_named_answers_and_the_latest_if_none_is(client: httpx.Client) -> None:
    answers = {
        path: client.post(f"/v1/models/versions{path}/infer", content="Ada", headers=TEXT)
        for path in ("", "/versions/1", "/versions/2", "/versions/3")
    }
    assert [answer.status_code for answer in answers.values()] == [200, 200, 200, 404]
    greetings = [answer.json()["outputs"]["GREETING"] for answer in list(answers.values())[:3]]
    assert greetings == [["Welcome, Ada!"], ["Hello, Ada!"], ["Welcome, Ada!"]]
    assert client.get("/v1/models/versions").json()["versions"] == ["1", "2"]


def test_a_model_finalizes_when_it_is_unloaded(client: httpx.Client, log: Log) -> None:
    began = time.time()
    assert client.post("/v2/repository/models/add/unload").status_code == 200
    log.wait_for("add: finalized", began)
    assert client.post("/v2/repository/models/add/load").status_code == 200
    assert asked(client, "add", {"INPUT0": [1] * 4, "INPUT1": [2] * 4}) == [3] * 4


def test_a_missing_environment_is_said_in_the_words_of_the_readme(tmp_path: Path) -> None:
    model = REPOSITORY / "own_env"
    shutil.copytree(model, tmp_path / "own_env", ignore=shutil.ignore_patterns("python_env"))
    with pytest.raises(CannotStart) as raised, triton_on_free_ports(tmp_path, auto_complete=True):
        pass
    (words,) = re.findall(r"Where Triton says `(.*?)`", (model / "README.md").read_text())
    assert words in str(raised.value)
