"""The Python client with a real gateway and the real tritonserver; other servers only for their faults."""

from __future__ import annotations

import asyncio
import io
import json
import pickle
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import trustme
from PIL import Image

from gateway.client import AsyncClient, Body, Client, GatewayError, InferResult
from gateway.client.batches import BatchReader
from gateway.client.errors import CONNECTION_LOST, INVALID_RESPONSE, TIMEOUT, UNREACHABLE
from tests.support.certificates import server_context
from tests.support.certificates import serving as serving_over_tls
from tests.support.gateway_forks import run_gateway
from tests.support.keys import INFER, entry, written
from tests.support.measurements import assert_number
from tests.support.metrics import metric
from tests.support.model_zoo.zoo import Zoo
from tests.support.servers import ROOT, GatewayProcess, gateway
from tests.support.wait import wait_until

# Beside httpx, which is imported by the first client, and NumPy, by the first array.
OWN_MODULES = ("gateway", "gateway.client", "gateway.media_types")
PIXELS = np.arange(6 * 4 * 3, dtype=np.uint8).reshape(6, 4, 3)
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
    assert not {"httpx", "numpy", "anyio"} & set(modules)
    own = {name for name in modules if name.partition(".")[0] == "gateway"}
    assert {name for name in own if not name.startswith("gateway.client.")} == set(OWN_MODULES)
    shortest_s = min(float(result.stdout.split()[0]) for result in results)
    assert_number("import", shortest_s * 1000, "ms", at_most=150)


def test_image_is_a_path_bytes_an_image_of_pillow_or_an_array(gw: Client, tmp_path: Path) -> None:
    path = tmp_path / "image.png"
    path.write_bytes(png(PIXELS))
    for value in (path, path.read_bytes(), memoryview(path.read_bytes()), Image.open(path)):
        result = gw.infer("nhwc", value)
        assert np.array_equal(result["Y"], PIXELS.astype(np.float32)), type(value)
        assert result["Y"].dtype == np.float32
    assert gw.infer("nhwc", Image.open(path).convert("CMYK"))["Y"].shape == (6, 4, 3)
    assert gw.infer("nhwc", path, parameters={"note": 1})["Y"].shape == (6, 4, 3)
    batch = gw.infer("nhwc", [path, Image.open(path), path.read_bytes()])
    assert batch["Y"].shape == (3, 6, 4, 3)
    assert gw.infer("nhwc", PIXELS.astype(np.float32))["Y"].shape == (6, 4, 3)
    assert gw.infer("nhwc", [PIXELS.astype(np.float32)] * 2)["Y"].shape == (2, 6, 4, 3)


def test_inputs_are_passed_by_name_as_arrays_lists_or_both(gw: Client) -> None:
    ints = np.array([1, 2], np.int32)
    for inputs in (
        {"A": ints, "B": ints},
        {"A": ints, "B": [1, 2]},
        {"A": [1, 2], "B": (1, 2)},
    ):
        result = gw.infer("pair", **inputs)
        assert result["PRODUCT"].tolist() == [1, 4]
        assert result["PRODUCT"].dtype == np.int32
        assert gw.infer("pair", inputs).keys() == {"SUM", "PRODUCT"}
        assert gw.infer("pair", inputs, parameters={"note": 1})["SUM"].tolist() == [2, 4]
    assert gw.infer("optional", [1.0, 2.0], FACTOR=3)["Y"].tolist() == [3, 6]
    with pytest.raises(TypeError, match="FACTOR, OFFSET: pass it by name"):
        gw.infer("optional", 1.0, X=[1.0])
    with pytest.raises(TypeError, match="cannot be a object"):
        gw.infer("optional", object())
    with pytest.raises(TypeError, match="needs inputs"):
        gw.infer("optional")


def test_outputs_are_arrays_texts_bytes_and_what_json_contains(gw: Client) -> None:
    assert gw.infer("single_BYTES", "grüße").text == "grüße"
    assert gw.infer("single_BYTES", ["grüße"]).text == "grüße"
    assert gw.infer("single_BYTES", ["a", "b"])["Y"] == ["a", "b"]
    assert gw.infer("batched_BYTES", np.array([["a", "bc"]]))["Y"] == [["a", "bc"]]
    assert isinstance(gw.infer("not_utf8", "x")["Y"], bytes)
    assert gw.infer("json", '{"a": [1, null]}')["Y"] == {"got": '{"a": [1, null]}'}
    assert gw.infer("picture", 4)["PNG"].startswith(b"\x89PNG")
    widened = gw.infer("batched_BF16", [[1.0, -2.5]])["Y"]
    assert widened.dtype == np.float32
    assert widened.tolist() == [[1.0, -2.5]]
    classes = gw.infer("classes", [0.1, 0.7, 0.2], classification=1)["SCORES"]
    assert classes == [{"score": pytest.approx(0.7), "index": 1, "label": "dog"}]
    with pytest.raises(ValueError, match="0 outputs are texts"):
        _ = gw.infer("pair", A=[1, 2], B=[1, 2]).text


