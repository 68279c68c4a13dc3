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
from models.classifier import CONFIG, ConfigError, Recipe, changed, write
from tests.support import network
from tests.support.documents import OWN_SERVER, assert_prints, examples
from tests.support.servers import ROOT, gateway_before, triton_on_free_ports

DOCUMENT = OWN_SERVER
REPOSITORY = ROOT / "triton_repo"
LABELS = [f"thing {number}" for number in range(network.CLASSES)]
RECIPE = Recipe(232, 224, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
PNG = {"Content-Type": "image/png"}
NPY = {**PNG, "Accept": "application/x-npy"}


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


@pytest.mark.long
def test_network_without_a_config_has_its_shapes_and_batches(brought: httpx.Client) -> None:
    described = brought.get("/v1/models/mine").json()
    assert described["max_batch_size"] == 4
    assert [tensor["shape"] for tensor in described["inputs"]] == [[3, 224, 224]]
    assert "dynamic_batching" in brought.get("/v2/models/mine/config").json()
    body = png(224, 224)
    response = brought.post("/v1/models/mine/infer", content=body, headers=NPY)
    greys = np.asarray(Image.open(io.BytesIO(body)), np.float32).transpose(2, 0, 1)
    expected = network.scores(greys)
    np.testing.assert_allclose(np.load(io.BytesIO(response.content)), expected, rtol=1e-4, atol=0.1)


@pytest.mark.long
def test_hints_decide_how_pictures_are_scaled(brought: httpx.Client) -> None:
    body = png(224, 224)
    response = brought.post("/v1/models/photos/infer", content=body, headers=NPY)
    assert response.status_code == 200, response.text
    expected = network.scores(standardised(Image.open(io.BytesIO(body))))
    np.testing.assert_allclose(np.load(io.BytesIO(response.content)), expected, atol=1e-3)


@pytest.mark.long
def test_network_of_texts_without_a_batch_needs_no_config(brought: httpx.Client) -> None:
    inputs = {"words": ["ein Wort", "말", ""], "numbers": [[1, 2, 3], [4, 5, 6]]}
    response = brought.post("/v1/models/texts/infer", json={"inputs": inputs})
    assert response.status_code == 200, response.text
    assert response.json()["outputs"] == {f"same {name}": value for name, value in inputs.items()}
    assert brought.get("/v1/models/texts").json()["max_batch_size"] == 0


def parsed(config: Path) -> ModelConfig:
    found: ModelConfig = text_format.Parse(config.read_text(), ModelConfig())
    return found


def test_pipeline_differs_from_that_of_the_digits_in_shapes_and_parameters_alone(
    folder: Path,
) -> None:
    for model in ("preprocessing", "core", "postprocessing", "ensemble"):
        ours, theirs = parsed(REPOSITORY / model / CONFIG), parsed(folder / model / CONFIG)
        for config in (ours, theirs):
            config.ClearField("parameters")
            for tensor in [*config.input, *config.output]:
                tensor.ClearField("dims")
        assert ours == theirs
    for model in ("preprocessing", "postprocessing"):
        code = sorted((REPOSITORY / model / "1").glob("*.py"))
        assert code
        for file in code:
            assert (folder / model / "1" / file.name).read_bytes() == file.read_bytes()
        assert not any(file.is_symlink() for file in (folder / model / "1").iterdir())


def test_unexpected_config_is_refused_unchanged() -> None:
    with pytest.raises(ConfigError, match=r"core/config\.pbtxt must contain"):
        changed("dims: [ 3 ]", {"dims: [ 10 ]": "dims: [ 1000 ]"}, "core/config.pbtxt")
