"""The example models on one real tritonserver: what their READMEs print, and how they behave."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

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
    read_all,
)
from tests.support.servers import ROOT, gateway_before, triton_on_free_ports, triton_with

REPOSITORY = ROOT / "triton_repo_examples"
MODELS = sorted(folder.name for folder in REPOSITORY.iterdir())
TEXT = {"Content-Type": "text/plain"}
GIVES_UP = 28  # curl's status when its `-m` is over
ERRORS = re.findall(
    r"^\| `(\w+)` \| (\d{3}) \| `(\w+)` \|$",
    (REPOSITORY / "errors/README.md").read_text(),
    re.MULTILINE,
)


@pytest.fixture(scope="module")
def triton() -> Iterator[EmbeddedTriton]:
    """A Triton with all examples."""
    assert (REPOSITORY / "own_env/python_env/.ready").exists(), "run `make examples` first"
    with triton_with((REPOSITORY,), (LOAD_ALL,), ()) as triton:
        yield triton


@pytest.fixture(scope="module")
def client(triton: EmbeddedTriton) -> Iterator[httpx.Client]:
    with gateway_before(triton.options.url) as client:
        yield client


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
def test_commands_for_language_models_print_what_the_page_says(
    client: httpx.Client, triton: EmbeddedTriton
) -> None:
    commands = [each for each in examples([LANGUAGE_MODELS]) if COMPLETIONS not in each[1]]
    assert commands
    for _, command, answer in commands:
        assert_prints(client, command, answer)
    (program,) = python_programs(LANGUAGE_MODELS)
    with grpc_gateway(triton.options.url) as gateway:
        source = program.replace("localhost:8001", gateway.address)
        assert_prints_its_comment(gateway.http, "Python", source)


def test_every_model_has_a_readme_and_a_valid_config() -> None:
    rows = re.findall(r"^\| \[(\w+)\]\([./]*/triton_repo_examples/", read_all(), re.MULTILINE)
    assert sorted(rows) == MODELS
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
            "/v1/models/errors/infer",
            content=error,
            headers={**TEXT, "Accept": "text/event-stream"},
        )
        expected = (500, "MODEL_FAULT") if error == "RAISE" else (422, "REFUSED_BY_MODEL")
        assert (streamed.status_code, streamed.json()["code"]) == expected


@pytest.mark.long
def test_missing_environment_is_reported_as_in_the_readme(tmp_path: Path) -> None:
    model = REPOSITORY / "own_env"
    shutil.copytree(model, tmp_path / "own_env", ignore=shutil.ignore_patterns("python_env"))
    with pytest.raises(CannotStart) as raised, triton_on_free_ports(tmp_path, auto_complete=True):
        pass
    (words,) = re.findall(r"Where Triton says `(.*?)`", (model / "README.md").read_text())
    assert words in str(raised.value)
