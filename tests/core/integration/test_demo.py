"""The promises of the README, with the real tritonserver and the models of triton_repo."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
from PIL import Image

from gateway.embedded.supervisor import EmbeddedTriton
from gateway.messages import join_names
from gateway.tensors.images import ImageReader
from gateway.tensors.payload import PayloadLimits
from gateway.tensors.signature import ChannelLayout, ImageSpec
from tests.support.errors import assert_error
from tests.support.servers import ROOT, Command, free_ports

IMAGES = ROOT / "docs" / "images"
SEVEN = (IMAGES / "seven.png").read_bytes()
INFER = "/v1/models/ensemble/infer"
PNG = {"Content-Type": "image/png"}
TEXT = {"Content-Type": "text/plain"}


def digit(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    result = response.json()["outputs"]["result"]
    assert result["predictions"][0]["probability"] > 0.5
    return str(result["predictions"][0]["label"])


def converted(image: bytes, kind: str) -> bytes:
    file = io.BytesIO()
    Image.open(io.BytesIO(image)).convert("RGB").save(file, kind)
    return file.getvalue()


def test_jpeg_at_a_reduced_scale_has_the_top_class_of_the_whole_picture(demo: httpx.Client) -> None:
    spec = ImageSpec(ChannelLayout.CHANNELS_FIRST, "L", 16, 16)
    for degrees in (0, 10, -10):
        picture = Image.open(io.BytesIO(SEVEN)).convert("L").rotate(degrees, fillcolor=255)
        file = io.BytesIO()
        picture.resize((640, 480)).save(file, "JPEG")
        reduced = ImageReader(spec, PayloadLimits(), "X").read(file.getvalue())
        whole = np.asarray(Image.open(file).resize((16, 16), Image.Resampling.BILINEAR))[None]
        ink = 1 - np.stack([reduced, whole]) / 255
        response = demo.post("/v1/models/core/infer", json={"inputs": ink.tolist()})
        scores = np.array(response.json()["outputs"]["OUTPUT__0"])
        assert len(set(scores.argmax(1))) == 1


def test_image_is_classified_however_it_is_sent(
    demo: httpx.Client, subtests: pytest.Subtests
) -> None:
    encoded = {"b64": base64.b64encode(SEVEN).decode()}
    data_uri = {"b64": f"data:image/png;base64,{encoded['b64']}"}
    requests: dict[str, dict[str, Any]] = {
        # The content decides the format, not the header.
        **{
            f"PNG as {content_type}": {"content": SEVEN, "headers": {"Content-Type": content_type}}
            for content_type in ("image/png", "image/jpeg", "image/*", "application/octet-stream")
        },
        "JPEG": {"content": converted(SEVEN, "JPEG"), "headers": {"Content-Type": "image/jpeg"}},
        "WebP": {"content": converted(SEVEN, "WEBP"), "headers": {"Content-Type": "image/webp"}},
        "a form's field": {"files": {"anything": ("seven.png", SEVEN, "image/png")}},
        "base64": {"json": {"inputs": encoded}},
        "a data URI by name": {"json": {"inputs": {"image": data_uri}}},
    }
    for name, request in requests.items():
        with subtests.test(name):
            assert digit(demo.post(INFER, **request)) == "7"


def test_image_that_is_light_on_dark_is_classified_by_a_named_version(demo: httpx.Client) -> None:
    path = "/v1/models/ensemble/versions/1/infer"
    headers = {"Content-Type": "image/jpeg"}
    response = demo.post(path, content=(IMAGES / "three.jpg").read_bytes(), headers=headers)
    assert digit(response) == "3"
    assert response.json()["version"] == "1"


def test_form_with_several_files_is_a_batch(demo: httpx.Client) -> None:
    three = (IMAGES / "three.jpg").read_bytes()
    files = [("image", ("a", SEVEN)), ("image", ("b", three)), ("image", ("c", SEVEN))]
    response = demo.post(INFER, files=files)
    assert response.status_code == 200, response.text
    results = response.json()["outputs"]["result"]
    assert [result["predictions"][0]["label"] for result in results] == ["7", "3", "7"]


def test_text_embeddings_are_those_of_the_reference(demo: httpx.Client) -> None:
    reference = json.loads((ROOT / "tests/data/sentences_reference.json").read_text())
    texts = [entry["text"] for entry in reference]
    expected = np.array([entry["embedding"] for entry in reference])
    path = "/v1/models/text_ensemble/infer"

    def embeddings(response: httpx.Response) -> np.ndarray:
        assert response.status_code == 200, response.text
        return np.array(response.json()["outputs"]["EMBEDDING"])

    batch = embeddings(demo.post(path, json={"inputs": [*texts, ""]}))
    assert batch.shape == (len(texts) + 1, 384)
    assert ((batch[:-1] * expected).sum(axis=1) >= 0.999999).all()
    for text, vector in zip(texts, expected, strict=True):
        assert embeddings(demo.post(path, json={"inputs": text})) @ vector >= 0.999999
        as_body = demo.post(path, content=text.encode(), headers=TEXT)
        assert embeddings(as_body) @ vector >= 0.999999


@pytest.mark.fault(
    "images that are invalid, truncated, of another format, or claim 13,000 × 13,000"
)
def test_image_without_a_digit_is_refused_with_the_reason(
    demo: httpx.Client, subtests: pytest.Subtests
) -> None:
    blank = io.BytesIO()
    Image.new("L", (100, 100), 255).save(blank, "PNG")
    for body, words in (
        (b"<html>not an image</html>", "neither JPEG, PNG nor WebP"),
        (b"", "empty"),
        (SEVEN[:300], "truncated"),
        (blank.getvalue(), "no ink found"),
    ):
        with subtests.test(words):
            response = demo.post(INFER, content=body, headers=PNG)
            assert_error(response, 422, "REFUSED_BY_MODEL", words)


@pytest.mark.fault("names with ../, %00, CR and LF, of 300 characters; invalid versions")
@pytest.mark.parametrize(
    ("model", "unknown"),
    [
        ("nobody", "'nobody'"),
        ("ensemble/versions/99", "99"),
        ("ensemble/versions/1.5", "1.5"),
    ],
)
def test_model_or_version_that_is_unknown_is_404(
    demo: httpx.Client, model: str, unknown: str
) -> None:
    response = demo.post(f"/v1/models/{model}/infer", content=SEVEN, headers=PNG)
    assert_error(response, 404, "MODEL_NOT_FOUND", unknown)


def test_path_that_is_unknown_is_404(demo: httpx.Client) -> None:
    assert_error(demo.get("/nowhere"), 404, "NOT_FOUND", "path not found")
    assert_error(demo.get("/v2/nowhere"), 404, "NOT_FOUND", "not found in Triton's API")


def test_method_that_is_wrong_is_405_with_the_methods_of_the_path(demo: httpx.Client) -> None:
    table = [
        ("GET", INFER, ["POST"]),
        ("POST", "/v2/models", ["GET", "HEAD"]),
        ("POST", "/livez", ["GET", "HEAD"]),
        ("PATCH", "/v1/log-level", ["GET", "HEAD", "PUT"]),
    ]
    for method, path, allowed in table:
        response = demo.request(method, path)
        words = f"this path supports only {join_names(allowed)}"
        assert_error(response, 405, "METHOD_NOT_ALLOWED", words)
        assert response.headers.get_list("allow") == [", ".join(allowed)], path
    document = demo.get("/openapi.json").json()
    assert len(document["paths"]) > 20
    for path, operations in document["paths"].items():
        response = demo.request("PATCH", path.replace("{", "").replace("}", ""))
        allow = set(response.headers["allow"].split(", "))
        described = {method.upper() for method in operations}
        assert response.status_code == 405
        assert described <= allow <= described | {"HEAD"}, path


def test_request_id_that_is_valid_is_kept_and_another_replaced(demo: httpx.Client) -> None:
    kept = demo.post(INFER, content=SEVEN, headers={**PNG, "X-Request-ID": "mine-1"})
    assert kept.headers["x-request-id"] == "mine-1"
    assert kept.json()["id"] == "mine-1"
    replaced = demo.get("/livez", headers={"X-Request-ID": "not sane; at all"})
    assert len(replaced.headers["x-request-id"]) == 32


@pytest.mark.fault("forms that are truncated or have 2,000 fields, a file called ../../etc/passwd")
def test_form_that_is_large_is_not_written_to_a_file(
    demo_triton: EmbeddedTriton, tmp_path: Path
) -> None:
    (port,) = free_ports(1)
    environment = {"GATEWAY_TRITON_URLS": demo_triton.options.url, "TMPDIR": str(tmp_path)}
    with Command("serve", "--port", str(port), environment=environment) as serve:
        serve.wait_for("serving")
        files = [("image", (f"{number}.png", bytes(4 << 20))) for number in range(8)]
        response = httpx.post(
            f"http://127.0.0.1:{port}/v1/models/ensemble/infer", files=files, timeout=60
        )
        assert_error(response, 422, "REFUSED_BY_MODEL", "image 1 of 8")
        held = [Path(file.path) for file in psutil.Process(serve.pid).open_files()]
    assert not [path for path in held if path.is_relative_to(tmp_path)]
    assert not list(tmp_path.iterdir())


@pytest.mark.fault("a model is unloaded without the gateway's knowledge")
def test_model_that_is_unloaded_is_503_until_it_is_loaded_again(demo: httpx.Client) -> None:
    def versions() -> Any:
        models = {model["name"]: model for model in demo.get("/v1/models").json()["models"]}
        return models["text_postprocessing"]["versions"]

    def infer() -> httpx.Response:
        return demo.post("/v1/models/text_ensemble/infer", content=b"x", headers=TEXT)

    assert demo.post("/v2/repository/models/text_ensemble/unload").status_code == 200
    try:
        assert_error(infer(), 503, "MODEL_NOT_READY", "load it")
    finally:
        assert demo.post("/v2/repository/models/text_ensemble/load").status_code == 200
    assert versions() == [{"version": "1", "state": "READY"}]
    assert infer().status_code == 200


@pytest.mark.fault("a load that includes code, without permission")
def test_load_with_two_equal_keys_passes_no_code(demo: httpx.Client) -> None:
    """Triton would read the first, orjson reads the last."""
    body = '{"parameters": {"config": "{}"}, "parameters": {}}'
    response = demo.post("/v2/repository/models/ensemble/load", content=body)
    assert response.status_code == 200
    assert demo.get("/v2/models/ensemble/config").json()["platform"] == "ensemble"
