"""In mode poll, the description of a model follows Triton within the time that the document says."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.fleet.signatures import STALE_AFTER_S
from tests.support.model_folders import write_model_folder
from tests.support.servers import ROOT
from tests.support.up import Up
from tests.support.wait import TIMEOUT_S, wait_until

CONFIG = """backend: "python"
max_batch_size: {batch}
input [{{ name: "X" data_type: TYPE_FP32 dims: [{dims}] }}]
output [{{ name: "Y" data_type: TYPE_FP32 dims: [{dims}] }}]
parameters {{ key: "gateway.title" value {{ string_value: "{title}" }} }}
"""
CODE = """import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        tensors = [pb_utils.get_input_tensor_by_name(request, "X") for request in requests]
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("Y", tensor.as_numpy())])
            for tensor in tensors
        ]
"""
OLD = {"batch": 0, "dims": 2, "title": "old"}
VERSION = {"new_version": 2}
THREE = {"inputs": [1, 2, 3]}
SIZE = r'"maxItems": (\d+)'

Question = Callable[[httpx.Client, str], Any]


def describe(client: httpx.Client, path: str) -> dict[str, Any]:
    document: dict[str, Any] = client.get(f"/v1/models/{path}").json()
    return document


def infer(client: httpx.Client, path: str, **body: Any) -> Any:
    document = client.post(f"/v1/models/{path}", json=body).json()
    return document.get("code") or document


# For each model: what changes, the question, and the answers before and after.
ROWS: dict[str, tuple[dict[str, Any], Question, Any, Any]] = {
    "shape": ({"dims": 3}, lambda c, m: describe(c, m)["inputs"][0]["shape"], [2], [3]),
    "batch": ({"batch": 4}, lambda c, m: describe(c, m)["max_batch_size"], 0, 4),
    "title": ({"title": "new"}, lambda c, m: describe(c, m)["title"], "old", "new"),
    "versions": (VERSION, lambda c, m: describe(c, m)["versions"], ["1"], ["2"]),
    "of_version": (
        {"dims": 3},
        lambda c, m: describe(c, f"{m}/versions/1")["outputs"][0]["shape"], [2], [3],
    ),
    "openapi": (
        {"dims": 3},
        lambda c, m: set(re.findall(SIZE, json.dumps(describe(c, f"{m}/openapi.json")))), {"2"}, {"3"},
    ),
    "inferred": (
        {"dims": 3},
        lambda c, m: infer(c, f"{m}/infer?dry_run=true", **THREE),
        "DOES_NOT_FIT_MODEL",
        {
            "model": "inferred",
            "version": "",
            "inputs": [
                {"name": "X", "datatype": "FP32", "shape": [3], "bytes": 12, "first_values": [1, 2, 3]}
            ],
        },
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repository")
    for name in ROWS:
        write_model_folder(folder / name, CONFIG.format(**OLD), {"1/model.py": CODE})
    return folder


@pytest.fixture(scope="module")
def client(repository: Path) -> Iterator[httpx.Client]:
    with Up(repository, "--model-control", "poll", "--poll-secs", "1") as up:
        up.wait_for("ready after")
        with httpx.Client(base_url=up.url, timeout=TIMEOUT_S) as client:
            yield client


def change_model(folder: Path, change: dict[str, Any]) -> None:
    """Replace the config, or add a version, in one step, because Triton reads what is half written."""
    if change is VERSION:
        write_model_folder(folder.parent.parent / "made", "", {"model.py": CODE})
        (folder.parent.parent / "made").rename(folder / "2")
    else:
        made = folder.parent.parent / "config.pbtxt"
        made.write_text(CONFIG.format(**OLD | change))
        made.replace(folder / "config.pbtxt")


def read_from_triton(client: httpx.Client, model: str) -> tuple[Any, ...]:
    """Return what changes, as Triton tells it now: `/v2` keeps nothing."""
    metadata = client.get(f"/v2/models/{model}").json()
    config = client.get(f"/v2/models/{model}/config").json()
    parameters = config.get("parameters", {}).get("gateway.title")
    return (
        metadata.get("versions"),
        metadata.get("inputs"),
        parameters,
        config.get("max_batch_size"),
    )


def test_description_follows_triton_within_the_time_of_the_document(
    client: httpx.Client, repository: Path, subtests: pytest.Subtests
) -> None:
    document = (ROOT / "docs/serve/fleet.md").read_text()
    assert "at most two seconds after Triton does" in document
    assert STALE_AFTER_S == 2.0
    before = {model: read_from_triton(client, model) for model in ROWS}
    for model, (change, ask, old, _) in ROWS.items():
        assert ask(client, model) == old
        change_model(repository / model, change)
    waiting = set(ROWS)

    def have_changed() -> bool:
        for model in list(waiting):
            ROWS[model][1](client, model)  # so that the gateway has read it lately
            found = read_from_triton(client, model)
            if found != before[model] and found[0]:  # it has no version while it is reloaded
                waiting.discard(model)
        return not waiting

    wait_until(have_changed)
    changed_at = time.monotonic()
    wait_until(lambda: time.monotonic() > changed_at + STALE_AFTER_S)
    for model, (_, ask, _, new) in ROWS.items():
        with subtests.test(model):
            assert ask(client, model) == new