def test_without_arrays_numbers_are_lists(url: str) -> None:
    with Client(url, arrays=False) as client:
        result = client.infer("pair", A=[1, 2], B=[1, 2])
        assert dict(result) == {"SUM": [2, 4], "PRODUCT": [1, 4]}
        assert (result.model, result.version, len(result.id)) == ("pair", "1", 32)
        assert client.infer("vector_FP32", [1.5], version=1)["Y"] == [1.5]
        body = Body(b'{"inputs": [2.5]}', "application/json")
        assert client.infer("vector_FP32", body)["Y"] == [2.5]


def test_result_says_which_version_answered_and_how_long_it_took(gw: Client) -> None:
    result = gw.infer("sleeping", 0.1, headers={"X-Request-ID": "mine"})
    assert (result.model, result.version, result.id) == ("sleeping", "1", "mine")
    assert 0.1 <= result.elapsed_s < 60
    assert "sleeping version 1" in result._repr_html_()
    picture = gw.infer("picture", 4)._repr_html_()
    assert '<img src="data:image/png;base64,' in picture
    text = gw.infer("single_BYTES", "<script>")._repr_html_()
    assert "&lt;script&gt;" in text
    scores = gw.infer("classes", [0.1, 0.7, 0.2], classification=2)._repr_html_()
    assert "dog <meter" in scores


def test_error_has_the_sentence_the_code_and_the_request(gw: Client, url: str) -> None:
    with pytest.raises(GatewayError, match="'nonesuch' is not found") as caught:
        gw.infer("nonesuch", "x")
    assert (caught.value.code, caught.value.status) == ("MODEL_NOT_FOUND", 404)
    assert len(caught.value.request_id) == 32
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.code) == (str(caught.value), "MODEL_NOT_FOUND")
    with pytest.raises(GatewayError) as caught:
        gw.model("pair?a=b")  # a name, and not a path with a query
    assert caught.value.status == 404
    with pytest.raises(GatewayError) as caught:
        gw.infer("sleeping", 5.0, timeout_s=0.2)
    assert caught.value.code == "DEADLINE_PASSED"
    with pytest.raises(GatewayError, match="Connection refused") as caught:
        Client("http://127.0.0.1:9", retries=0).models()
    assert (caught.value.code, caught.value.status) == (UNREACHABLE, 0)
    for wrong in ("ftp://x", "http://user@host", "http://host:99999"):
        with pytest.raises(ValueError, match="URL"):
            Client(wrong)
    for name, version in (("", ""), ("..", ""), ("pair", "..")):
        with pytest.raises(ValueError, match="is not a model"):
            gw.delete(name, version)
    for value in ("grüße", "two\nlines"):
        with pytest.raises(ValueError, match=r"ascii|invalid"):
            gw.infer("single_BYTES", "x", headers={"X-Split-Key": value})
    with pytest.raises(GatewayError, match="cannot be read: No such file"):
        gw.infer("nhwc", Path("nothing.png"))


def test_models_are_listed_and_described(gw: Client) -> None:
    listed = {model.name: model for model in gw.models()}
    assert listed["pair"].is_ready
    assert listed["pair"].versions == ("1",)
    assert not listed["managed"].is_ready
    model = gw.model("optional")
    described = [(tensor.name, tensor.datatype, tensor.shape) for tensor in model.inputs]
    assert described[:2] == [("X", "FP32", (-1,)), ("FACTOR", "FP32", (1,))]
    assert [tensor.is_optional for tensor in model.inputs] == [False, True, True]
    assert model.document["curl"].startswith("curl ")
    assert gw.request("GET", "/readyz")["ready"] is True
    assert gw.request("GET", "/v2/health/ready") == {}
    with pytest.raises(GatewayError, match="has no field 'models'"):
        gw.request("GET", "/readyz")["models"]


