"""Authentication and authorization with keys: each route has a row in a table here."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import tritonclient.http as triton_http
from hypothesis import HealthCheck, settings
from starlette.routing import Route
from tritonclient.http.auth import BasicAuth
from tritonclient.utils import InferenceServerException

from gateway.app import create_app
from gateway.config.settings import Settings
from gateway.embedded.supervisor import EmbeddedTriton
from gateway.routes.passthrough.rules import ROUTE_RULES
from tests.support.fake_triton import ask, fake_triton, port_of
from tests.support.fleet import ECHO, Fleet, fleet_of
from tests.support.keys import (
    ADMIN,
    BOTH,
    ENTRIES,
    FREE,
    INFER,
    INFERENCE,
    MANAGEMENT,
    MAY,
    METRICS,
    SCRAPING,
    SECRETS,
    TEXTS,
    TEXTS_ADMIN,
    bearer,
    entry,
    written,
)
from tests.support.routes import Row, capability_rows
from tests.support.servers import Command, gateway
from tests.support.trace_collector import collecting
from tests.support.wait import wait_until

# However slow the machine is.
PROPERTY = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
TEXT_MODELS = {"text_core", "text_ensemble", "text_postprocessing", "text_preprocessing"}


@pytest.fixture(scope="module")
def guarded(
    demo_triton: EmbeddedTriton, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[httpx.Client, Command]]:
    """A gateway with these keys before the real tritonserver; its log has every line."""
    path = written(tmp_path_factory.mktemp("keys") / "keys.yaml", ENTRIES)
    settings = {"keys_file": str(path), "log_level": "debug", "log_format": "json"}
    with gateway(demo_triton.options.url, **settings) as pair:
        yield pair


@pytest.fixture(scope="module")
def client(guarded: tuple[httpx.Client, Command]) -> httpx.Client:
    return guarded[0]


# Every route.


ROWS = (
    Row("GET", "/", FREE),
    Row("GET", "/livez", FREE),
    Row("GET", "/readyz", FREE),
    Row("GET", "/docs", FREE),
    Row("GET", "/docs/{name:path}", FREE),
    Row("GET", "/redoc", FREE, 307),
    Row("GET", "/openapi.json", FREE),
    Row("GET", "/metrics", SCRAPING),
    Row("GET", "/v1/models", INFERENCE),
    Row("GET", "/v1/models/{model}", INFERENCE),
    Row("GET", "/v1/models/{model}/versions/{version}", INFERENCE),
    Row("GET", "/v1/models/{model}/openapi.json", INFERENCE),
    Row("GET", "/v1/models/{model}/versions/{version}/openapi.json", INFERENCE),
    Row("POST", "/v1/models/{model}/infer", INFERENCE, body=b"a text"),
    Row("POST", "/v1/models/{model}/versions/{version}/infer", INFERENCE, body=b"a text"),
    Row("POST", "/v1/models/{model}:predict", INFERENCE, body=b'{"instances": ["a text"]}'),
    Row(
        "POST", "/v1/models/{model}/versions/{version}:predict", INFERENCE,
        body=b'{"instances": ["a text"]}',
    ),
    Row("GET", "/v1/models/{model}/metadata", INFERENCE),
    Row("GET", "/v1/models/{model}/versions/{version}/metadata", INFERENCE),
    Row(
        "POST", "/v1/models/{model}/labels/{version}:predict", INFERENCE,
        body=b'{"instances": ["a text"]}',
    ),
    Row("GET", "/v1/replicas", MANAGEMENT),
    Row("POST", "/v1/replicas/{address}/cordon", MANAGEMENT, 404),
    Row("POST", "/v1/replicas/{address}/uncordon", MANAGEMENT, 404),
    Row("POST", "/v1/replicas/{address}/drain", MANAGEMENT, 404),
    Row("GET", "/v1/log-level", MANAGEMENT),
    Row("GET", "/v1/events", MANAGEMENT),
    Row("GET", "/v1/state", MANAGEMENT),
    Row("GET", "/v1/quotas", MANAGEMENT),
    Row("DELETE", "/v1/quotas/{caller:path}", MANAGEMENT, 404),
    Row("PUT", "/v1/log-level", MANAGEMENT, body=b'{"level": "debug"}'),
    Row("GET", "/v1/operations/{operation}", MANAGEMENT, 404),
    Row("GET", "/v2/models", INFERENCE),
    Row("POST", "/v2/repository/index", MANAGEMENT),
    Row("POST", "/v2/repository/models/{model}/load", MANAGEMENT),
    Row("POST", "/v2/repository/models/{model}/unload", MANAGEMENT, 409),
    Row("GET", "/nothing", INFERENCE, 404),
    # What passes to Triton.
    Row("GET", "/v2", INFERENCE),
    Row("GET", "/v2/health/live", INFERENCE),
    Row("GET", "/v2/health/ready", INFERENCE),
    Row("GET", "/v2/models/stats", INFERENCE),
    Row("GET", "/v2/models/{model}", INFERENCE),
    Row("GET", "/v2/models/{model}/versions/{version}", INFERENCE),
    Row("GET", "/v2/models/{model}/ready", INFERENCE),
    Row("GET", "/v2/models/{model}/config", INFERENCE),
    Row("GET", "/v2/models/{model}/stats", INFERENCE),
    Row("POST", "/v2/models/{model}/infer", INFERENCE, 400, b"{"),
    Row("POST", "/v2/models/{model}/generate", INFERENCE, 400, b"{"),
    Row("POST", "/v2/models/{model}/generate_stream", INFERENCE, 400, b"{"),
    Row("GET", "/v2/models/{model}/trace/setting", MANAGEMENT),
    Row("GET", "/v2/logging", MANAGEMENT),
    Row("GET", "/v2/trace/setting", MANAGEMENT),
    Row("GET", "/v2/systemsharedmemory/status", INFERENCE),
    Row("POST", "/v2/cudasharedmemory/unregister", INFERENCE),
    Row("POST", "/v2/systemsharedmemory/region/any/register", INFERENCE, 403),
    Row("GET", "/v2/nothing", INFERENCE, 404),
    *capability_rows(),
)  # fmt: skip
# A key without a role for inference gets the same error as any other.
WITHOUT_ROLE = {"/nothing": 404, "/v2/nothing": 404}


def filled(path: str, model: str) -> str:
    path = (
        path.replace("docs/{name:path}", "docs/docs.js")
        .replace("guide/{name:path}", "guide/index.md")
        .replace("{name:path}", "main.js")
        .replace("{operation}", "0" * 32)
        .replace("{label}", "stable")
    )
    return path.replace("{model}", model).replace("{version}", "1")


def routes() -> Iterator[tuple[str, str]]:
    application: Any = create_app(Settings(state="memory:"))
    for route in application.framework.routes:
        if (
            isinstance(route, Route) and route.methods
        ):  # the table lists those of `/v2` by their rules
            for method in route.methods - {"HEAD"}:
                yield method, route.path


def test_table_has_every_route() -> None:
    assert not set(routes()) - {(row.method, row.path) for row in ROWS}
    for rule in ROUTE_RULES:
        pattern = rule.pattern
        assert any(pattern.fullmatch(filled(row.path, "m")) for row in ROWS), pattern.pattern
    application: Any = create_app(Settings(state="memory:"))
    paths = application.framework.paths
    public = paths.public | {f"{prefix}{{name:path}}" for prefix in paths.public_prefixes}
    assert {row.path for row in ROWS if row.whose == FREE} <= public


@pytest.mark.fault(
    "no key, a key of another role, a key that lacks a character, a key that is revoked"
)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.method} {row.path}")
def test_route_serves_only_the_roles_of_its_row(client: httpx.Client, row: Row) -> None:
    # The ensemble needs text_core: nothing is unloaded here.
    model = "text_core" if row.path.endswith("load") else "text_ensemble"
    for key in ("", "tgw_nobody", INFER, METRICS, ADMIN):
        answer = client.request(
            row.method,
            filled(row.path, model),
            content=row.body or None,
            headers={"Content-Type": row.content_type, **bearer(key)},
        )
        if key in MAY[row.whose] or row.whose == FREE:
            assert answer.status_code == row.status, (key, answer.text)
        elif key not in SECRETS:
            assert_refused(answer, 401, "UNAUTHENTICATED")
            assert answer.headers["www-authenticate"] == "Bearer"
        elif row.path in WITHOUT_ROLE:
            assert answer.status_code == WITHOUT_ROLE[row.path], key
        else:
            assert_refused(answer, 403, "FORBIDDEN")


def assert_refused(answer: httpx.Response, status: int, code: str) -> None:
    assert answer.status_code == status, answer.text
    body = answer.json()
    if isinstance(body["error"], dict):  # the shape of another API
        assert (body.keys(), body["error"]["code"]) == ({"error"}, code)
        assert answer.headers["x-request-id"]
    else:
        assert body.keys() == {"error", "code", "request_id"}
        assert body["code"] == code
        assert body["request_id"] == answer.headers["x-request-id"] != ""
    assert not any(secret in answer.text for secret in SECRETS)


def test_readiness_has_details_only_for_administrators(client: httpx.Client) -> None:
    for key in ("", "tgw_nobody", INFER, METRICS):
        assert client.get("/readyz", headers=bearer(key)).json() == {"ready": True}
    assert client.get("/readyz", headers=bearer(ADMIN)).json()["replicas"]


def test_path_that_resembles_a_public_one_needs_a_key(client: httpx.Client) -> None:
    for path in (
        "/livez/",
        "/livez%0a",
        "/readyz%0a",
        "/livez%2f..%2fmetrics",
        "/static",
        "/static%00",
    ):
        assert ask(port_of(client), "GET", path).status == 401, path
    for path in (
        "/static/../metrics",
        "/static/..%2fv1%2fmodels",
        "/static/",
        "/docs/../v1/models",
    ):
        assert ask(port_of(client), "GET", path).status == 404, path
    for path in ("/metrics%0a", "/v1/replicas%0a"):  # which the framework takes for the route
        headers = [("X-API-Key", TEXTS if "metrics" in path else INFER)]
        assert ask(port_of(client), "GET", path, headers).status in (403, 404), path


# Keys as they come.


def basic(password: str, user: str = "anybody") -> str:
    return f"Basic {base64.b64encode(f'{user}:{password}'.encode()).decode()}"


def test_key_is_accepted_in_a_header_or_as_a_password(client: httpx.Client) -> None:
    good: list[dict[str, str]] = [
        {"X-API-Key": INFER},
        {"Authorization": f"bearer {INFER}"},
        {"Authorization": f"BEARER  {INFER}"},
        {"Authorization": f"Bearer {INFER}", "X-API-Key": INFER},
        {"Authorization": "Basic dXNlcjpwdw==", "X-API-Key": INFER},  # of who stands before us
        {"Authorization": basic(INFER, "")},
        {"Authorization": basic(INFER).replace("Basic ", "basic  ")},
        {"Authorization": f"Bearer {INFER}", "Origin": "https://evil.example"},
        {"Authorization": f"Bearer {INFER}", "Sec-Fetch-Site": "cross-site"},
    ]
    for headers in good:
        assert client.get("/v1/models", headers=headers).status_code == 200, headers
    spaced = [("X-API-Key", f"\t {INFER} \t")]
    assert ask(port_of(client), "GET", "/v1/models", spaced).status == 200
    # tritonclient's plugin sends keys like this; the user's name is ignored.
    with triton_http.InferenceServerClient(f"127.0.0.1:{port_of(client)}") as triton:
        triton.register_plugin(BasicAuth("anybody", INFER))
        assert triton.get_model_metadata("text_core")["name"] == "text_core"
        triton.unregister_plugin()
        triton.register_plugin(BasicAuth(INFER, "anything"))
        with pytest.raises(InferenceServerException, match="unknown key"):
            triton.get_model_metadata("text_core")


@pytest.mark.fault(
    "no key, a key of another role, a key that lacks a character, a key that is revoked"
)
def test_key_that_is_unknown_or_ambiguous_is_401(client: httpx.Client) -> None:
    port = port_of(client)
    bad: list[list[tuple[str, str]]] = [
        [("X-API-Key", INFER[:-1])],
        [("X-API-Key", INFER[1:])],
        [("X-API-Key", INFER + "x")],
        [("X-API-Key", INFER.upper())],
        [("X-API-Key", hashlib.sha256(INFER.encode()).hexdigest())],  # what stands in the file
        [("X-API-Key", "")],
        [("X-API-Key", "\xff\xfe\xe9")],
        [("X-API-Key", "x" * 4000)],
        [("X-API-Key", f'"{INFER}"')],
        [("X-API-Key", f"{INFER},{ADMIN}")],
        [("Authorization", "Bearer")],
        [("Authorization", "Bearer ")],
        [("Authorization", INFER)],
        [("Authorization", f"Basic {INFER}")],
        [("Authorization", basic(INFER + "x"))],
        [("Authorization", basic(f"{INFER}:"))],
        [("Authorization", basic(INFER).rstrip("=")[:-1])],
        [("Authorization", basic(INFER)), ("Authorization", basic(ADMIN))],
        [("Authorization", basic(INFER)), ("X-API-Key", "")],
        # A browser would send it for the page of another origin as well.
        [("Authorization", basic(INFER)), ("Origin", "https://evil.example")],
        [("Authorization", basic(ADMIN)), ("Sec-Fetch-Site", "cross-site")],
        [("Authorization", f"Bearer {INFER} {INFER}")],
        [("Proxy-Authorization", f"Bearer {INFER}")],
        [("X_API_Key", INFER)],
        [("Authorization", f"Bearer {INFER}"), ("X-API-Key", ADMIN)],
        [("Authorization", f"Bearer {INFER}"), ("X-API-Key", "")],
        [("X-API-Key", INFER), ("X-API-Key", ADMIN)],
    ]
    for headers in bad:
        for path in ("/v1/models", "/v2/models/core"):
            answer = ask(port, "GET", path, headers)
            assert answer.status == 401, headers
            assert json.loads(answer.body)["code"] == "UNAUTHENTICATED"
            assert b"tgw_" not in answer.body
    assert ask(port, "GET", f"/v1/models?api_key={INFER}").status == 401


def test_body_of_a_refused_request_leaves_the_connection_usable(client: httpx.Client) -> None:
    for _ in range(3):
        refused = client.post("/v2/models/core/infer", content=b"x" * 300_000)
        assert refused.status_code == 401
        assert client.get("/livez").status_code == 200


# Models.


def test_listings_have_only_what_the_key_sees(client: httpx.Client) -> None:
    def get(path: str, key: str) -> Any:
        return client.get(path, headers=bearer(key)).json()

    for key in (TEXTS, TEXTS_ADMIN):
        assert {model["name"] for model in get("/v1/models", key)["models"]} == TEXT_MODELS
        # Configs are read for those who ask, and then known.
        for query in ("?describe=true", ""):
            listed = {model["name"]: model for model in get(f"/v1/models{query}", key)["models"]}
            assert listed["text_ensemble"]["title"] == "Sentence embeddings"
            steps = TEXT_MODELS - {"text_ensemble"}
            assert set(listed["text_ensemble"]["steps"]) == steps & listed.keys()
        assert set(get("/v2/models", key)["models"]) == TEXT_MODELS
    for body in ({}, {"ready": True}):
        for query in ("", "?detail=replicas"):
            url = f"/v2/repository/index{query}"
            index = client.post(url, json=body, headers=bearer(TEXTS_ADMIN)).json()
            assert {model["name"] for model in index} == TEXT_MODELS
    (replica,) = get("/v1/replicas", TEXTS_ADMIN)["replicas"]
    assert set(replica["models"]) == TEXT_MODELS
    assert len(get("/v1/models", ADMIN)["models"]) == 8
    # Addresses are for administrators.
    assert "127.0.0.1" not in str(get("/v1/models", INFER))
    assert "replicas" in get("/v1/models", ADMIN)["models"][0]


@pytest.mark.fault("a model outside the key's patterns, however it is spelled")
def test_model_that_the_key_does_not_see_is_404(
    client: httpx.Client,
) -> None:
    rows = [row for row in ROWS if "{model}" in row.path]
    assert len(rows) > 12
    for row in rows:
        sentences = []
        for model in ("core", "none"):
            answer = client.request(
                row.method,
                filled(row.path, model),
                content=row.body or None,
                headers=bearer(TEXTS_ADMIN),
            )
            assert_refused(answer, 404, "MODEL_NOT_FOUND")
            sentences.append(answer.json()["error"].replace(model, "…"))
        assert sentences[0] == sentences[1]
    for path in ("/v1/models/{model}", "/v2/models/{model}"):  # also by the words for who sees all
        hidden = client.get(path.format(model="core"), headers=bearer(TEXTS)).json()["error"]
        unknown = client.get(path.format(model="none"), headers=bearer(INFER)).json()["error"]
        assert unknown.replace("none", "…") == hidden.replace("core", "…")


def test_routes_about_all_models_are_403_for_some_models(client: httpx.Client) -> None:
    for method, path in (
        ("GET", "/v2/models/stats"),
        ("GET", "/v2/logging"),
        ("POST", "/v2/trace/setting"),
        ("PUT", "/v1/log-level"),
        ("GET", "/v1/events"),
        ("GET", "/v1/state"),
        ("DELETE", "/v1/quotas/shop"),
        ("POST", "/v1/replicas/a:1/cordon"),
        ("GET", "/metrics"),
    ):
        for key in (TEXTS, TEXTS_ADMIN):
            assert_refused(client.request(method, path, headers=bearer(key)), 403, "FORBIDDEN")
    assert client.get("/metrics", headers=bearer(BOTH)).status_code == 200


@pytest.mark.fault("a model outside the key's patterns, however it is spelled")
def test_names_in_odd_spellings_do_not_evade_the_patterns(client: httpx.Client) -> None:
    port = port_of(client)
    for path in (
        "/v2/models/%63ore",
        "/v2/models/a%2Fb",
        "/v2/models/text_%2F..%2Fcore",
        "/v2/models/text_..%2fcore/config",
        "/v2/models/text_core%00",
        "/v2/models/text_core%2F..%2F..%2Fcore/versions/1",
        "/v2/models/text_core/../core",
        "/v2/models/text_/../../models/core",
        "/v2//models/core",
        "/v2/models//core",
        "/v2/models/core/",
        "/v2/models/CORE",
        "/v2/models/text_core;/core",
        "/v2/models/stat%73",
        "/v2/models/.",
        "/v2/models/..",
        "/v2/./models/core",
        "/v1/models/%63ore",
        "/v1/models/text_%2f..%2fcore",
        "/v1/models/text_%252f..%252fcore",
        "/v1/models/core%0a",
        "/v1/models/..",
        "/v2%2Fmodels%2Fcore",
    ):
        answer = ask(port, "GET", path, [("X-API-Key", TEXTS)])
        assert answer.status == 404, (path, answer)
    for verb in ("load", "unload"):
        for model in ("core", "%63ore", "text_%2f..%2fcore", "text_core%252f", "..", "core%0a"):
            path = f"/v2/repository/models/{model}/{verb}"
            for way in (path, path.replace("/v2/", "/v2%2F", 1)):
                answer = ask(port, "POST", way, [("X-API-Key", TEXTS_ADMIN)])
                assert answer.status == 404, (way, answer)


# Management by a key with patterns.


@pytest.fixture(scope="module")
def managed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A Triton whose models may be changed, and whose code may be."""
    folder = tmp_path_factory.mktemp("managed")
    entries = [
        *ENTRIES,
        entry("tgw_part-secret", "admin", models=["chain", "echo"]),
        entry("tgw_other-secret", "admin", models=["other"]),
    ]
    path = written(folder / "keys.yaml", entries)
    with fleet_of(
        folder / "models",
        1,
        ("echo", "other", "chain"),
        keys_file=str(path),
        model_uploads="code",
        max_body_bytes="4000000",
    ) as fleet:
        yield fleet


