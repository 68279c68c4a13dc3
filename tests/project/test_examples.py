"""The example models on one real tritonserver: what their READMEs print, and how they behave."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import pytest
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from gateway.embedded.options import LOAD_ALL, CannotStart
from gateway.embedded.supervisor import EmbeddedTriton
from tests.capabilities.grpc_api.support.grpc_gateway import grpc_gateway
from tests.support.documents import (
    COMPLETIONS,
    LANGUAGE_MODELS,
    READMES,
    assert_prints,
    assert_prints_its_comment,
    examples,
    matches,
    python_programs,
)
from tests.support.servers import ROOT, gateway_before, triton_on_free_ports, triton_with
from tests.support.wait import wait_until

REPOSITORY = ROOT / "triton_repo_examples"
MODELS = sorted(folder.name for folder in REPOSITORY.iterdir())
PAGE = LANGUAGE_MODELS
EVENTS, LINES = "text/event-stream", "application/x-ndjson"
TEXT = {"Content-Type": "text/plain"}
MANY_STEPS = 931386509544713451  # needs 2,283: more than any other number below 10¹⁸
# Requests whose responses take minutes.
LONG_COUNT = {"inputs": {"FROM": 9000, "SECONDS": 0.1}}
LONG_TEXT = {"text_input": "the sea", "max_tokens": 58, "stream": True}
GIVES_UP = 28  # curl's status when its `-m` is over
ERRORS = re.findall(
    r"^\| `(\w+)` \| (\d{3}) \| `(\w+)` \|$",
    (REPOSITORY / "errors/README.md").read_text(),
    re.MULTILINE,
)


class Log:
    """The lines that Triton writes."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def add(self, line: str) -> None:
        self.lines.append(line)

    def wait_for(self, words: str, skip: int) -> None:
        """Wait for these words in a line after the first `skip`."""
        wait_until(lambda: any(words in line for line in self.lines[skip:]))


@pytest.fixture(scope="module")
def log() -> Log:
    return Log()


@pytest.fixture(scope="module")
def triton(log: Log, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedTriton]:
    """A Triton with all examples, and one that takes a while for each token."""
    assert (REPOSITORY / "own_env/python_env/.ready").exists(), "run `make examples` first"
    folder = tmp_path_factory.mktemp("examples")
    shutil.copytree(REPOSITORY / "tokens", folder / "slow_tokens")
    config = folder / "slow_tokens" / "config.pbtxt"
    slow = config.read_text().replace('"tokens"', '"slow_tokens"').replace('"0.05"', '"0.75"')
    config.write_text(slow)
    # The log is verbose from the start, and reduced until a test needs it.
    with triton_with((REPOSITORY, folder), (LOAD_ALL,), (), log_verbose=1, say=log.add) as triton:
        log_requests(triton, False)
        yield triton


def log_requests(triton: EmbeddedTriton, wanted: bool) -> None:
    """Set whether Triton's log has a line for each step of each request."""
    url = f"http://{triton.options.address}/v2/logging"
    httpx.post(url, json={"log_verbose_level": int(wanted)}, timeout=60).raise_for_status()


@pytest.fixture(scope="module")
def client(triton: EmbeddedTriton) -> Iterator[httpx.Client]:
    with gateway_before(triton.options.url) as client:
        yield client


def infer(client: httpx.Client, model: str, inputs: Any, **parameters: Any) -> Any:
    """The outputs, or the only one."""
    body = {"inputs": inputs, "parameters": parameters}
    answer = client.post(f"/v1/models/{model}/infer", json=body)
    assert answer.status_code == 200, answer.text
    outputs = answer.json()["outputs"]
    return next(iter(outputs.values())) if len(outputs) == 1 else outputs


@pytest.mark.long
@pytest.mark.parametrize("readme", READMES, ids=lambda readme: readme.parent.name)
def test_commands_of_a_readme_print_what_it_says(client: httpx.Client, readme: Path) -> None:
    """The commands run in their order, because some depend on earlier ones."""
    commands = list(examples([readme]))
    assert commands
    for _, command, answer in commands:
        words = shlex.split(
            command.replace("http://127.0.0.1:8080", str(client.base_url).rstrip("/"))
        )
        assert words[0] == "curl"
        run = subprocess.run(words, capture_output=True, text=True, timeout=60)
        assert run.returncode == (GIVES_UP if "-m" in words else 0), run.stderr
        assert matches(answer, run.stdout.strip()), run.stdout


