"""The Python client with a real gateway and the real tritonserver; other servers only for their faults."""

from __future__ import annotations

import asyncio
import io
import json
import pickle
import queue
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import trustme
from PIL import Image

from gateway.client import AsyncClient, Body, Client, GatewayError, InferResult
from gateway.client.connection import find_options
from gateway.client.errors import CONNECTION_LOST, INVALID_RESPONSE, TIMEOUT, UNREACHABLE
from gateway.client.jobs import decode_row
from tests.interface import sync_client
from tests.support.certificates import server_context
from tests.support.certificates import serving as serving_over_tls
from tests.support.gateway_forks import run_gateway
from tests.support.measurements import assert_number
from tests.support.metrics import metric
from tests.support.model_zoo.zoo import Zoo
from tests.support.scripted_server import Script, Step, respond, serving
from tests.support.servers import ROOT
from tests.support.wait import wait_until

# Beside httpx, which is imported by the first client, and NumPy, by the first array.
OWN_MODULES = ("gateway", "gateway.client", "gateway.media_types")
MODELS = (
    "pair", "optional", "nhwc", "batched_BF16", "batched_FP32", "batched_BYTES", "single_BYTES", "not_utf8",
    "json", "picture", "classes", "sleeping", "ticking", "cancellable", "vector_FP32",
)  # fmt: skip


@pytest.fixture(scope="module")
def url(zoo_as_written: Zoo) -> str:
    zoo_as_written.load(*MODELS)
    return str(zoo_as_written.client.base_url).rstrip("/")


@pytest.fixture(scope="module")
def gw(url: str) -> Iterator[Client]:
    with Client(url) as client:
        yield client