PART = bearer("tgw_part-secret")
OTHER = bearer("tgw_other-secret")


def test_unload_reaches_and_names_only_what_the_key_sees(managed: Fleet) -> None:
    both = managed.unload("chain", headers=PART, json={"parameters": {"unload_dependents": True}})
    assert_refused(both, 403, "FORBIDDEN")
    needed = managed.unload("other", headers=bearer(ADMIN))
    assert needed.status_code == 409
    assert "'chain'" in needed.json()["error"]
    assert managed.unload("other", headers=PART).status_code == 404
    unseen = managed.unload("other", headers=OTHER)
    assert unseen.status_code == 409
    assert "chain" not in unseen.text
    accepted = managed.unload("other", headers={**OTHER, "Prefer": "respond-async"})
    assert accepted.status_code == 202

    def operation(headers: dict[str, str]) -> httpx.Response:
        return managed.client.get(accepted.headers["location"], headers=headers)

    wait_until(lambda: operation(OTHER).json()["operation"] == "failed")
    assert "chain" not in operation(OTHER).text
    assert operation(bearer(ADMIN)).status_code == 200
    assert_refused(operation(bearer(TEXTS_ADMIN)), 404, "NOT_FOUND")


ECHO_CONFIG = {
    "name": "echo",
    "backend": "python",
    "max_batch_size": 4,
    "input": [{"name": "X", "data_type": "TYPE_FP32", "dims": [2]}],
    "output": [{"name": "Y", "data_type": "TYPE_FP32", "dims": [2]}],
    "instance_group": [{"count": 1, "kind": "KIND_CPU"}],
}


