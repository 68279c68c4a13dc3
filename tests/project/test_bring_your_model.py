"""The steps of docs/serve/bring-your-model.md with a small network, and its pipeline for ImageNet."""

from __future__ import annotations

import io
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from google.protobuf import text_format
from PIL import Image
from tritonclient.grpc.model_config_pb2 import ModelConfig

from gateway.embedded.model_paths import link_model
from models.classifier import Recipe, write
from tests.support import network
from tests.support.documents import OWN_SERVER, assert_prints, examples
from tests.support.servers import ROOT, gateway_before, triton_on_free_ports

DOCUMENT = OWN_SERVER
REPOSITORY = ROOT / "triton_repo"
LABELS = [f"thing {number}" for number in range(network.CLASSES)]
RECIPE = Recipe(232, 224, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
PNG = {"Content-Type": "image/png"}


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create the models of the document, and networks without a config."""
    place = tmp_path_factory.mktemp("brought")
    (place / "triton_repo").symlink_to(REPOSITORY)
    (place / "model.onnx").write_bytes(network.classifier())
    (place / "labels.txt").write_text("\n".join(LABELS))
    for steps in blocks("sh"):
        subprocess.run(["sh", "-e", "-c", steps], cwd=place, check=True, timeout=60)
    models = place / "my_models"
    write(models, network.classifier(), LABELS, RECIPE)
    (place / "mine.onnx").write_bytes(network.classifier())
    for name in ("model", "mine"):
        link_model(place / f"{name}.onnx", models / name)
    version = models / "texts" / "1"
    version.mkdir(parents=True)
    (version / "model.onnx").write_bytes(network.texts())
    return models


@pytest.fixture(scope="module")
def brought(folder: Path) -> Iterator[httpx.Client]:
    with (
        triton_on_free_ports(folder, auto_complete=True) as triton,
        gateway_before(
            triton.options.url, repository=f"file://{folder}", model_uploads="artifacts"
        ) as client,
    ):
        yield client


def png(width: int, height: int) -> bytes:
    """A picture with something different everywhere, smooth enough to be resized."""
    coarse = np.random.default_rng(3).integers(0, 256, (9, 9, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC).save(file, "PNG")
    return file.getvalue()


def standardised(picture: Image.Image) -> network.Floats:
    values = np.asarray(picture, np.float32).transpose(2, 0, 1) / 255
    mean, std = (np.array(part, np.float32)[:, None, None] for part in (RECIPE.mean, RECIPE.std))
    result: network.Floats = (values - mean) / std
    return result


@pytest.mark.long
def test_examples_print_what_the_document_says(
    brought: httpx.Client, subtests: pytest.Subtests
) -> None:
    found = list(examples([DOCUMENT]))
    assert len(found) >= 5
    for _, command, answer in found:
        with subtests.test(command):
            assert_prints(brought, command, answer)


def test_configs_for_a_gpu_are_valid() -> None:
    configs = blocks("protobuf")
    assert configs
    for config in configs:
        text_format.Parse(config, ModelConfig())


@pytest.mark.long
def test_pipeline_serves_another_network_by_its_config_alone(
    brought: httpx.Client,
) -> None:
    body = png(330, 250)
    response = brought.post("/v1/models/ensemble/infer", content=body, headers=PNG)
    assert response.status_code == 200, response.text
    answer = response.json()["outputs"]["result"]["predictions"]
    # As torchvision prepares a picture for ImageNet: the shorter side to 232, then the centre.
    resized = Image.open(io.BytesIO(body)).resize((306, 232), Image.Resampling.BILINEAR)
    scores = network.scores(standardised(resized.crop((41, 4, 265, 228))))
    shares = np.exp(scores - scores.max()) / np.exp(scores - scores.max()).sum()
    best = np.argsort(-shares)[:5]
    assert [entry["label"] for entry in answer] == [LABELS[index] for index in best]
    assert [entry["probability"] for entry in answer] == pytest.approx(shares[best], abs=1e-3)
