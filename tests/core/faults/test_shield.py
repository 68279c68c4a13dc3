"""What a Triton dies of, or is busy with for minutes, does not reach it; what is like it passes unchanged.

A real tritonserver shows it where 2.51 is concerned; where newer ones are, or where it matters which bytes
reach it, a fake one records them. What upstream has fixed since 24.10 (triton-inference-server/server):

====== =========================================================== =====================================
PR     what a client could do                                      what becomes of it here
====== =========================================================== =====================================
8925   Inference-Header-Content-Length above 2³¹ ends it           400; see `HEADER_LENGTHS`
8770   a body of a million small chunks exhausts its memory        chunks of at least 32 KiB are sent
8411   … and 2.51's stack; so does a list of as many outputs       the same; 10,000 keys are the most
8305   … and 2.51's stack, on every path                           the same
8764   it never frees a compressed body that it refuses            the gateway inflates
8763   a header named like one of its parameters becomes one       such headers are not sent
8676   a shape of more than there is room for is allocated         400
8432   … and any size of JSON is read                              GATEWAY_MAX_BODY_BYTES
8489   texts of 2 GiB overflow a counter                           GATEWAY_MAX_BODY_BYTES is 1 GiB at most
8182   a shape of more than 2⁶³ elements overflows                 400
8174   a shape of more than the body has is allocated              400
8570   10 MB that inflate to 10 GB; weights such as 1e999          413; such weights are not sent
8447   Content-Length above 2³¹ ends it                            GATEWAY_MAX_BODY_BYTES is 1 GiB at most
8427   a model's name with ../ in a load                           404; and loads are for administrators
8267   classes of BYTES divide by 0                                400
8172   JSON of 50,000 levels exhausts its stack                    400 from 1,024 levels on
7787   a file of 2 GiB in a load overflows                         GATEWAY_MAX_BODY_BYTES; administrators
8769   gRPC: BYTES that are not raw are copied again and again     the gateway sends raw tensors alone
8708   gRPC: the metadata triton_grpc_error ends it                no metadata of a client's is sent on
8220,  gRPC: cancelling in the moment of completion ends it        only models that may be cancelled are
8078,                                                              asked over gRPC, and a stream is left
7840                                                               to end; otherwise a version's own risk
====== =========================================================== =====================================
"""

from __future__ import annotations

import gzip
import json
import queue
import socket
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import httpx
import numpy as np
import orjson
import psutil
import pytest

from gateway.triton.json_guard import GENERATE_RULES, INFER_RULES, MAX_KEY_BYTES
from tests.support.errors import assert_error
from tests.support.fake_triton import FAKE_BODY, Fake, RawResponse, Wire, ask, fake_triton, port_of
from tests.support.model_zoo.zoo import Model, Names, T, identity, write_repository
from tests.support.servers import Triton, gateway, gateway_before
from tests.support.wait import TIMEOUT_S

MIB = 1 << 20
FORM = "application/x-www-form-urlencoded"
INFER = "/v2/models/echo/infer"
GENERATE = "/v2/models/echo/generate"
GOOD = {"inputs": [{"name": "X", "shape": [2], "datatype": "FP32", "data": [1.5, 2.5]}]}
GOOD_JSON = orjson.dumps(GOOD)
PATHS = [
    ("POST", INFER),
    ("POST", GENERATE),
    ("POST", "/v2/models/echo/generate_stream"),
    ("POST", "/v2/logging"),
    ("POST", "/v2/models/echo/trace/setting"),
    ("GET", "/v2/health/live"),
    ("GET", "/v2/models/echo"),
]

MODELS = [
    identity("echo", "FP32", (-1,)),
    identity("texts", "BYTES", (-1,)),
    *(
        Model(
            kind, "identity", (T("X", "BYTES", (1,)),), (T("Y", "BYTES", (1,)),),
            hints={"content_type.Y": content_type},
        )
        for kind, content_type in (
            ("html", "text/html"), ("svg", "image/svg+xml"), ("plain", "text/plain"),
        )
    ),
]  # fmt: skip


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shield")
    write_repository(folder, Names(), MODELS)
    return folder