def png(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with an image."""
    (tmp_path / "image.png").write_bytes(PNG)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_import_loads_nothing_of_the_server_and_is_fast() -> None:
    program = (
        "import sys, time; started_at = time.perf_counter(); import gateway.client; "
        "print(time.perf_counter() - started_at, *sys.modules)"
    )
    results = [
        subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
        for _ in range(3)
    ]
    (_, *modules), *_ = [result.stdout.split() for result in results]
    assert not {"httpx", "numpy", "anyio", "tritonclient"} & set(modules)
    own = {name for name in modules if name.partition(".")[0] == "gateway"}
    assert {name for name in own if not name.startswith("gateway.client.")} == set(OWN_MODULES)
    shortest_s = min(float(result.stdout.split()[0]) for result in results)
    assert_number("import", shortest_s * 1000, "ms", at_most=150)


@pytest.mark.parametrize("source", sync_client.MODULES)
def test_synchronous_client_is_generated_from_the_other(source: str) -> None:
    generated = sync_client.CLIENT / sync_client.MODULES[source]
    assert generated.read_text() == sync_client.generate(sync_client.CLIENT / source), "make client"


PIXELS = np.arange(6 * 4 * 3, dtype=np.uint8).reshape(6, 4, 3)
PNG = png(PIXELS)
FLOATS = PIXELS.astype("f4")
IMAGE = Image.fromarray(PIXELS)
TWO = np.array([1, 2], "i4")
PAIR = {"SUM": np.array([2, 4], "i4"), "PRODUCT": np.array([1, 4], "i4")}
NOTE = {"parameters": {"note": 1}}
DOG = {"score": pytest.approx(0.7), "index": 1, "label": "dog"}
# A model, its value or the first inputs by name, the other ones and options, and what it returns.
INFERENCES: list[tuple[str, Any, dict[str, Any], dict[str, Any]]] = [
    ("nhwc", Path("image.png"), {}, {"Y": FLOATS}),
    ("nhwc", PNG, {}, {"Y": FLOATS}),
    ("nhwc", memoryview(PNG), {}, {"Y": FLOATS}),
    ("nhwc", IMAGE, {}, {"Y": FLOATS}),
    ("nhwc", IMAGE.convert("RGBA").convert("CMYK").convert("RGB"), {}, {"Y": FLOATS}),
    ("nhwc", Path("image.png"), NOTE, {"Y": FLOATS}),
    ("nhwc", [Path("image.png"), IMAGE, PNG], {}, {"Y": np.stack([FLOATS] * 3)}),
    ("nhwc", FLOATS, {}, {"Y": FLOATS}),
    ("nhwc", [FLOATS, FLOATS], {}, {"Y": np.stack([FLOATS] * 2)}),
    ("pair", None, {"A": TWO, "B": TWO}, PAIR),
    ("pair", None, {"A": TWO, "B": [1, 2]}, PAIR),
    ("pair", None, {"A": [1, 2], "B": (1, 2)}, PAIR),
    ("pair", {"A": TWO, "B": TWO}, {}, PAIR),
    ("pair", {"A": TWO, "B": [1, 2]}, NOTE, PAIR),
    ("optional", [1.0, 2.0], {"FACTOR": 3}, {"Y": np.array([3, 6], "f4")}),
    ("vector_FP32", Body(b'{"inputs": [2.5]}', "application/json"), {}, {"Y": np.array([2.5], "f4")}),
    ("vector_FP32", [1.5], {"version": 1}, {"Y": np.array([1.5], "f4")}),
    ("batched_BF16", [[1.0, -2.5]], {}, {"Y": np.array([[1.0, -2.5]], "f4")}),
    ("single_BYTES", "grüße", {}, {"Y": "grüße"}),
    ("single_BYTES", ["a", "b"], {}, {"Y": ["a", "b"]}),
    ("batched_BYTES", np.array([["a", "bc"]]), {}, {"Y": [["a", "bc"]]}),
    ("batched_BYTES", np.array([["a", "bc"]], object), {}, {"Y": [["a", "bc"]]}),
    ("not_utf8", "x", {}, {"Y": b"\xff\xfex"}),
    ("json", '{"a": [1, null]}', {}, {"Y": {"got": '{"a": [1, null]}'}}),
    ("classes", [0.1, 0.7, 0.2], {"classification": 1}, {"SCORES": [DOG]}),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(INFERENCES)))
def test_values_become_inputs_and_outputs_values(gw: Client, number: int) -> None:
    model, value, named, outputs = INFERENCES[number]
    result = gw.infer(model, value, **named)
    for name, expected in outputs.items():
        if isinstance(expected, np.ndarray):
            np.testing.assert_array_equal(result[name], expected, strict=True)
        else:
            assert result[name] == expected


def test_without_arrays_numbers_are_lists_and_a_result_says_what_answered(url: str) -> None:
    with Client(url, arrays=False) as client:
        result = client.infer("pair", A=[1, 2], B=[1, 2])
        assert result == {"SUM": [2, 4], "PRODUCT": [1, 4]}
        assert (result.model, result.version, len(result.id)) == ("pair", "1", 32)
        assert client.infer("single_BYTES", ["text"]).text == "text"
        slow = client.infer("sleeping", 0.1, headers={"X-Request-ID": "mine"})
        assert (slow.id, 0.1 <= slow.elapsed_s < 60) == ("mine", True)


# A call, its error, and the whole sentence, with the code and status of a `GatewayError`.
FAILURES: list[tuple[Callable[[Client], Any], type[Exception], str]] = [
    (lambda gw: gw.infer("nonesuch", 1), GatewayError, ("MODEL_NOT_FOUND 404 Request for unknown model: "
     "'nonesuch' is not found; models() lists the models")),
    (lambda gw: gw.infer("managed", 1), GatewayError, ("MODEL_NOT_READY 503 model 'managed' is not ready; "
     "load it with load(), or try again when it is loaded")),
    (lambda gw: gw.model("managed"), GatewayError, ("MODEL_NOT_READY 503 model 'managed' is not ready; load "
     "it with load(), or try again when it is loaded")),
    (lambda gw: gw.model("pair?a=b"), GatewayError, ("NOT_FOUND 404 Request for unknown model: "
     "'pair%3Fa=b' is not found")),
    (lambda gw: gw.infer("sleeping", 5.0, timeout_s=0.2), GatewayError, ("DEADLINE_PASSED 504 no response "
     "within 0.X s; pass a longer timeout_s")),
    (lambda gw: gw.infer("ticking", COUNT=1, SECONDS=0.0), GatewayError, ("REFUSED_BY_MODEL 422 model "
     "'ticking' is decoupled: it returns any number of responses; stream() yields them")),
    (lambda gw: gw.infer("nhwc", "image.png"), GatewayError, ("DOES_NOT_FIT_MODEL 422 input 'X' expects "
     "numbers (FP32 [6,4,3], e.g. [[[0.5, …], …], …]); got the string 'image.png'; pass a file as a Path or "
     "bytes; 'image.png' is a file: pass Path('image.png')")),
    (lambda gw: gw.infer("nhwc", X="image.png", verison=2), GatewayError, ("DOES_NOT_FIT_MODEL 422 the model "
     "has no input 'verison'; the model's inputs are X (FP32 [6,4,3]); did you mean the option version?")),
    (lambda gw: gw.infer("nhwc", Path("no.png")), GatewayError, ("UNREADABLE None no.png cannot be read: No "
     "such file or directory")),
    (lambda gw: gw.request("GET", "/readyz")["a"], GatewayError, ("INVALID_RESPONSE None the response of "
     "URL/readyz has no field 'a'; check that the URL is the gateway's")),
    (lambda _: Client("http://127.0.0.1:9", retries=0).models(), GatewayError, ("UNREACHABLE None cannot "
     "reach the gateway at http://127.0.0.1:9: Connection refused")),
    (lambda gw: gw.infer("optional", 1.0, X=[1.0]), TypeError, ("a value without a name could be FACTOR, "
     "OFFSET: pass it by name")),
    (lambda gw: gw.infer("optional", object()), TypeError, ("an input cannot be a object; pass a text, "
     "numbers, bytes, a path, an image of Pillow, an array, or lists of them")),
    (lambda gw: gw.infer("optional"), TypeError, ("an inference needs inputs: pass a value, or values by "
     "input name")),
    (lambda gw: gw.models()[0].inputs, AttributeError, ("a list does not describe models: "
     "model('all_optional').inputs does")),
    (lambda gw: gw.infer("pair", A=[1, 2], B=[1, 2]).text, ValueError, ("0 outputs are texts; choose one of "
     "SUM, PRODUCT")),
    (lambda gw: gw.infer_many("pair", [], concurrency=0), ValueError, ("batch and concurrency must be at "
     "least 1")),
    (lambda gw: gw.delete("pair", ".."), ValueError, "'pair' with version '..' is not a model"),
    (lambda gw: gw.delete(""), ValueError, "'' with version '' is not a model"),
    (lambda gw: gw.infer("pair", 1, headers={"X-A": "a\nb"}), ValueError, ("the request is invalid: Illegal "
     "header value b'a\\nb'")),
    (lambda _: Client("ftp://x"), ValueError, ("'ftp://x' is not a valid gateway URL; example: "
     "http://localhost:8080")),
    (lambda _: Client("user@host"), ValueError, ("the gateway URL contains a user name; the gateway expects "
     "an API key")),
    (lambda _: Client(key="a\nb"), ValueError, ("the key contains invalid characters; a key is printable "
     "ASCII")),
    (lambda _: Client("https://x", ca="none.pem"), ValueError, ("cannot read the certificates of none.pem: "
     "No such file or directory")),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(FAILURES)))
def test_failure_is_one_sentence_for_python_at_once(gw: Client, url: str, number: int) -> None:
    call, kind, sentence = FAILURES[number]
    retries = gw.retry_count
    with pytest.raises(kind) as caught:
        call(gw)
    error = caught.value
    details = f"{error.code} {error.status} " if isinstance(error, GatewayError) else ""
    text = re.sub(r"0\.1\d+ s", "0.X s", f"{details}{error}")  # of the time limit, 0.2 s
    assert text.replace(url, "URL") == sentence
    assert gw.retry_count == retries
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), vars(again)) == (str(error), vars(error))


def test_models_are_described_loaded_and_awaited(gw: Client) -> None:
    listed = {model.name: (model.is_ready, model.versions) for model in gw.models()}
    assert (listed["pair"], listed["managed"][0]) == ((True, ("1",)), False)
    model = gw.model("optional")
    described = [(each.name, each.datatype, each.shape, each.is_optional) for each in model.inputs]
    assert described[:2] == [("X", "FP32", (-1,), False), ("FACTOR", "FP32", (1,), True)]
    assert (model.is_decoupled, gw.model("pair").max_batch_size) == (False, 8)
    assert gw.load("scores")["model"] == "scores"
    gw.wait_ready("scores", timeout_s=60)
    gw.unload("scores")
    with pytest.raises(GatewayError, match=r"scores is not ready after 0\.3 s") as caught:
        gw.wait_ready("scores", timeout_s=0.3)
    assert caught.value.code == TIMEOUT
    with pytest.raises(GatewayError, match="not found"):
        gw.wait_ready("nonesuch", timeout_s=60)


def requests_in_flight(url: str) -> float:
    """Return the number of requests in progress, without the one that asks."""
    with httpx.Client(base_url=url) as client:
        return metric(client, 'gateway_requests_in_flight{route="/v1"}') - 1


def test_stream_yields_each_response_and_ends_with_the_iteration(gw: Client, url: str) -> None:
    pieces = [piece["NUMBER"] for piece in gw.stream("ticking", COUNT=3, SECONDS=0.0)]
    np.testing.assert_array_equal(pieces, np.array([[0], [1], [2]], "i4"), strict=True)
    with pytest.raises(GatewayError) as caught:
        list(gw.stream("ticking", COUNT=-2, SECONDS=0.0))  # it fails after two responses
    assert caught.value.code == "MODEL_FAULT"
    for _ in gw.stream("ticking", COUNT=1000, SECONDS=0.05):
        assert requests_in_flight(url) == 1
        break
    wait_until(lambda: requests_in_flight(url) == 0)  # the stream would last for 50 seconds


async def test_async_client_has_the_same_calls(url: str) -> None:
    async with AsyncClient(url) as client:
        assert (await client.infer("pair", A=[1, 2], B=TWO))["SUM"].tolist() == [2, 4]
        assert (await client.infer("nhwc", Path("image.png")))["Y"].shape == (6, 4, 3)
        assert await client.request("GET", "/v2/health/ready") == {}
        page = b"".join([data async for data in client.download("/metrics")])
        assert b"gateway_" in page
        pieces = [piece async for piece in client.stream("ticking", COUNT=2, SECONDS=0.0)]
        assert [piece["NUMBER"].tolist() for piece in pieces] == [[0], [1]]
        async for _ in client.stream("ticking", COUNT=1000, SECONDS=0.05):
            break
        async for _ in client.infer_many("cancellable", [*[0.0] * 3, *[30.0] * 20], concurrency=3):
            break
        await asyncio.sleep(0)
        await asyncio.to_thread(wait_until, lambda: requests_in_flight(url) == 0)


def test_child_of_a_fork_opens_its_own_connection() -> None:
    program = (
        "import os, sys; from gateway.client import Client; gw = Client(sys.argv[1], arrays=False)\n"
        "gw.infer('m', 1); child = os.fork(); status = os.waitpid(child, 0)[1] if child else 0\n"
        "gw.infer('m', 1); os._exit(status)"
    )
    with serving(answer, answer, answer) as server:
        subprocess.run([sys.executable, "-c", program, server.url], check=True)
    first, of_child, of_parent = [received["connection"] for received in server.received]
    assert first == of_parent != of_child


@pytest.mark.long
async def test_fifty_calls_at_once_share_a_client(gw: Client, url: str) -> None:
    texts = [f"text {number}" for number in range(50)]
    async with AsyncClient(url) as client:
        results = await asyncio.gather(*(client.infer("single_BYTES", text) for text in texts))
    assert [result.text for result in results] == texts
    with ThreadPoolExecutor(50) as pool:
        threads = list(pool.map(lambda text: gw.infer("single_BYTES", text).text, texts))
    assert threads == texts


@pytest.mark.parametrize("batch", [1, 7])
def test_many_are_in_order_and_errors_are_values(gw: Client, folder: Path, batch: int) -> None:
    for number in range(30):
        (folder / f"{number}.png").write_bytes(png(np.full((6, 4, 3), number, np.uint8)))
    (folder / "3.png").write_bytes(b"\x89PNG of which nothing else is there")
    (folder / "9.png").unlink()
    paths = (Path(f"{number}.png") for number in range(30))
    outcomes = [
        outcome.code if isinstance(outcome, GatewayError) else outcome["MEAN"].item()
        for outcome in gw.infer_many("nhwc", paths, batch=batch, concurrency=4)
    ]
    assert outcomes == [{3: "BAD_IMAGE", 9: "UNREADABLE"}.get(each, each) for each in range(30)]


def test_many_take_options_and_a_source_that_waits_for_the_outcomes(gw: Client) -> None:
    outcomes: queue.Queue[Any] = queue.Queue()

    def texts() -> Iterator[str]:
        yield "first"
        yield f"after {outcomes.get(timeout=60)}"

    for outcome in gw.infer_many("single_BYTES", texts(), headers={"X-Request-ID": "mine"}):
        assert isinstance(outcome, InferResult)
        assert outcome.id == "mine"
        outcomes.put(outcome.text)
    assert outcomes.queue[-1] == "after first"


def test_iteration_that_ends_cancels_what_runs(gw: Client, url: str) -> None:
    threads = threading.active_count()
    for _ in gw.infer_many("cancellable", [*[0.0] * 3, *[30.0] * 20], concurrency=3):
        break
    assert threading.active_count() == threads
    wait_until(lambda: requests_in_flight(url) == 0)


def refuse(status: int, code: str = "X", **headers: str) -> Step:
    error = json.dumps({"error": "not now", "code": code, "request_id": "r"}).encode()
    return lambda script: script.answer(status, error, **headers)


def cut(script: Script) -> None:
    script.close_connection = True


def drip(script: Script, status: int = 200) -> None:
    script.send_response(status)
    script.send_header("Content-Length", "1000")
    script.end_headers()
    for _ in range(100):
        script.wfile.write(b" ")
        time.sleep(0.1)


def flood(script: Script, status: int) -> None:
    """Send 256 MiB, or as much as the client takes."""
    script.send_response(status)
    script.end_headers()
    script.close_connection = True
    with suppress(ConnectionError):
        for _ in range(256):
            script.wfile.write(bytes(1 << 20))
        script.server.received.append({"flood": "was read"})


def answer(script: Script) -> None:
    script.answer(200, b'{"outputs": {"Y": 1}}', Content_Type="application/json")


@pytest.mark.parametrize(
    ("content", "content_type"),
    [
        (b'{"outputs": {"Y": {"b64": "a"}}}', "application/json"),
        (b'{"outputs": []}', "application/json"),
        (b'{"outputs": {"Y": ' + b"[" * 100_000, "application/json"),
        (b"[]", "application/json"),
        (b"<html>", "text/html"),
        (b"PK of which nothing else is there", "application/x-npz"),
        (b"", "application/x-npz"),
    ],
    ids=("base64", "no object", "many levels", "list", "page", "no archive", "empty"),
)
def test_damaged_response_is_an_error_of_the_client(content: bytes, content_type: str) -> None:
    is_refused = pytest.raises(GatewayError, match="is not a gateway")
    with serving(respond(content, content_type)) as server, is_refused as caught:
        infer_sync(server.url)
    assert caught.value.code == INVALID_RESPONSE


@pytest.mark.parametrize("row", [b'{"error": 5}', b'{"base64": 1}', b'{"response": 1}', b"[]"])
def test_damaged_row_of_a_batch_is_an_error_of_the_client(row: bytes) -> None:
    with pytest.raises(GatewayError) as caught:
        decode_row(row, "/v1/jobs/j", None)
    assert caught.value.code == INVALID_RESPONSE


def test_answer_that_is_not_a_stream_is_named() -> None:
    is_refused = pytest.raises(GatewayError, match="is not a stream")
    with serving(answer) as server, Client(server.url, arrays=False) as client, is_refused:
        next(client.stream("m", "x"))


async def infer_async(url: str, **options: Any) -> InferResult:
    async with AsyncClient(url, arrays=False, timeout_s=5) as client:
        return await client.infer("m", "x", **options)


def infer_sync(url: str, **options: Any) -> InferResult:
    with Client(url, arrays=False, timeout_s=5) as client:
        return client.infer("m", "x", **options)


def run_async(url: str, **options: Any) -> InferResult:
    return asyncio.run(infer_async(url, **options))


NOT_READY = refuse(503, code="MODEL_NOT_READY", Retry_After="0")
STEPS_OF_A_SEQUENCE = {"parameters": {"sequence_id": 1}}


def list_model(*states: str, **fields: Any) -> Step:
    versions = [{"version": str(number), "state": state} for number, state in enumerate(states, 1)]
    models = [{"name": "other"}, {"name": "m", "versions": versions, "ready": False, **fields}]
    return respond(json.dumps({"models": models}).encode())


# What the server does, the options of the inference, and what this is: a result, or a status.
SCRIPTS: list[tuple[tuple[Step, ...], dict[str, Any], int]] = [
    ((refuse(503, Retry_After="0"), refuse(502), cut, refuse(429, Retry_After="0"), answer), {}, 200),
    ((refuse(307, Location="/elsewhere"),), {}, 307),  # another host would get the inputs
    ((refuse(418),), {}, 418),
    ((refuse(500),), {}, 500),  # the model failed
    ((refuse(502),), STEPS_OF_A_SEQUENCE, 502),  # the step may have been executed
    ((refuse(503, Retry_After="6"),), {}, 503),  # later than the deadline
    ((NOT_READY, list_model("LOADING"), answer), {}, 200),
    ((NOT_READY, list_model(wished="loaded"), answer), {}, 200),
    ((NOT_READY, list_model(declared=True), answer), {}, 200),
    ((NOT_READY, list_model("READY", "LOADING"), answer), {"version": 2}, 200),
    ((NOT_READY, refuse(503), answer), {}, 200),
    ((NOT_READY, list_model("READY", "UNAVAILABLE")), {"version": 2}, 503),
    ((NOT_READY, list_model("UNAVAILABLE")), {}, 503),
    ((NOT_READY, list_model(declared=True, wished="unloaded")), {}, 503),
    ((NOT_READY, respond(b'{"models": []}')), {}, 503),
]  # fmt: skip


@pytest.mark.parametrize("infer", [infer_sync, run_async])
@pytest.mark.parametrize("number", range(len(SCRIPTS)))
def test_request_is_repeated_when_this_is_safe_and_can_help(
    infer: Callable[..., InferResult], number: int
) -> None:
    steps, options, status = SCRIPTS[number]
    with serving(*steps, answer) as server:
        if status == 200:
            assert infer(server.url, **options)["Y"] == 1
        else:
            with pytest.raises(GatewayError) as caught:
                infer(server.url, **options)
            assert caught.value.status == status
        assert len(server.received) == len(steps)
    inferences = [each for each in server.received if "idempotency-key" in each]
    assert len({each["idempotency-key"] for each in inferences}) == 1
    timeouts = [float(each["x-request-timeout"]) for each in inferences]
    assert timeouts == sorted(timeouts, reverse=True)


@pytest.mark.parametrize("infer", [infer_sync, run_async])
def test_lost_step_of_a_sequence_is_not_repeated(infer: Callable[..., InferResult]) -> None:
    with serving(cut, answer) as server, pytest.raises(GatewayError) as caught:
        infer(server.url, headers={"X-Sequence-ID": "1", "Idempotency-Key": "mine"})
    assert (caught.value.code, caught.value.status) == (CONNECTION_LOST, None)
    (received,) = server.received
    assert received["idempotency-key"] == "mine"
    assert received["user-agent"].startswith("triton-gateway-client/")


@pytest.mark.parametrize(
    ("environment", "url", "key"),
    [
        ("", "http://localhost:8080", ""),
        ("TRITON_GATEWAY_URL=http://a TRITON_GATEWAY_KEY=k", "http://a", "k"),
        ("GATEWAY_URL=http://b GATEWAY_KEY=k", "http://b", "k"),
        ("TRITON_GATEWAY_URL=http://a GATEWAY_URL=http://b GATEWAY_KEY=k", "http://a", "k"),
    ],
)
def test_environment_says_which_gateway_is_called(
    environment: str, url: str, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in environment.split():
        monkeypatch.setenv(*variable.split("="))
    options = find_options(None, None, None)
    assert (options.url, options.key) == (url, key)


@pytest.mark.parametrize("infer", [infer_sync, run_async])
def test_proxy_of_the_environment_is_not_used(
    infer: Callable[..., InferResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    with serving(answer) as server:
        assert infer(server.url)["Y"] == 1


@pytest.mark.parametrize(("is_trusted", "code"), [(False, UNREACHABLE), (True, INVALID_RESPONSE)])
async def test_certificate_of_the_gateway_is_checked(
    tmp_path: Path, is_trusted: bool, code: str
) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    ca = tmp_path / "ca.pem" if is_trusted else None
    context = server_context(authority, name="127.0.0.1", wants_client=False)
    async with serving_over_tls(context) as url, AsyncClient(url, ca=ca, retries=0) as client:
        with pytest.raises(GatewayError) as caught:
            await client.models()
    assert caught.value.code == code


@pytest.mark.long
@pytest.mark.parametrize("status", [200, 500])
@pytest.mark.parametrize("infer", [infer_sync, run_async])
def test_response_that_drips_ends_at_the_deadline(
    infer: Callable[..., InferResult], status: int
) -> None:
    started_at = time.monotonic()
    step = partial(drip, status=status)
    with serving(step) as server, pytest.raises(GatewayError) as caught:
        infer(server.url, timeout_s=0.5)
    assert caught.value.code == TIMEOUT
    assert time.monotonic() - started_at < 8  # it would last for 10 s


@pytest.mark.parametrize("infer", [infer_sync, run_async])
def test_error_that_does_not_end_is_not_read(infer: Callable[..., InferResult]) -> None:
    with serving(partial(flood, status=500)) as server, pytest.raises(GatewayError) as caught:
        infer(server.url)
    assert caught.value.status == 500
    assert len(server.received) == 1


@pytest.mark.parametrize(
    ("path", "content", "requests", "words"),
    [
        ("1/model.onnx", partial(flood, status=200), 2, "1/model.onnx is longer than listed"),
        ("1/model.onnx", answer, 2, "1/model.onnx has a wrong checksum"),
        ("../model.onnx", answer, 1, "the gateway listed an unsafe path: '../model.onnx'"),
        ("/model.onnx", answer, 1, "the gateway listed an unsafe path: '/model.onnx'"),
    ],
)
def test_pulled_file_that_is_not_as_listed_is_refused(
    tmp_path: Path, path: str, content: Step, requests: int, words: str
) -> None:
    listed = json.dumps({"files": [{"path": path, "bytes": 100, "sha256": "0" * 64}]}).encode()
    with serving(lambda script: script.answer(200, listed), content) as server:
        ran = run_gateway("pull", "m", "--url", server.url, "--output", str(tmp_path))
    assert ran.returncode == 1
    assert words in ran.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["image.png"]
    assert len(server.received) == requests
