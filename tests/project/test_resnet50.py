"""ResNet-50 exported, served by the real tritonserver, and compared with PyTorch itself."""

from __future__ import annotations

import io
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from tests.support.missing import format_reason
from tests.support.servers import ROOT, gateway_before, triton_on_free_ports

ENVIRONMENT = ROOT / ".venv-resnet50"
PYTHON = ENVIRONMENT / "bin" / "python"
PNG = {"Content-Type": "image/png"}
NPY = {"Accept": "application/x-npy"}

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not (ENVIRONMENT / ".ready").exists(), reason=format_reason("PyTorch", "make resnet50")
    ),
]

# The picture as torchvision prepares it, and what the network makes of the tensor that was served.
REFERENCE = """
import sys, numpy, torch
from PIL import Image
from models.export_resnet50 import source
network, weights = source("none")
picture, served, prepared, scores = sys.argv[1:]
numpy.save(prepared, weights.transforms()(Image.open(picture)).numpy())
with torch.inference_mode():
    numpy.save(scores, network(torch.from_numpy(numpy.load(served))[None])[0].numpy())
"""


def torch_python(
    *arguments: str | Path, timeout_s: float = 300
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [PYTHON, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=timeout_s
    )


def export(folder: Path, weights: str) -> subprocess.CompletedProcess[str]:
    arguments = ("--output", str(folder), "--weights", weights)
    return torch_python("-m", "models.export_resnet50", *arguments)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resnet50") / "repository"
    run = export(folder, "none")
    assert run.returncode == 0, run.stderr
    return folder


@pytest.fixture(scope="module")
def resnet50(repository: Path) -> Iterator[httpx.Client]:
    with (
        triton_on_free_ports(repository, auto_complete=True) as triton,
        gateway_before(triton.options.url) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def picture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    coarse = np.random.default_rng(3).integers(0, 256, (12, 16, 3), dtype=np.uint8)
    file = tmp_path_factory.mktemp("picture") / "picture.png"
    Image.fromarray(coarse).resize((640, 480), Image.Resampling.BICUBIC).save(file)
    return file


def array(response: httpx.Response) -> NDArray[np.float32]:
    assert response.status_code == 200, response.text
    loaded: NDArray[np.float32] = np.load(io.BytesIO(response.content))
    return loaded


def test_served_model_gives_the_labels_of_pytorch(
    resnet50: httpx.Client, repository: Path, picture: Path, tmp_path: Path
) -> None:
    body = picture.read_bytes()
    tensor = array(
        resnet50.post("/v1/models/preprocessing/infer", content=body, headers={**PNG, **NPY})
    )
    served, prepared, expected = (
        tmp_path / f"{name}.npy" for name in ("served", "prepared", "scores")
    )
    np.save(served, tensor)
    run = torch_python("-c", REFERENCE, picture, served, prepared, expected)
    assert run.returncode == 0, run.stderr
    # A resize of the wanted part alone; torchvision's rounds to whole greys once in between.
    differences = np.abs(tensor - np.load(prepared))
    scores = np.load(expected)
    headers = {"Content-Type": "application/x-npy", **NPY}
    found = array(
        resnet50.post("/v1/models/core/infer", content=served.read_bytes(), headers=headers)
    )
    cosine = found @ scores / np.linalg.norm(found) / np.linalg.norm(scores)
    error = np.abs(found - scores).max() / np.abs(scores).max()
    assert differences.mean() < 0.02
    assert cosine > 0.999999
    assert error < 1e-4

    url = f"{resnet50.base_url}/v1/models/ensemble/infer"
    command = ["curl", "-sf", "--data-binary", f"@{picture}", "-H", "Content-Type: image/png", url]
    answer = subprocess.run(command, capture_output=True, check=True, timeout=60).stdout
    result = httpx.Response(200, content=answer).json()["outputs"]["result"]
    labels = (repository / "postprocessing/labels.txt").read_text().splitlines()
    assert len(labels) == 1000
    best = np.argsort(-scores)[:5]
    assert [entry["label"] for entry in result["predictions"]] == [labels[index] for index in best]


def test_second_export_and_export_of_saved_weights_give_the_same_bytes(
    repository: Path, tmp_path: Path
) -> None:
    graph = (repository / "core/1/model.onnx").read_bytes()
    assert b"site-packages" not in graph, "the exporter's notes name files of this machine"
    save = "import sys, torch; from models.export_resnet50 import source\n"
    save += "torch.save(source('none').network.state_dict(), sys.argv[1])"
    saved = tmp_path / "mine.pth"
    assert torch_python("-c", save, saved).returncode == 0
    for number, weights in enumerate(("none", str(saved))):
        run = export(tmp_path / f"out{number}", weights)
        assert run.returncode == 0, run.stderr
        assert (tmp_path / f"out{number}/core/1/model.onnx").read_bytes() == graph


def test_invalid_weights_file_is_refused_before_it_is_read(tmp_path: Path) -> None:
    missing = export(tmp_path / "out", str(tmp_path / "missing.pth"))
    assert missing.returncode == 1
    assert f"cannot read {tmp_path / 'missing.pth'}: No such file" in missing.stderr
    for name, sentence in (
        ("resnet50-11ad3fa6.pth", "its SHA-256 does not begin with 11ad3fa6"),
        ("mine.pth", "is not a weights file"),
    ):
        (tmp_path / name).write_bytes(b"junk")
        run = export(tmp_path / "out", str(tmp_path / name))
        assert run.returncode == 1
        assert sentence in run.stderr
        assert "Traceback" not in run.stderr
    assert not (tmp_path / "out").exists()