def config_of(fleet: Fleet, model: str) -> Any:
    url = f"http://{fleet.tritons[0].address}/v2/models/{model}/config"
    return httpx.get(url, timeout=60).json()


def test_load_with_config_and_code_takes_effect_on_triton(managed: Fleet) -> None:
    assert config_of(managed, "echo")["max_batch_size"] == 0
    with_config = {"parameters": {"config": json.dumps(ECHO_CONFIG)}}
    loaded = managed.load("echo", json=with_config, headers=bearer(ADMIN))
    assert loaded.status_code == 200, loaded.text
    assert config_of(managed, "echo")["max_batch_size"] == 4
    described = managed.client.get("/v1/models/echo", headers=bearer(INFER)).json()
    assert described["max_batch_size"] == 4

    path = "/".join(["a" * 99] * 40)  # of 3,999 bytes
    code = ECHO.replace('"Y", value', '"Y", value * 3') + "#" * 1_500_000
    with_code = {
        "parameters": {
            "config": json.dumps({**ECHO_CONFIG, "name": "late", "max_batch_size": 0}),
            "file:1/model.py": base64.b64encode(code.encode()).decode(),
            f"file:{'é' * 127}b": "",
            f"file:{path}b": "",
        }
    }
    assert len(json.dumps(with_code)) > 1 << 20  # the limit of other loads
    loaded = managed.load("late", json=with_code, headers=bearer(ADMIN))
    assert loaded.status_code == 200, loaded.text
    assert managed.infer("late", headers=bearer(INFER)).json()["outputs"] == {"Y": [3, 6]}
    unknown = managed.load("unknown", json=with_code, headers=bearer(ADMIN))
    assert_refused(unknown, 404, "MODEL_NOT_FOUND")