@pytest.fixture(scope="module")
def triton(repository: Path) -> Iterator[Triton]:
    with Triton(repository, "*") as triton:
        triton.wait()
        yield triton


@pytest.fixture(scope="module")
def client(triton: Triton) -> Iterator[httpx.Client]:
    with gateway_before(triton.options.url) as client:
        yield client


@pytest.fixture(scope="module")
def faked() -> Iterator[tuple[Fake, int]]:
    """A fake Triton, and the port of the gateway before it."""
    with fake_triton() as fake, gateway_before(f"http://127.0.0.1:{fake.port}") as client:
        yield fake, port_of(client)


@pytest.fixture(autouse=True)
def assert_alive(request: pytest.FixtureRequest) -> Iterator[None]:
    """Assert after each test that the real Triton serves, and is the same process."""
    if "triton" not in request.fixturenames:
        yield
        return
    triton, client = (request.getfixturevalue(name) for name in ("triton", "client"))
    pid = triton.pid
    yield
    good = client.post(INFER, json=GOOD)
    assert (good.status_code, good.json()["outputs"][0]["data"]) == (200, [1.5, 2.5])
    assert triton.pid == pid


def recorded(fake: Fake) -> tuple[dict[str, list[str]], bytes]:
    """The next request of a client that reached the fake: its headers by name, and its body."""
    head, body = fake.requests.get(timeout=TIMEOUT_S)
    headers: dict[str, list[str]] = {}
    for line in head.decode("latin-1").splitlines()[1:]:
        name, _, value = line.partition(":")
        headers.setdefault(name.lower(), []).append(value.strip())
    return headers, body


def assert_refused(
    fake: Fake, response: RawResponse, status: int, code: str, words: str = ""
) -> None:
    """Assert that the gateway refuses a request itself, and that Triton never received a whole one."""
    document = json.loads(response.body)
    assert (response.status, document["code"]) == (status, code), document
    assert words in document["error"]
    with pytest.raises(queue.Empty):
        fake.requests.get(timeout=0.05)


def pieces(body: bytes, size: int = 1000) -> Iterator[bytes]:
    for start in range(0, len(body), size):
        yield body[start : start + size]


# The content type of a form.

FORMS = [
    FORM,
    FORM.upper(),
    f"{FORM}; charset=utf-8",
    f"{FORM};",
    f"  {FORM}",
    f"{FORM}\t",
    f"application/json, {FORM}",
    f"text/plain;{FORM}",
]


@pytest.mark.fault("requests that crash a Triton or keep it busy for minutes: a form content type")
@pytest.mark.parametrize(
    "content_type", [FORM, *(pytest.param(each, marks=pytest.mark.long) for each in FORMS[1:])]
)
@pytest.mark.parametrize(("method", "path"), PATHS)
def test_form_content_type_never_reaches_triton(
    faked: tuple[Fake, int], method: str, path: str, content_type: str
) -> None:
    fake, gateway = faked
    for headers in (
        [("Content-Type", content_type)],
        [("Content-Type", "application/json"), ("Content-Type", content_type)],
        [("Connection", "x"), ("Content-Type", content_type), ("Content-Type", content_type)],
    ):
        assert ask(gateway, method, path, headers, GOOD_JSON).body == FAKE_BODY
        sent, body = recorded(fake)
        assert "urlencoded" not in str(sent).lower()
        assert sent.get("content-type", []) == ["application/json"] * (len(headers) == 2)
        assert body == GOOD_JSON