def test_model_is_loaded_awaited_and_unloaded(gw: Client) -> None:
    assert gw.load("scores")["model"] == "scores"
    gw.wait_ready("scores", timeout_s=60)
    gw.unload("scores")
    with pytest.raises(GatewayError, match=r"scores is not ready after 0\.3 s") as caught:
        gw.wait_ready("scores", timeout_s=0.3)
    assert caught.value.code == TIMEOUT
    with pytest.raises(GatewayError, match="not found") as caught:
        gw.wait_ready("nonesuch", timeout_s=60)
    assert caught.value.status == 404


def requests_in_flight(url: str) -> float:
    """Return the number of requests in progress, without the one that asks."""
    with httpx.Client(base_url=url) as client:
        return metric(client, 'gateway_requests_in_flight{route="/v1"}') - 1


def test_stream_yields_each_response_and_ends_with_the_iteration(gw: Client, url: str) -> None:
    pieces = list(gw.stream("ticking", COUNT=3, SECONDS=0.0))
    assert [piece["NUMBER"].tolist() for piece in pieces] == [[0], [1], [2]]
    assert {piece["NUMBER"].dtype for piece in pieces} == {np.dtype(np.int32)}
    with pytest.raises(GatewayError) as caught:
        list(gw.stream("ticking", COUNT=-2, SECONDS=0.0))  # it fails after two responses
    assert caught.value.code == "MODEL_FAULT"
    for piece in gw.stream("ticking", COUNT=1000, SECONDS=0.05):
        assert piece["NUMBER"].tolist() == [0]
        assert requests_in_flight(url) == 1
        break
    # The stream would last for 50 seconds.
    wait_until(lambda: requests_in_flight(url) == 0)
    with pytest.raises(GatewayError, match="is decoupled") as caught:
        gw.infer("ticking", COUNT=1, SECONDS=0.0)
    assert caught.value.status == 422


async def test_async_client_has_the_same_calls(url: str) -> None:
    async with AsyncClient(url) as client:
        assert (await client.infer("pair", A=[1, 2], B=np.array([1, 2])))["SUM"].tolist() == [2, 4]
        assert (await client.model("pair")).max_batch_size == 8
        assert "pair" in {model.name for model in await client.models()}
        await client.wait_ready("pair")
        assert (await client.request("GET", "/readyz"))["ready"]
        page = b"".join([data async for data in client.download("/metrics")])
        assert b"gateway_" in page
        pieces = [piece async for piece in client.stream("ticking", COUNT=2, SECONDS=0.0)]
        assert [piece["NUMBER"].tolist() for piece in pieces] == [[0], [1]]
        async for _ in client.stream("ticking", COUNT=1000, SECONDS=0.05):
            break
        async for _ in client.infer_many("cancellable", [*[0.0] * 3, *[30.0] * 20], concurrency=3):
            break
        with pytest.raises(GatewayError) as caught:
            await client.infer("sleeping", 5.0, timeout_s=0.2)
        assert caught.value.code == "DEADLINE_PASSED"
        await asyncio.sleep(0)
        await asyncio.to_thread(wait_until, lambda: requests_in_flight(url) == 0)


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
def test_many_are_in_order_and_errors_are_values(gw: Client, tmp_path: Path, batch: int) -> None:
    paths = [tmp_path / f"{number}.png" for number in range(30)]
    for number, path in enumerate(paths):
        path.write_bytes(png(np.full((6, 4, 3), number, np.uint8)))
    paths[3].write_bytes(b"\x89PNG of which nothing else is there")
    paths[9].unlink()
    outcomes = list(gw.infer_many("nhwc", iter(paths), batch=batch, concurrency=4))
    assert len(outcomes) == len(paths)
    for number, outcome in enumerate(outcomes):
        if number in (3, 9):
            assert isinstance(outcome, GatewayError)
            assert outcome.code == {3: "BAD_IMAGE", 9: "UNREADABLE"}[number]
        else:
            assert isinstance(outcome, InferResult)
            assert np.unique(outcome["Y"]).tolist() == [number]


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
    with pytest.raises(ValueError, match="at least 1"):
        gw.infer_many("single_BYTES", [], concurrency=0)


@pytest.mark.long
def test_two_thousand_files_are_in_order(gw: Client, tmp_path: Path) -> None:
    paths = [tmp_path / f"{number:04}.png" for number in range(2000)]
    for number, path in enumerate(paths):
        path.write_bytes(png(np.full((6, 4, 3), number % 251, np.uint8)))
    means = [
        outcome["MEAN"].item()
        for outcome in gw.infer_many("nhwc", paths, batch=8)
        if isinstance(outcome, InferResult)
    ]
    assert means == [number % 251 for number in range(2000)]