@pytest.mark.fault("a load that includes code, without permission")
def test_load_with_code_is_refused_unless_it_is_permitted(
    managed: Fleet, client: httpx.Client, demo: httpx.Client
) -> None:
    def load(parameters: dict[str, str], headers: dict[str, str]) -> httpx.Response:
        return managed.load("echo", json={"parameters": parameters}, headers=headers)

    for name in ("file:../x", "file:/etc/x", "file:1/../../x", "file:", "file:a//b", "other", ""):
        assert_refused(load({name: "AAAA"}, bearer(ADMIN)), 400, "MALFORMED_REQUEST")
    for name in ("config", "file:1/model.py"):
        assert_refused(load({name: "AAAA"}, PART), 403, "FORBIDDEN")  # sees only some models
        for caller, headers in ((client, bearer(ADMIN)), (demo, {})):
            url = "/v2/repository/models/text_core/load"
            answer = caller.post(url, json={"parameters": {name: "AAAA"}}, headers=headers)
            assert_refused(answer, 403, "FORBIDDEN")
            assert "GATEWAY_MODEL_UPLOADS=code" in answer.json()["error"]
    assert_refused(load({"file:1/x": "A" * 5_000_000}, bearer(ADMIN)), 413, "TOO_LARGE")
    assert_refused(load({"config": "A" * 1_500_000}, PART), 413, "TOO_LARGE")
    for config, status, code in (("{}", 403, "FORBIDDEN"), ("A" * 1_500_000, 413, "TOO_LARGE")):
        document = {"parameters": {"config": config}}
        answer = managed.unload("echo", json=document, headers=bearer(ADMIN))
        assert_refused(answer, status, code)