@pytest.mark.fault("requests that crash a Triton or keep it busy for minutes: a form content type")
@pytest.mark.parametrize("content_type", ["application/json", "text/x", "multipart/form-data; a=b"])
def test_other_content_types_reach_triton(faked: tuple[Fake, int], content_type: str) -> None:
    fake, gateway = faked
    assert (
        ask(gateway, "POST", INFER, [("Content-Type", content_type)], GOOD_JSON).body == FAKE_BODY
    )
    assert recorded(fake)[0]["content-type"] == [content_type]


@pytest.mark.long
@pytest.mark.fault("requests that crash a Triton or keep it busy for minutes: a form content type")
def test_large_inference_with_the_default_content_type_of_curl_is_served(
    client: httpx.Client, triton: Triton
) -> None:
    """tritonserver 2.51 ends with SIGSEGV at some 4 MB of a form, on any path."""
    tensor = np.arange(3 * MIB, dtype=np.float32)
    headers = {"Content-Type": FORM, "Inference-Header-Content-Length": "0"}
    response = client.post(INFER, content=tensor.tobytes(), headers=headers)
    length = int(response.headers["Inference-Header-Content-Length"])
    assert response.content[length:] == tensor.tobytes()
    given = {**GOOD["inputs"][0], "shape": [600_000], "data": [float(n) for n in range(600_000)]}
    body = json.dumps({"inputs": [given]})
    response = client.post(INFER, content=body, headers={"Content-Type": FORM})
    assert response.json()["outputs"][0]["shape"] == [600_000]
    for method, path in PATHS:
        client.request(method, path, content=b"a" * 5 * MIB, headers={"Content-Type": FORM})


# The length of the JSON before the binary part.


@pytest.mark.fault("requests that crash a Triton or keep it busy for minutes: a form content type")
@pytest.mark.parametrize(("method", "path"), PATHS[1:])
def test_inference_header_length_reaches_triton_only_where_it_is_read(
    faked: tuple[Fake, int], method: str, path: str
) -> None:
    fake, gateway = faked
    for value in ("9999", "100abc", ""):
        headers = [("Inference-Header-Content-Length", value), ("X-Any", "thing")]
        assert ask(gateway, method, path, headers, b"{}").body == FAKE_BODY
        sent, _ = recorded(fake)
        assert "inference-header-content-length" not in sent
        assert sent["x-any"] == ["thing"]


HEADER_LENGTHS = [
    "2147483648", "4294967297", "99999999999", "9" * 19, "9" * 5000, "-1", "+5", "100abc", "0x10", "5 5",
    "5,5", "1e3", "", "\u00b2", "5.0", "1_0",
]  # fmt: skip


@pytest.mark.long
@pytest.mark.fault("requests that crash a Triton or keep it busy for minutes: a form content type")
@pytest.mark.parametrize("value", HEADER_LENGTHS, ids=lambda value: value[:12])
@pytest.mark.parametrize("way", ["whole", "in pieces", "compressed"])
def test_invalid_inference_header_length_never_reaches_triton(
    faked: tuple[Fake, int], value: str, way: str
) -> None:
    fake, gateway = faked
    headers = [("Inference-Header-Content-Length", value)]
    body: Any = GOOD_JSON + bytes(8)
    if way == "compressed":
        body = gzip.compress(body)
        headers.append(("Content-Encoding", "gzip"))
    response = ask(gateway, "POST", INFER, headers, pieces(body) if way == "in pieces" else body)
    assert_refused(fake, response, 400, "MALFORMED_REQUEST", "inference header size")


@pytest.mark.fault("requests that crash a Triton or keep it busy for minutes: a form content type")
def test_inference_header_length_above_the_body_never_reaches_triton(
    faked: tuple[Fake, int],
) -> None:
    fake, gateway = faked
    for value, passes in ((len(GOOD_JSON), True), (0, True), (len(GOOD_JSON) + 1, False)):
        response = ask(
            gateway, "POST", INFER, [("Inference-Header-Content-Length", str(value))], GOOD_JSON
        )
        if passes:
            assert recorded(fake)[0]["inference-header-content-length"] == [str(value)]
        else:
            assert_refused(fake, response, 400, "MALFORMED_REQUEST", f"{len(GOOD_JSON)} bytes")