def test_iteration_that_ends_cancels_what_runs(gw: Client, url: str) -> None:
    threads = threading.active_count()
    for outcome in gw.infer_many("cancellable", [*[0.0] * 3, *[30.0] * 20], concurrency=3):
        assert isinstance(outcome, InferResult)
        break
    assert threading.active_count() == threads
    wait_until(lambda: requests_in_flight(url) == 0)


@pytest.mark.long
def test_rate_limit_is_waited_for(url: str, zoo_as_written: Zoo, tmp_path: Path) -> None:
    keys = written(tmp_path / "keys.yaml", [entry(INFER, "infer", requests_per_second=4)])
    triton = zoo_as_written.client.get("/v1/replicas").json()["replicas"][0]["address"]
    with (
        gateway(f"http://{triton}", keys_file=str(keys)) as (limited, _),
        Client(str(limited.base_url), key=INFER, arrays=False) as client,
        Client(str(limited.base_url), key=INFER, arrays=False, retries=0) as impatient,
    ):
        texts = [str(number) for number in range(12)]
        assert [client.infer("single_BYTES", text).text for text in texts] == texts
        assert client.retry_count > 0
        with pytest.raises(GatewayError, match="may send 4 requests a second") as caught:
            _ = [impatient.infer("single_BYTES", text) for text in texts]
        assert caught.value.status == 429
        assert caught.value.retry_after_s is not None
        with (
            Client(str(limited.base_url), key="wrong") as stranger,
            pytest.raises(GatewayError) as caught,
        ):
            stranger.models()
        assert (caught.value.code, caught.value.status) == ("UNAUTHENTICATED", 401)


@pytest.mark.long
def test_gateway_that_is_killed_is_reported_or_awaited(zoo_as_written: Zoo) -> None:
    zoo_as_written.load("sleeping")
    triton = zoo_as_written.client.get("/v1/replicas").json()["replicas"][0]["address"]
    process = GatewayProcess({"GATEWAY_TRITON_URLS": f"http://{triton}"})
    process.start()
    try:
        with (
            Client(process.url, arrays=False) as client,
            Client(process.url, arrays=False, retries=0) as impatient,
            ThreadPoolExecutor() as pool,
        ):
            client.wait_ready("sleeping")
            awaited = pool.submit(client.infer, "sleeping", 3.0)
            reported = pool.submit(impatient.infer, "sleeping", 3.0)
            wait_until(lambda: requests_in_flight(process.url) == 2)
            process.kill()
            assert isinstance(error := reported.exception(), GatewayError)
            assert error.code == CONNECTION_LOST
            process.start()
            assert awaited.result()["Y"] == 3.0
            assert client.retry_count > 0
    finally:
        process.stop()


class Script(BaseHTTPRequestHandler):
    """Answers each request with the next step of the server's script, and keeps its headers."""

    protocol_version = "HTTP/1.1"
    server: ScriptedServer

    def do_POST(self) -> None:
        self.server.received.append(dict(self.headers))
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.steps.pop(0)(self)

    def do_GET(self) -> None:
        self.do_POST()

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)


class ScriptedServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, *steps: Callable[[Script], None]) -> None:
        super().__init__(("127.0.0.1", 0), Script)
        self.steps = list(steps)
        self.received: list[dict[str, str]] = []
        self.url = f"http://127.0.0.1:{self.server_port}"


@contextmanager
def serving(*steps: Callable[[Script], None]) -> Iterator[ScriptedServer]:
    with ScriptedServer(*steps) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


def refuse(status: int, **headers: str) -> Callable[[Script], None]:
    error = b'{"error": "not now", "code": "X", "request_id": "r"}'
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


def damage(content: bytes, content_type: str) -> Callable[[Script], None]:
    return lambda script: script.answer(200, content, Content_Type=content_type)


@pytest.mark.parametrize(
    ("content", "content_type"),
    [
        (b'{"outputs": {"Y": {"b64": "a"}}}', "application/json"),
        (b'{"outputs": []}', "application/json"),
        (b'{"outputs": {"Y": ' + b"[" * 100_000, "application/json"),
        (b"PK of which nothing else is there", "application/x-npz"),
        (b"", "application/x-npz"),
    ],
    ids=("base64", "no object", "many levels", "no archive", "empty"),
)
def test_damaged_response_is_an_error_of_the_client(content: bytes, content_type: str) -> None:
    with serving(damage(content, content_type)) as server, pytest.raises(GatewayError) as caught:
        infer_sync(server.url)
    assert caught.value.code == INVALID_RESPONSE