@pytest.mark.long
def test_commands_and_program_for_language_models_print_what_the_document_says(
    client: httpx.Client, triton: EmbeddedTriton
) -> None:
    commands = [each for each in examples([PAGE]) if COMPLETIONS not in each[1]]
    assert len(commands) == 3
    for _, command, answer in commands:
        assert_prints(client, command, answer)
    (program,) = python_programs(PAGE)
    with grpc_gateway(triton.options.url) as gateway:
        source = program.replace("localhost:8001", gateway.address)
        assert_prints_its_comment(gateway.http, "Python", source)


def test_every_model_has_a_readme_a_row_in_the_overview_and_a_valid_config() -> None:
    overview = (ROOT / "docs/serve/bring-your-model.md").read_text()
    assert sorted(re.findall(r"^\| \[(\w+)\]\(", overview, re.MULTILINE)) == MODELS
    assert [readme.parent.name for readme in READMES] == MODELS
    names = []
    for path in REPOSITORY.glob("*/**/*.pbtxt"):
        config = text_format.Parse(path.read_text(), ModelConfig())
        assert (config.name, config.backend) == (path.relative_to(REPOSITORY).parts[0], "python")
        names.append(config.name)
    assert sorted([*names, "auto_config"]) == MODELS


@pytest.mark.long
def test_errors_of_a_model_have_the_statuses_of_its_readme(client: httpx.Client) -> None:
    answer = client.post("/v1/models/errors/infer", content="which", headers=TEXT)
    named = set(re.findall(r"[A-Z_]{4,}", answer.json()["error"])) - {"CODE"}
    assert named == {error for error, _, _ in ERRORS}
    assert len(named) == 9
    for error, status, code in ERRORS:
        answer = client.post("/v1/models/errors/infer", content=error, headers=TEXT)
        assert (answer.status_code, answer.json()["code"]) == (int(status), code)
        streamed = client.post(
            "/v1/models/errors/infer", content=error, headers={**TEXT, "Accept": EVENTS}
        )
        expected = (500, "MODEL_FAULT") if error == "RAISE" else (422, "REFUSED_BY_MODEL")
        assert (streamed.status_code, streamed.json()["code"]) == expected


@pytest.mark.long
@pytest.mark.parametrize(
    ("path", "accept", "body"),
    [
        ("/v1/models/countdown/infer", EVENTS, LONG_COUNT),
        ("/v1/models/countdown/infer", LINES, LONG_COUNT),
        ("/v1/models/slow_tokens/infer", EVENTS, {"inputs": LONG_TEXT}),
        ("/v2/models/slow_tokens/generate_stream", EVENTS, LONG_TEXT),
    ],
    ids=["events", "lines", "text as events", "generate_stream"],
)
def test_streamed_responses_arrive_as_they_are_made(
    client: httpx.Client, path: str, accept: str, body: object
) -> None:
    """The client would not wait until all are made: of the text that takes 43 s."""
    headers = {"Accept": accept}
    with client.stream("POST", path, json=body, headers=headers, timeout=20) as answer:
        lines = (line for line in answer.iter_lines() if '"model' in line)
        assert len(list(islice(lines, 2))) == 2