@pytest.mark.fault("a load with a file whose path or name is too long")
def test_load_with_a_too_long_path_is_refused(managed: Fleet) -> None:
    """tritonserver 2.51 ends if it cannot create a file of a load."""
    path = "/".join(["a" * 99] * 40)
    for name in ("a" * 256, "é" * 128, f"1/{'a' * 256}", f"{'a' * 256}/model.py", f"{path}bc"):
        parameters = {"config": json.dumps(ECHO_CONFIG), f"file:{name}": "AAAA"}
        refused = managed.load("echo", json={"parameters": parameters}, headers=bearer(ADMIN))
        assert_refused(refused, 400, "MALFORMED_REQUEST")
        assert "4000 bytes, and each name in it 255" in refused.json()["error"]
    assert managed.tritons[0].is_running


# Keys go nowhere.

TRICKS: list[list[tuple[str, str]]] = [
    [("X-API-Key", INFER)],
    [("Authorization", f"Bearer {INFER}")],
    [("Authorization", basic(INFER)), ("Connection", "authorization")],
    [("X-API-Key", INFER), ("Connection", "x-api-key")],
    [("X-API-Key", INFER), ("Connection", "keep-alive, X-API-Key")],
    [("Authorization", f"Bearer {INFER}"), ("Connection", "authorization")],
    [("Authorization", f"Bearer {INFER}"), ("X-API-Key", INFER), ("Connection", "content-length")],
]