@pytest.mark.fault("requests that crash a Triton or keep it busy for minutes: a form content type")
def test_json_that_triton_reads_is_screened_despite_misleading_headers(
    faked: tuple[Fake, int],
) -> None:
    """Neither a `Connection` nor a path that Triton reads otherwise hides JSON as a binary part."""
    fake, gateway = faked
    name, deep = "Inference-Header-Content-Length", b"[" * 60_000
    headers = [("Connection", f"{name}, Content-Encoding, Content-Length"), (name, "4")]
    assert ask(gateway, "POST", INFER, headers, b"{}  " + deep).body == FAKE_BODY
    assert recorded(fake)[0][name.lower()] == ["4"]
    for path in (GENERATE, f"{GENERATE}_stream"):
        response = ask(gateway, "POST", path, [(name, "0")], deep)
        assert_refused(fake, response, 400, "MALFORMED_REQUEST", "nested deeper")


# Many keys.


def object_with(count: int, key_bytes: int = 1) -> dict[str, int]:
    return {f"{key:0{key_bytes}}": 1 for key in range(count)}


MANY_KEYS = object_with(100_000)


@pytest.mark.fault("requests that crash a Triton or keep it busy for minutes: a form content type")
@pytest.mark.parametrize(
    "way",
    [
        "whole",
        pytest.param("in pieces", marks=pytest.mark.long),
        pytest.param("compressed", marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize(
    ("path", "good", "bad"),
    [
        (
            GENERATE,
            object_with(GENERATE_RULES.total_keys),
            object_with(GENERATE_RULES.total_keys + 1),
        ),
        (f"{GENERATE}_stream", object_with(9, MAX_KEY_BYTES), object_with(9, MAX_KEY_BYTES + 1)),
        (GENERATE, {"a": "x" * 10_000}, {"a": MANY_KEYS}),
        (INFER, {"parameters": object_with(900)}, {"parameters": object_with(1001)}),
        (
            INFER,
            {"inputs": [object_with(100)] * 90},
            {"inputs": [object_with(100)] * (INFER_RULES.total_keys // 100 + 1)},
        ),
        ("/v2/models/echo/trace/setting", {"a": "b"}, MANY_KEYS),
    ],
    ids=["generate", "long keys", "nested", "parameters", "objects", "settings"],
)
def test_json_with_too_many_or_too_long_keys_never_reaches_triton(
    faked: tuple[Fake, int], path: str, good: dict[str, Any], bad: dict[str, Any], way: str
) -> None:
    fake, gateway = faked
    for document, passes in ((good, True), (bad, False)):
        body: Any = json.dumps(document).encode()
        headers = []
        if way == "compressed":
            body, headers = gzip.compress(body), [("Content-Encoding", "gzip")]
        response = ask(gateway, "POST", path, headers, pieces(body) if way == "in pieces" else body)
        if passes:
            assert json.loads(recorded(fake)[1]) == document
        else:
            assert_refused(fake, response, 400, "MALFORMED_REQUEST", "key")


@pytest.mark.long
@pytest.mark.fault("requests that crash a Triton or keep it busy for minutes: a form content type")
def test_most_expensive_keys_that_pass_cost_triton_less_than_a_second(
    client: httpx.Client, triton: Triton
) -> None:
    """The longest names, as often as allowed, in the most expensive order: a second is a hundred times the
    measured time."""
    tritons = psutil.Process(triton.pid)
    half = GENERATE_RULES.total_keys // 2
    names = ",".join(f'"{key:0{MAX_KEY_BYTES}}":1' for key in range(half - 2))
    again = '"parameters":{},' * half
    body = f'{{"parameters":{{{names}}},{again}"X":[1.5]}}'
    for path, content in (
        (GENERATE, body),
        (INFER, json.dumps({**GOOD, "parameters": object_with(990, MAX_KEY_BYTES)})),
    ):
        before = sum(tritons.cpu_times()[:2])
        assert client.post(path, content=content).status_code == 200
        assert sum(tritons.cpu_times()[:2]) - before < 1


@pytest.mark.fault("requests that crash a Triton or keep it busy for minutes: a form content type")
def test_name_of_a_v1_parameter_is_limited(client: httpx.Client, triton: Triton) -> None:
    for length, status in ((MAX_KEY_BYTES, 200), (MAX_KEY_BYTES + 1, 400)):
        body = {"inputs": [1.5], "parameters": {"p" * length: 1}}
        assert client.post("/v1/models/echo/infer", json=body).status_code == status


# Many pieces.


@pytest.mark.fault("requests that crash a Triton or keep it busy for minutes: a form content type")
def test_small_chunks_reach_triton_as_large_ones(faked: tuple[Fake, int]) -> None:
    """tritonserver 2.51 keeps 1 KB of each chunk, and a million of them end it."""
    fake, gateway = faked
    count = 20_000
    with Wire(gateway) as wire:
        head = f"POST {INFER} HTTP/1.1\r\nHost: a\r\nInference-Header-Content-Length: 0\r\n"
        wire.socket.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
        wire.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(count):
            wire.socket.sendall(b"4\r\nabcd\r\n")
        wire.socket.sendall(b"0\r\n\r\n")
        assert wire.read("POST").body == FAKE_BODY
    # The gateway's own requests for metadata have no body.
    assert next(filter(None, (recorded(fake)[1] for _ in range(count)))) == b"abcd" * count
    if not fake.chunks.empty():  # else all of it had arrived, and was sent in one piece
        assert fake.chunks.get() <= 4 * count // 32_768 + 1


@pytest.mark.fault("requests that crash a Triton or keep it busy for minutes: a form content type")
def test_last_chunk_of_a_complete_body_reaches_triton(client: httpx.Client) -> None:
    for size in (1, 1000, 40_000, 70_000):
        values = np.ones(size, np.float32).tobytes()
        response = client.post(
            INFER,
            content=pieces(values, 999),
            headers={"Inference-Header-Content-Length": "0"},
        )
        assert response.status_code == 200
        assert response.content.endswith(values)


# Compression.

COMPRESSED: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "gzip": ("gzip", gzip.compress),
    "x-gzip": ("X-GZIP", gzip.compress),
    "deflate": (" deflate", zlib.compress),
    "members": (
        "gzip",
        lambda body: b"".join(
            gzip.compress(piece) + gzip.compress(b"") for piece in pieces(body, 7)
        ),
    ),
}


@pytest.mark.fault("requests that crash a Triton or keep it busy for minutes: a form content type")
@pytest.mark.parametrize("way", COMPRESSED)
@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("size", [10, 5 * MIB])
def test_compressed_body_is_inflated_for_triton(
    faked: tuple[Fake, int], way: str, chunked: bool, size: int
) -> None:
    """The gateway screens what Triton reads, even if they disagree on a header or on several members."""
    fake, gateway = faked
    encoding, compress = COMPRESSED[way]
    if way == "members":
        size = min(size, 70_000)
    body = GOOD_JSON + b" " * size
    sent = compress(body)
    response = ask(
        gateway, "POST", INFER, [("Content-Encoding", encoding)], pieces(sent) if chunked else sent
    )
    assert response.body == FAKE_BODY
    headers, received = recorded(fake)
    assert received == body
    assert "content-encoding" not in headers
    framing = headers.get("content-length") or headers["transfer-encoding"]
    assert framing in ([str(len(body))], ["chunked"])


@pytest.mark.fault("requests that crash a Triton or keep it busy for minutes: a form content type")
def test_content_encoding_that_triton_lacks_is_415(faked: tuple[Fake, int]) -> None:
    fake, gateway = faked
    for encoding in ("br", "gzip, gzip", "zstd", "compress"):
        response = ask(gateway, "POST", INFER, [("Content-Encoding", encoding)], GOOD_JSON)
        assert_refused(fake, response, 415, "UNSUPPORTED_BODY", "gzip")
    for encoding in ("identity", "Identity", ""):
        assert (
            ask(gateway, "POST", INFER, [("Content-Encoding", encoding)], GOOD_JSON).body
            == FAKE_BODY
        )
        assert "content-encoding" not in recorded(fake)[0]


@pytest.mark.long
@pytest.mark.fault("requests that crash a Triton or keep it busy for minutes: a form content type")
def test_refused_compressed_body_leaks_no_memory_in_triton(
    client: httpx.Client, triton: Triton
) -> None:
    """tritonserver up to 2.68 never frees what it inflated of such a request."""
    tritons = psutil.Process(triton.pid)
    body = gzip.compress(bytes(32 * MIB))
    headers = {"Content-Encoding": "gzip"}
    assert client.post(INFER, content=body, headers=headers).status_code == 400
    before = tritons.memory_info().rss
    for _ in range(10):
        assert client.post(INFER, content=body, headers=headers).status_code == 400
    assert tritons.memory_info().rss - before < 150 * MIB


# Other headers.

ACCEPTED = {
    "gzip": "gzip",
    "gzip, deflate, br, zstd": "gzip, deflate, br, zstd",
    "gzip;q=0.5, deflate ; q=1.0": "gzip;q=0.5,deflate;q=1.0",
    "gzip;q=1e999": "",
    "gzip;q=0x1p99999, deflate;q=0.1": "deflate;q=0.1",
    "identity;q=1e-999,GZIP;Q=1": "gzip;q=1",
    "gzip;q=nan;q=1e999": "",
    "gzip;level=1;q=0.25": "gzip;q=0.25",
    "*;q=1e999": "",
    "br;q=1e999": "",
    ";q=1e999": "",
    "gzip;q=": "",
}


@pytest.mark.fault("requests that crash a Triton or keep it busy for minutes: a form content type")
@pytest.mark.parametrize("value", ACCEPTED)
def test_invalid_weight_in_accept_encoding_is_removed(
    faked: tuple[Fake, int], client: httpx.Client, triton: Triton, value: str
) -> None:
    """A weight of 1e999 ends tritonserver 2.51, in any inference request."""
    fake, gateway = faked
    assert ask(gateway, "POST", INFER, [("Accept-Encoding", value)], GOOD_JSON).body == FAKE_BODY
    sent = recorded(fake)[0].get("accept-encoding", [""])
    assert sent == [ACCEPTED[value]]
    response = client.post(INFER, json=GOOD, headers={"Accept-Encoding": value})
    assert response.json()["outputs"][0]["data"] == [1.5, 2.5]


@pytest.mark.fault("requests that crash a Triton or keep it busy for minutes: a form content type")
def test_header_named_like_a_parameter_of_triton_is_removed(faked: tuple[Fake, int]) -> None:
    fake, gateway = faked
    names = [
        "sequence_id", "Sequence_Start", "sequence_end", "Priority", "timeout", "headers",
        "binary_data_output", "triton_enable_empty_final_response", "triton-other", "Timeouts",
    ]  # fmt: skip
    ask(gateway, "POST", INFER, [(name, "5") for name in names], GOOD_JSON)
    assert set(recorded(fake)[0]) & {name.lower() for name in names} == {"triton-other", "timeouts"}


# Responses.


@pytest.mark.fault("a model or a replica returns pages, cookies, redirects")
def test_response_headers_that_affect_a_browser_are_removed(faked: tuple[Fake, int]) -> None:
    fake, gateway = faked
    response = ask(gateway, "GET", "/v2/models/browsers")
    assert recorded(fake)
    assert {name for name, _ in response.headers} == {
        "content-type", "content-length", "x-kept", "x-content-type-options", "x-request-id",
    }  # fmt: skip
    assert response.header("x-content-type-options") == "nosniff"
    for target in ("/v2/nowhere", "/v2/models/browsers%2F/x", "/v1/nowhere"):
        assert ask(gateway, "GET", target).header("x-content-type-options") == "nosniff"


SCRIPT = "<script>alert(document.domain)</script>"


@pytest.mark.fault("a model or a replica returns pages, cookies, redirects")
@pytest.mark.parametrize(
    ("model", "attached"), [("html", "attachment"), ("svg", "attachment"), ("plain", None)]
)
def test_page_that_a_model_returns_runs_no_script(
    client: httpx.Client, model: str, attached: str | None
) -> None:
    response = client.post(
        f"/v1/models/{model}/infer",
        content=SCRIPT,
        headers={"Content-Type": "text/plain", "Accept": "text/html, image/*, text/plain"},
    )
    assert response.text == SCRIPT
    assert response.headers.get("content-disposition") == attached
    for answer in (response, client.get("/v1/models"), client.get("/v1/models/nobody")):
        policy = answer.headers.get_list("content-security-policy")
        assert policy == ["sandbox; default-src 'none'"]
        assert answer.headers["x-content-type-options"] == "nosniff"
    assert "sandbox" not in client.get("/docs").headers["content-security-policy"]


# Names and versions.

TOO_LARGE_VERSION = "9" * 20
INVALID_VERSIONS = [
    "a",
    "1a",
    "-1",
    "+1",
    "%31",
    "1.0",
    "1%2F..",
    "..%2F..%2Fsecret",
    TOO_LARGE_VERSION,
    "%D9%A1",
]
INVALID_NAMES = [
    ".", "..", "%2e", "%2E%2e", "a%2Fb", "a%2fb", "..%2F..%2Fsecret", "a%5Cb", "a%00b", "a%0d%0ab", "a%7Fb",
    "%252e%252e", "a%252Fb", "a%255cb", "a%250Ab",
]  # fmt: skip


@pytest.mark.long
@pytest.mark.fault("names and versions that another server would decode into another path")
@pytest.mark.parametrize("version", INVALID_VERSIONS)
@pytest.mark.parametrize("rest", ["", "/infer", "/config", "/ready"])
def test_invalid_version_never_reaches_triton(
    faked: tuple[Fake, int], version: str, rest: str
) -> None:
    fake, gateway = faked
    method = "POST" if rest == "/infer" else "GET"
    response = ask(gateway, method, f"/v2/models/echo/versions/{version}{rest}")
    status = 400 if version == TOO_LARGE_VERSION else 404  # as Triton
    assert_refused(fake, response, status, json.loads(response.body)["code"])
    if unquote(version) != "1":  # /v1 decodes its paths
        response = ask(gateway, "GET", f"/v1/models/echo/versions/{version}")
        assert_refused(fake, response, 404, json.loads(response.body)["code"])


@pytest.mark.long
@pytest.mark.fault("names and versions that another server would decode into another path")
@pytest.mark.parametrize("name", INVALID_NAMES)
def test_invalid_model_name_never_reaches_triton(faked: tuple[Fake, int], name: str) -> None:
    fake, gateway = faked
    for method, target in (
        ("POST", f"/v2/models/{name}/infer"),
        ("GET", f"/v2/models/{name}"),
        ("GET", f"/v2/models/{name}/versions/1/config"),
        ("GET", f"/v1/models/{name}"),
        ("POST", f"/v1/models/{name}:predict"),
        ("POST", f"/v1/models/{name}/infer"),
        ("POST", f"/v2/repository/models/{name}/load"),
    ):
        response = ask(gateway, method, target, [], b"{}" if method == "POST" else b"")
        assert_refused(fake, response, 404, json.loads(response.body)["code"])


@pytest.mark.fault("names and versions that another server would decode into another path")
def test_version_with_leading_zeros_is_the_same_version(
    faked: tuple[Fake, int], client: httpx.Client, triton: Triton
) -> None:
    fake, gateway = faked
    for version, path in (("1", "1"), ("001", "1"), ("0" * 18 + "1", "1"), ("000", "0")):
        ask(gateway, "GET", f"/v2/models/a%20b/versions/{version}/config?x=%zz")
        head, _ = fake.requests.get(timeout=TIMEOUT_S)
        assert head.startswith(f"GET /v2/models/a%20b/versions/{path}/config?x=%zz ".encode())
    for version in ("1", "01", "0001"):
        assert (
            client.post(f"/v2/models/echo/versions/{version}/infer", json=GOOD).status_code == 200
        )
        response = client.post(f"/v1/models/echo/versions/{version}/infer", json={"inputs": [1.5]})
        assert response.json()["version"] == "1"
        response = client.post(
            f"/v1/models/echo/versions/{version}:predict", json={"inputs": [1.5]}
        )
        assert response.json() == {"outputs": [1.5]}
    page = client.get("/metrics").text
    assert 'version="1"' in page
    assert 'version="01"' not in page
    assert 'version="0001"' not in page


# Large responses.


@pytest.mark.fault("a response does not end, or is larger than the limit")
@pytest.mark.parametrize("wire", ["HTTP", "gRPC"])
def test_response_above_the_limit_is_502_and_the_replica_stays_up(
    triton: Triton, wire: str, client: httpx.Client
) -> None:
    settings = {"max_answer_bytes": "100000"} | (
        {"cancellable_models": "*"} if wire == "gRPC" else {}
    )
    with gateway_before(triton.options.url, **settings) as limited:
        for _ in range(8):
            response = limited.post("/v1/models/echo/infer", json={"inputs": [1.5] * 30_000})
            assert_error(response, 502, "BAD_UPSTREAM", "exceeds the limit of 100000 bytes")
            response = limited.post("/v1/models/echo/infer", json={"inputs": [1.5] * 20_000})
            assert response.status_code == 200
        events = limited.post(
            "/v1/models/echo/infer",
            json={"inputs": [1.5] * 30_000},
            headers={"Accept": "text/event-stream"},
        )
        assert_error(events, 502, "BAD_UPSTREAM", "exceeds the limit")
        assert limited.get("/v1/replicas").json()["replicas"][0]["state"] == "UP"
        through = limited.post(
            INFER,
            content=np.ones(30_000, np.float32).tobytes(),
            headers={"Inference-Header-Content-Length": "0"},
        )
        assert len(through.content) > 120_000


# What a body costs the gateway.

COSTLY = {
    "a quote and shapes": b'"' + b'"shape":[' * 28_000,
    "shapes": b'"shape":[' * 28_000,
    "shapes in a shape": b'{"shape":["shape":[' * 14_000,
    "escaped quotes": b'"' + b'\\"' * 128_000,
    "quotes": b'"' * 256_000,
    "brackets": b"[" * 256_000,
    "keys": b'{"k":{' * 43_000,
    "half escapes": b'"' + b"\\u00" * 64_000,
}


@pytest.mark.fault("250 KiB made to be expensive to inspect")
@pytest.mark.parametrize("way", ["whole", "compressed"])
def test_body_that_is_expensive_to_inspect_costs_little(
    repository: Path, triton: Triton, client: httpx.Client, way: str
) -> None:
    """250 KiB of them took 35 seconds of the event loop; all of them together take a fraction of one."""
    with gateway(triton.options.url) as (other, command):
        process = psutil.Process(command.pid)
        before = sum(process.cpu_times()[:2])
        for name, body in COSTLY.items():
            headers = {"Content-Encoding": "gzip"} if way == "compressed" else {}
            content = gzip.compress(body) if way == "compressed" else body
            response = other.post("/v2/models/x/infer", content=content, headers=headers)
            assert response.status_code in (400, 404, 422), name
        assert sum(process.cpu_times()[:2]) - before < 5