@pytest.mark.long
def test_one_instance_serves_many_streams_concurrently(client: httpx.Client) -> None:
    """Beside counts that take a quarter of an hour, and are given up then."""
    url, headers = "/v1/models/countdown/infer", {"Accept": LINES}

    def count(_: int) -> list[int]:
        body = {"inputs": {"FROM": 3, "SECONDS": 0.1}}
        answer = client.post(url, json=body, headers=headers)
        return [json.loads(line)["outputs"]["NUMBER"][0] for line in answer.text.splitlines()]

    with ExitStack() as stack:
        streams = []
        for _ in range(5):
            answer = client.stream("POST", url, json=LONG_COUNT, headers=headers)
            streams.append(stack.enter_context(answer).iter_lines())
            assert json.loads(next(streams[-1]))["outputs"]["NUMBER"] == [9000]
        with ThreadPoolExecutor(5) as pool:
            assert list(pool.map(count, range(5))) == [[3, 2, 1, 0]] * 5
        for lines in streams:
            assert json.loads(next(lines))["outputs"]["NUMBER"] == [8999]


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "inputs", "accept"),
    [
        ("countdown", LONG_COUNT["inputs"], EVENTS),
        ("cancellable", [9000], EVENTS),
        ("cancellable", [9000], "application/json"),
    ],
)
def test_disconnected_client_cancels_the_inference(
    client: httpx.Client, triton: EmbeddedTriton, log: Log, model: str, inputs: object, accept: str
) -> None:
    """The log says that an inference of minutes began, and that it was cancelled."""
    body = json.dumps({"inputs": inputs}).encode()
    head = (
        f"POST /v1/models/{model}/infer HTTP/1.1\r\nHost: x\r\nAccept: {accept}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    skip = len(log.lines)
    url = client.base_url
    log_requests(triton, True)
    with socket.create_connection((url.host, url.port or 80), 60) as connection:
        connection.sendall(head.encode() + body)
        log.wait_for(f"model {model}, instance {model}_0, executing 1 requests", skip)
    log_requests(triton, False)
    log.wait_for(f"{model}: cancelled", skip)


@pytest.mark.long
def test_two_sequences_have_separate_states(client: httpx.Client) -> None:
    def add(sequence: int, value: int, **parameters: bool) -> Any:
        return infer(client, "counter", value, sequence_id=sequence, **parameters)

    totals = [add(101, 1, sequence_start=True), add(202, 10, sequence_start=True)]
    totals += [add(101, 1), add(202, 10), add(202, 10, sequence_end=True)]
    totals += [add(101, 1, sequence_end=True)]
    assert totals == [1, 10, 2, 20, 30, 3]
    assert add(101, 5, sequence_start=True, sequence_end=True) == 5
    ended = {"inputs": 1, "parameters": {"sequence_id": 101}}
    answer = client.post("/v1/models/counter/infer", json=ended)
    assert (answer.status_code, answer.json()["code"]) == (409, "SEQUENCE_NOT_RUNNING")


@pytest.mark.long
def test_short_request_overtakes_long_ones_in_shared_executions(
    client: httpx.Client,
) -> None:
    def executions() -> float:
        page = client.get("/metrics").text
        found = re.search(r'nv_inference_exec_count\{.*model="reschedule".*\} (\d+)', page)
        return float(found[1]) if found else 0

    def overtakes_and_shares() -> bool:
        """Return whether the short one was answered first, and the long ones shared executions."""
        before = executions()
        with ThreadPoolExecutor(4) as pool:
            long = [pool.submit(infer, client, "reschedule", MANY_STEPS) for _ in range(4)]
            wait_until(lambda: executions() > before)
            assert infer(client, "reschedule", 6) == 8
            overtook = not any(request.done() for request in long)
            assert [request.result() for request in long] == [2283] * 4
        return overtook and executions() - before < 4 * 2283

    # The long ones may be done before the short one is sent, or one after the other, on a busy machine.
    assert any(overtakes_and_shares() for _ in range(10))


@pytest.mark.long
def test_each_request_of_a_batch_gets_its_own_rows(client: httpx.Client) -> None:
    texts = [[f"{letter}{number}" for number in range(1 + number % 3)]
             for number, letter in enumerate("abcdefgh")]  # fmt: skip
    with ThreadPoolExecutor(8) as pool:
        raised = list(pool.map(lambda rows: infer(client, "upper", rows), texts))
    assert raised == [[text.upper() for text in rows] for rows in texts]


@pytest.mark.long
def test_named_version_answers_or_else_the_latest(client: httpx.Client) -> None:
    answers = {
        path: client.post(f"/v1/models/versions{path}/infer", content="Ada", headers=TEXT)
        for path in ("", "/versions/1", "/versions/2", "/versions/3")
    }
    assert [answer.status_code for answer in answers.values()] == [200, 200, 200, 404]
    greetings = [answer.json()["outputs"]["GREETING"] for answer in list(answers.values())[:3]]
    assert greetings == [["Welcome, Ada!"], ["Hello, Ada!"], ["Welcome, Ada!"]]
    assert client.get("/v1/models/versions").json()["versions"] == ["1", "2"]


@pytest.mark.long
def test_model_finalizes_when_it_is_unloaded(client: httpx.Client, log: Log) -> None:
    skip = len(log.lines)
    assert client.post("/v2/repository/models/add/unload").status_code == 200
    log.wait_for("add: finalized", skip)
    assert client.post("/v2/repository/models/add/load").status_code == 200
    assert infer(client, "add", {"INPUT0": [1] * 4, "INPUT1": [2] * 4}) == [3] * 4


@pytest.mark.long
def test_missing_environment_is_reported_in_the_words_of_the_readme(tmp_path: Path) -> None:
    model = REPOSITORY / "own_env"
    shutil.copytree(model, tmp_path / "own_env", ignore=shutil.ignore_patterns("python_env"))
    with pytest.raises(CannotStart) as raised, triton_on_free_ports(tmp_path, auto_complete=True):
        pass
    (words,) = re.findall(r"Where Triton says `(.*?)`", (model / "README.md").read_text())
    assert words in str(raised.value)