@pytest.mark.fault("keys in requests that fail, `Connection` headers that name the key's header")
def test_keys_reach_neither_triton_nor_telemetry(tmp_path: Path) -> None:
    path = written(tmp_path / "keys.yaml", ENTRIES)
    with collecting() as collector:
        settings = {"log_level": "debug", "log_format": "json", "otlp_endpoint": collector.url}
        with (
            fake_triton() as fake,
            gateway(f"http://127.0.0.1:{fake.port}", keys_file=str(path), **settings) as (
                client,
                command,
            ),
        ):
            port = port_of(client)
            for headers in TRICKS:
                for method, target in (
                    ("GET", "/v2/models/m"),
                    ("POST", "/v2/models/m/infer"),
                    ("GET", "/v1/models/m"),
                    ("POST", "/v1/models/m/infer"),
                ):
                    body = b'{"inputs": [1]}' if method == "POST" else b""
                    assert ask(port, method, target, headers, body).status not in (401, 403, 500)
            ask(port, "POST", "/v2/models/m/infer", [("X-API-Key", INFER + "x")], b"{}")
            requests = []
            while not fake.requests.empty():
                requests.append(b"".join(fake.requests.get()).lower())
            page = client.get("/metrics", headers=bearer(METRICS)).text
            client.get("/v1/replicas", headers=bearer(METRICS))
            wait_until(lambda: "GET /v1/replicas 403" in command.output)
        wait_until(lambda: len(collector.spans) > len(TRICKS))
        spans = str(collector.spans)
    assert len(requests) >= 4 * len(TRICKS)
    for request in requests:
        for words in (b"secret", basic(INFER).encode().lower(), b"x-api-key", b"authorization"):
            assert words not in request
    for text in (page, command.output, spans):
        assert "secret" not in text
    lines = [json.loads(line) for line in command.lines if line.startswith("{")]
    assert {"infer", "metrics", ""} <= {line["key"] for line in lines if "key" in line}
