"""The recipes of docs/use/cookbook.md, before one Triton with the models that they need."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from tests.support.documents import (
    COOKBOOK,
    assert_prints,
    assert_prints_its_comment,
    examples,
    python_programs,
)
from tests.support.manifests import Manifests
from tests.support.nginx import run_nginx
from tests.support.servers import ROOT, free_ports, gateway_before, triton_with

LOADED = ("ensemble", "text_ensemble", "tokens")


def read_block(language: str) -> str:
    """Return the only block of this language that is not run as a program or a command."""
    (block,) = re.findall(rf"```{language}\n(.*?)```", COOKBOOK.read_text(), re.DOTALL)
    return str(block)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the programs find the files that they name, and write theirs."""
    place = tmp_path_factory.mktemp("cookbook")
    for name in ("docs", "triton_repo"):
        (place / name).symlink_to(ROOT / name)
    return place


@pytest.fixture(scope="module")
def kitchen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A gateway that accepts uploads, beside the models of the demonstration."""
    models = tmp_path_factory.mktemp("models")
    for path in (*(ROOT / "triton_repo").iterdir(), ROOT / "triton_repo_examples/tokens"):
        (models / path.name).symlink_to(path)
    with (
        triton_with((models,), LOADED, ()) as triton,
        gateway_before(
            triton.options.url, repository=f"file://{models}", model_uploads="artifacts"
        ) as client,
    ):
        yield client


@pytest.mark.long
def test_programs_print_their_comments(
    kitchen: httpx.Client, folder: Path, subtests: pytest.Subtests
) -> None:
    programs = python_programs(COOKBOOK)
    assert programs
    for number, program in enumerate(programs):
        with subtests.test(number=number):
            assert_prints_its_comment(kitchen, "Python", program, folder)


@pytest.mark.long
def test_commands_print_what_the_recipes_say(
    kitchen: httpx.Client, folder: Path, subtests: pytest.Subtests
) -> None:
    found = list(examples([COOKBOOK]))
    assert found
    for _, command, answer in found:
        with subtests.test(command):
            keys_file = str(folder / "keys.yaml")
            assert_prints(kitchen, command.replace("keys.yaml", keys_file), answer)


@pytest.mark.long
def test_gateway_behind_the_nginx_of_the_recipe_streams(kitchen: httpx.Client) -> None:
    gateway_port = kitchen.base_url.port
    (port,) = free_ports(1)
    location = read_block("nginx").replace(":8080", f":{gateway_port}")
    server = f"access_log off; server {{ listen 127.0.0.1:{port}; {location} }}"
    headers = {"Accept": "application/x-ndjson"}
    body = {"inputs": {"text_input": "The ship", "max_tokens": 2, "stream": True}}
    with run_nginx(port, server), httpx.Client(base_url=f"http://127.0.0.1:{port}") as outside:
        assert outside.get("/v1/models").status_code == 200
        streamed = outside.post("/v1/models/tokens/infer", json=body, headers=headers)
        assert len(streamed.text.splitlines()) == 2, streamed.text


def test_overlay_and_rules_that_the_recipes_name_exist() -> None:
    """test_manifests.py and test_monitoring.py test what they contain."""
    scrape = next(
        yaml.safe_load(block)
        for block in re.findall(r"```yaml\n(.*?)```", COOKBOOK.read_text(), re.DOTALL)
        if "scrape_configs" in block
    )
    assert [path for path in scrape["rule_files"] if not (ROOT / path).exists()] == []
    recorded = yaml.safe_load((ROOT / "deploy/monitoring/prometheus.yml").read_text())
    names = [job["job_name"] for job in recorded["scrape_configs"]]
    assert [job["job_name"] for job in scrape["scrape_configs"]] == names
    (overlay,) = re.findall(r"kubectl apply -k k8s/overlays/(\S+)", read_block("sh"))
    assert Manifests.of(overlay).has("Deployment", "triton-gateway")