def test_model_that_is_never_ready_is_awaited_until_the_timeout() -> None:
    model = b'{"name": "m", "ready": false, "versions": []}'
    with serving(*[lambda script: script.answer(200, model)] * 9) as server:
        with Client(server.url) as client, pytest.raises(GatewayError, match="is not ready"):
            client.wait_ready("m", timeout_s=0.6)
        assert len(server.received) < 9


async def infer_async(url: str, **options: Any) -> InferResult:
    async with AsyncClient(url, arrays=False, timeout_s=5) as client:
        return await client.infer("m", "x", **options)


def infer_sync(url: str, **options: Any) -> InferResult:
    with Client(url, arrays=False, timeout_s=5) as client:
        return client.infer("m", "x", **options)


def run_async(url: str, **options: Any) -> InferResult:
    return asyncio.run(infer_async(url, **options))


@pytest.mark.parametrize("infer", [infer_sync, run_async])
def test_retries_keep_the_idempotency_key_and_the_deadline(
    infer: Callable[..., InferResult],
) -> None:
    steps = refuse(503, Retry_After="0"), refuse(502), cut, refuse(429, Retry_After="0"), answer
    with serving(*steps) as server:
        assert infer(server.url)["Y"] == 1
    timeouts = [float(received["x-request-timeout"]) for received in server.received]
    (key,) = {received["idempotency-key"] for received in server.received}
    assert len(key) == 32
    with serving(answer) as server:
        infer(server.url, headers={"Idempotency-Key": "mine"})
    assert server.received[0]["idempotency-key"] == "mine"
    assert server.received[0]["user-agent"].startswith("triton-gateway-client/")
    assert timeouts == sorted(timeouts, reverse=True)
    assert len(timeouts) == 5


@pytest.mark.parametrize("infer", [infer_sync, run_async])
def test_requests_that_cannot_be_repeated_are_not(infer: Callable[..., InferResult]) -> None:
    sequence = {"parameters": {"sequence_id": 1}}
    for step, options in (
        (refuse(307, Location="/elsewhere"), {}),  # another host would get the inputs
        (refuse(500), {}),  # the model failed
        (refuse(502), sequence),  # the step may have been executed
        (cut, sequence),
        (refuse(503, Retry_After="6"), {}),  # later than the deadline
    ):
        with serving(step, answer) as server, pytest.raises(GatewayError):
            infer(server.url, **options)
        assert len(server.received) == 1


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
    tmp_path: Path, path: str, content: Callable[[Script], None], requests: int, words: str
) -> None:
    listed = json.dumps({"files": [{"path": path, "bytes": 100, "sha256": "0" * 64}]}).encode()
    with serving(lambda script: script.answer(200, listed), content) as server:
        ran = run_gateway("pull", "m", "--url", server.url, "--output", str(tmp_path))
    assert ran.returncode == 1
    assert words in ran.stderr
    assert list(tmp_path.iterdir()) == []
    assert len(server.received) == requests


@pytest.mark.parametrize("row", [b'{"error": 5}', b'{"base64": 1}', b'{"response": 1}', b"[]"])
def test_damaged_row_of_a_batch_is_an_error_of_the_client(row: bytes) -> None:
    reader = BatchReader("j", None)
    assert list(reader.feed(row)) == []
    with pytest.raises(GatewayError) as caught:
        list(reader.feed(b"\n"))
    assert caught.value.code == INVALID_RESPONSE


def test_server_that_is_not_a_gateway_is_named() -> None:
    page = b"<html>"
    with serving(*[lambda script: script.answer(200, page)] * 3) as server:
        with pytest.raises(GatewayError, match="is not a gateway") as caught:
            infer_sync(server.url)
        assert caught.value.code == INVALID_RESPONSE
        with (
            Client(server.url, arrays=False) as client,
            pytest.raises(GatewayError, match="is not a stream"),
        ):
            next(client.stream("m", "x"))
    with serving(refuse(418)) as server, pytest.raises(GatewayError, match="not now") as caught:
        infer_sync(server.url)
    assert (caught.value.code, caught.value.status) == ("X", 418)
