"""What the README promises, on the real tritonserver with the models of triton_repo."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest
from PIL import Image

from gateway.embedded.supervisor import EmbeddedTriton
from gateway.messages import join_names
from tests.support.errors import assert_error
from tests.support.servers import ROOT, Command, free_ports

IMAGES = ROOT / "docs" / "images"
SEVEN = (IMAGES / "seven.png").read_bytes()
PNG = {"Content-Type": "image/png"}
TEXT = {"Content-Type": "text/plain"}


def digit(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    result = response.json()["outputs"]["result"]
    assert result["predictions"][0]["probability"] > 0.5
    return str(result["predictions"][0]["label"])


def embedding(demo: httpx.Client, text: str) -> np.ndarray:
    response = demo.post("/v1/models/text_ensemble/infer", content=text.encode(), headers=TEXT)
    assert response.status_code == 200, response.text
    return np.array(response.json()["outputs"]["EMBEDDING"])


def test_an_image_as_the_body_is_classified(demo: httpx.Client) -> None:
    assert digit(demo.post("/v1/models/ensemble/infer", content=SEVEN, headers=PNG)) == "7"


@pytest.mark.parametrize("content_type", ["image/jpeg", "image/*", "application/octet-stream"])
def test_the_image_decides_its_format_not_its_content_type(
    demo: httpx.Client, content_type: str
) -> None:
    headers = {"Content-Type": content_type}
    assert digit(demo.post("/v1/models/ensemble/infer", content=SEVEN, headers=headers)) == "7"


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_the_three_formats_that_people_post(demo: httpx.Client, kind: str) -> None:
    file = io.BytesIO()
    Image.open(io.BytesIO(SEVEN)).convert("RGB").save(file, kind)
    headers = {"Content-Type": f"image/{kind.lower()}"}
    assert (
        digit(demo.post("/v1/models/ensemble/infer", content=file.getvalue(), headers=headers))
        == "7"
    )


def test_light_on_dark_works_as_well(demo: httpx.Client) -> None:
    three = (IMAGES / "three.jpg").read_bytes()
    headers = {"Content-Type": "image/jpeg"}
    assert digit(demo.post("/v1/models/ensemble/infer", content=three, headers=headers)) == "3"


def test_an_image_in_a_form_whatever_the_field_is_called(demo: httpx.Client) -> None:
    for field in ("image", "file", "anything"):
        files = {field: ("seven.png", SEVEN, "image/png")}
        assert digit(demo.post("/v1/models/ensemble/infer", files=files)) == "7"


def test_several_files_in_a_form_are_a_batch(demo: httpx.Client) -> None:
    three = (IMAGES / "three.jpg").read_bytes()
    files = [("image", ("a", SEVEN)), ("image", ("b", three)), ("image", ("c", SEVEN))]
    response = demo.post("/v1/models/ensemble/infer", files=files)
    assert response.status_code == 200, response.text
    results = response.json()["outputs"]["result"]
    assert [result["predictions"][0]["label"] for result in results] == ["7", "3", "7"]


def test_an_image_as_base64_in_json(demo: httpx.Client) -> None:
    encoded = base64.b64encode(SEVEN).decode()
    for value in ({"b64": encoded}, {"b64": f"data:image/png;base64,{encoded}"}):
        for inputs in (value, {"image": value}):
            assert digit(demo.post("/v1/models/ensemble/infer", json={"inputs": inputs})) == "7"


def test_a_text_becomes_a_vector_of_norm_1(demo: httpx.Client) -> None:
    vector = embedding(demo, "A sentence about nothing in particular.")
    assert vector.shape == (384,)
    assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-5)


def test_paraphrases_are_closer_than_strangers(demo: httpx.Client) -> None:
    doctor, physician, harbour = (
        embedding(demo, text)
        for text in (
            "The doctor examined the patient.",
            "A physician looked at the sick man.",
            "The ship left the harbour at dawn.",
        )
    )
    assert doctor @ physician > doctor @ harbour + 0.3


def test_a_text_in_json_is_the_same_text(demo: httpx.Client) -> None:
    alone = embedding(demo, "안녕하세요 ☕")
    response = demo.post("/v1/models/text_ensemble/infer", json={"inputs": "안녕하세요 ☕"})
    assert np.allclose(response.json()["outputs"]["EMBEDDING"], alone, atol=1e-6)


def test_a_list_of_texts_is_a_batch(demo: httpx.Client) -> None:
    texts = ["one", "a somewhat longer sentence than the first", ""]
    response = demo.post("/v1/models/text_ensemble/infer", json={"inputs": texts})
    vectors = np.array(response.json()["outputs"]["EMBEDDING"])
    assert vectors.shape == (3, 384)
    for text, vector in zip(texts, vectors, strict=True):
        if text:
            assert embedding(demo, text) @ vector == pytest.approx(1, abs=1e-5)


def test_the_reference_embeddings_alone_and_in_a_batch(demo: httpx.Client) -> None:
    reference = json.loads((ROOT / "tests/data/sentences_reference.json").read_text())
    texts = [entry["text"] for entry in reference]
    expected = np.array([entry["embedding"] for entry in reference])
    response = demo.post("/v1/models/text_ensemble/infer", json={"inputs": texts})
    batch = np.array(response.json()["outputs"]["EMBEDDING"])
    assert ((batch * expected).sum(axis=1) >= 0.999999).all()
    for text, vector in zip(texts, expected, strict=True):
        alone = demo.post("/v1/models/text_ensemble/infer", json={"inputs": text})
        assert np.array(alone.json()["outputs"]["EMBEDDING"]) @ vector >= 0.999999


@pytest.mark.fault(
    "images that are invalid, truncated, of another format, or claim 13,000 × 13,000"
)
@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"<html>not an image</html>", "neither JPEG, PNG nor WebP"),
        (b"", "empty"),
        (SEVEN[:300], "truncated"),
    ],
)
def test_junk_instead_of_an_image_is_422_with_a_sentence(
    demo: httpx.Client, body: bytes, words: str
) -> None:
    response = demo.post("/v1/models/ensemble/infer", content=body, headers=PNG)
    assert_error(response, 422, "REFUSED_BY_MODEL", words)


def test_a_blank_picture_is_no_digit(demo: httpx.Client) -> None:
    file = io.BytesIO()
    Image.new("L", (100, 100), 255).save(file, "PNG")
    response = demo.post("/v1/models/ensemble/infer", content=file.getvalue(), headers=PNG)
    assert_error(response, 422, "REFUSED_BY_MODEL", "no ink found")


def test_an_unknown_model_is_404(demo: httpx.Client) -> None:
    response = demo.post("/v1/models/nobody/infer", content=b"x", headers=TEXT)
    assert_error(response, 404, "MODEL_NOT_FOUND", "'nobody'")


@pytest.mark.fault("names with ../, %00, CR and LF, of 300 characters; invalid versions")
@pytest.mark.parametrize(
    ("version", "code"),
    [("99", "MODEL_NOT_FOUND"), ("1.5", "MODEL_NOT_FOUND"), ("abc", "LABEL_NOT_FOUND")],
)
def test_an_unknown_version_is_404(demo: httpx.Client, version: str, code: str) -> None:
    response = demo.post(
        f"/v1/models/ensemble/versions/{version}/infer", content=SEVEN, headers=PNG
    )
    assert_error(response, 404, code, version)


def test_a_named_version_answers(demo: httpx.Client) -> None:
    response = demo.post("/v1/models/ensemble/versions/1/infer", content=SEVEN, headers=PNG)
    assert digit(response) == "7"
    assert response.json()["version"] == "1"


def test_an_unknown_path_is_404_in_the_same_shape(demo: httpx.Client) -> None:
    assert_error(demo.get("/nowhere"), 404, "NOT_FOUND", "path not found")
    assert_error(demo.get("/v2/nowhere"), 404, "NOT_FOUND", "not found in Triton's API")


def test_a_wrong_method_is_405_in_the_same_shape(demo: httpx.Client) -> None:
    table = [
        ("GET", "/v1/models/ensemble/infer", ["POST"]),
        ("GET", "/v2/models/ensemble/infer", ["POST"]),
        ("POST", "/v2/models/ensemble", ["GET", "HEAD"]),
        ("POST", "/v2/models", ["GET", "HEAD"]),
        ("POST", "/livez", ["GET", "HEAD"]),
        ("POST", "/openapi.json", ["GET", "HEAD"]),
        ("PATCH", "/v1/models/ensemble", ["DELETE", "GET", "HEAD", "PUT"]),
    ]
    for method, path, allowed in table:
        response = demo.request(method, path)
        words = f"this path supports only {join_names(allowed)}"
        assert_error(response, 405, "METHOD_NOT_ALLOWED", words)
        assert response.headers.get_list("allow") == [", ".join(allowed)], path


def test_a_wrong_method_names_those_that_a_path_accepts(demo: httpx.Client) -> None:
    document = demo.get("/openapi.json").json()
    assert len(document["paths"]) > 30
    for path, operations in document["paths"].items():
        response = demo.request("PATCH", path.replace("{", "").replace("}", ""))
        allowed = set(response.headers["allow"].split(", "))
        described = {method.upper() for method in operations}
        assert response.status_code == 405
        assert described <= allowed, path
        assert allowed <= described | {"HEAD"}, path


def test_a_sane_request_id_is_kept_and_another_replaced(demo: httpx.Client) -> None:
    kept = demo.post(
        "/v1/models/ensemble/infer", content=SEVEN, headers={**PNG, "X-Request-ID": "mine-1"}
    )
    assert kept.headers["x-request-id"] == "mine-1"
    assert kept.json()["id"] == "mine-1"
    replaced = demo.get("/livez", headers={"X-Request-ID": "not sane; at all"})
    assert len(replaced.headers["x-request-id"]) == 32


def test_the_models_are_listed_with_their_states(demo: httpx.Client) -> None:
    models = {model["name"]: model for model in demo.get("/v1/models").json()["models"]}
    assert models["ensemble"]["ready"]
    assert models["core"]["versions"] == [{"version": "1", "state": "READY"}]


def test_health_and_metadata_pass_through(demo: httpx.Client) -> None:
    assert demo.get("/v2/health/live").status_code == 200
    assert demo.get("/v2/health/ready").status_code == 200
    assert demo.get("/v2/models/ensemble/ready").status_code == 200
    metadata = demo.get("/v2/models/ensemble").json()
    assert [tensor["name"] for tensor in metadata["inputs"]] == ["image"]


@pytest.mark.fault("a model is unloaded without the gateway's knowledge")
def test_an_unloaded_model_is_not_unknown(demo: httpx.Client) -> None:
    assert demo.post("/v2/repository/models/text_ensemble/unload").status_code == 200
    try:
        response = demo.post("/v1/models/text_ensemble/infer", content=b"x", headers=TEXT)
        assert_error(response, 503, "MODEL_NOT_READY", "load it")
    finally:
        assert demo.post("/v2/repository/models/text_ensemble/load").status_code == 200


def test_the_full_reason_is_in_the_log_under_the_request_id(demo_triton: EmbeddedTriton) -> None:
    (port,) = free_ports(1)
    environment = {"GATEWAY_TRITON_URLS": demo_triton.options.url, "GATEWAY_LOG_FORMAT": "json"}
    with Command("serve", "--port", str(port), environment=environment) as serve:
        serve.wait_for("serving")
        url = f"http://127.0.0.1:{port}/v1/models/ensemble/infer"
        httpx.post(url, content=b"junk", headers={**PNG, "X-Request-ID": "find-me"}, timeout=60)
        line = json.loads(serve.wait_for("Triton returned status"))
    assert line["request_id"] == "find-me"
    assert "in ensemble 'ensemble', the image cannot be decoded" in line["message"]


@pytest.mark.fault("forms that are truncated or have 2,000 fields, a file called ../../etc/passwd")
def test_a_large_form_leaves_no_file(demo_triton: EmbeddedTriton, tmp_path: Path) -> None:
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


def test_curl_without_a_content_type_is_told_what_to_add(demo: httpx.Client) -> None:
    headers = {"Content-Type": "application/x-www-form-urlencoded"}
    response = demo.post("/v1/models/text_ensemble/infer", content=b"hi", headers=headers)
    assert_error(response, 415, "UNSUPPORTED_BODY", "-H 'Content-Type: …'")


def test_a_model_is_unloaded_and_loaded_again(demo: httpx.Client) -> None:
    def state() -> str:
        index = demo.post("/v2/repository/index").json()
        found = [entry for entry in index if entry["name"] == "text_postprocessing"]
        return str(found[0].get("state"))

    assert demo.post("/v2/repository/models/text_ensemble/unload").status_code == 200
    assert demo.post("/v2/repository/models/text_ensemble/load").status_code == 200
    assert state() == "READY"
    assert embedding(demo, "back again").shape == (384,)


def test_loading_what_is_not_there_is_404(demo: httpx.Client) -> None:
    response = demo.post("/v2/repository/models/nobody/load")
    assert_error(response, 404, "MODEL_NOT_FOUND", "'nobody'")


def test_a_load_may_not_bring_code(demo: httpx.Client) -> None:
    for name in ("config", "file:1/model.py"):
        body = {"parameters": {name: "e30="}}
        response = demo.post("/v2/repository/models/ensemble/load", json=body)
        assert response.status_code == 403
        assert response.json()["code"] == "FORBIDDEN"
        assert "GATEWAY_MODEL_UPLOADS=code" in response.json()["error"]


@pytest.mark.fault("a load that includes code, without permission")
def test_two_equal_keys_do_not_get_code_past_the_guard(demo: httpx.Client) -> None:
    """Triton would read the first, orjson reads the last."""
    body = '{"parameters": {"config": "{}"}, "parameters": {}}'
    response = demo.post("/v2/repository/models/ensemble/load", content=body)
    assert response.status_code == 200
    assert demo.get("/v2/models/ensemble/config").json()["platform"] == "ensemble"


def test_the_metrics_page_is_one_page(demo: httpx.Client) -> None:
    demo.post("/v1/models/ensemble/infer", content=SEVEN, headers=PNG)
    page = demo.get("/metrics").text
    kinds = [line.split()[2] for line in page.splitlines() if line.startswith("# TYPE")]
    assert len(kinds) == len(set(kinds))
    assert 'nv_inference_request_success{replica="127.0.0.1:' in page
    assert "gateway_request_duration_seconds_bucket{" in page


def test_the_images_of_the_documentation_are_small() -> None:
    sizes = {path.name: path.stat().st_size for path in Path(IMAGES).glob("*") if path.is_file()}
    assert sizes["seven.png"] < 10_000
