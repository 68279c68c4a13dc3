"""Authentication and authorization with keys: each route has a row in a table here."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from textwrap import indent
from typing import Any

import httpx
import pytest
import tritonclient.http as triton_http
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tritonclient.http.auth import BasicAuth
from tritonclient.utils import InferenceServerException

from gateway.access.keys import NO_RULES, BadKeysFile, parse_keys_content, read_keys_file
from gateway.access.keys_editor import add_key, expire_key, remove_key, rotate_key
from gateway.app import create_app
from gateway.callers import Caller, CallerLimits, Role
from gateway.config.settings import Settings
from gateway.embedded.supervisor import EmbeddedTriton
from gateway.routes.passthrough.rules import ROUTE_RULES
from tests.support.fake_triton import ask, fake_triton, port_of
from tests.support.fleet import ECHO, Fleet, fleet_of
from tests.support.gateway_forks import run_gateway
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
from tests.support.servers import ROOT, Command, free_ports, gateway
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
    framework: Any = create_app(Settings(state="memory:"))
    for route in framework.framework.routes:
        for method in route.methods - {"HEAD"}:
            yield method, route.path


def test_table_has_every_route() -> None:
    assert not set(routes()) - {(row.method, row.path) for row in ROWS}
    for rule in ROUTE_RULES:
        pattern = rule.pattern
        assert any(pattern.fullmatch(filled(row.path, "m")) for row in ROWS), pattern.pattern
    application: Any = create_app(Settings(state="memory:"))
    public_prefixes = {f"{prefix}{{name:path}}" for prefix in application.paths.public_prefixes}
    public = application.paths.public | public_prefixes
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


def test_key_is_accepted_in_either_header_or_as_a_basic_password(client: httpx.Client) -> None:
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
def test_model_that_the_key_does_not_see_is_404_as_an_unknown_one(
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


def test_routes_about_all_models_are_403_for_a_key_with_patterns(client: httpx.Client) -> None:
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


GLOBS = st.lists(st.text("ab*?[]!-^\\", min_size=1, max_size=9), min_size=1)


@PROPERTY
@given(GLOBS, st.text("ab-^!]") | st.text(min_size=1, max_size=30))
def test_key_with_any_patterns_sees_no_name_that_a_path_must_quote(
    globs: list[str], name: str
) -> None:
    for models in (tuple(globs), ("a*", "[!b]*")):
        if Caller("x", models=models).can_see(name):
            assert name.isascii()
            assert name.isprintable()
            assert not set(name) & set('%/\\?#"<>[]{}|^` ')
            assert name not in (".", "..")


# A pattern, a name, and whether a key with the pattern sees it.
SEPARATORS = [
    ("res,text", "res", False),
    ("res,text", "text", False),
    ("res", "res,text", False),
    ("res", "res\n", False),
    ("res", "res\ntext", False),
    ("res", "res\0text", False),
    ("res*", "res\n", False),
    ("*text", "res\0text", False),
    ("*text", "res text", False),
    ("res", "Res", False),
    ("res*", "res", True),
    ("res*", "res-2", True),
]


@pytest.mark.parametrize(("pattern", "name", "is_seen"), SEPARATORS)
def test_pattern_of_a_key_matches_whole_names(pattern: str, name: str, is_seen: bool) -> None:
    assert Caller("x", models=(pattern,)).can_see(name) is is_seen


def test_visibility_cache_is_bounded() -> None:
    caller = Caller("x", models=("a*",))
    for number in range(5000):
        assert caller.can_see(f"a{number}")
        assert not caller.can_see(f"b{number}")
    assert caller.can_see("a" * 10_000)
    assert len(caller._visibility_cache) <= 1024
    assert max(map(len, caller._visibility_cache)) < 300


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


PART, OTHER = bearer("tgw_part-secret"), bearer("tgw_other-secret")


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
def test_load_with_code_is_refused_unless_setting_and_key_permit_it_and_its_paths_are_valid(
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
def test_load_with_a_file_whose_path_or_name_is_too_long_is_refused(managed: Fleet) -> None:
    """tritonserver 2.51 ends if it cannot create a file of a load."""
    path = "/".join(["a" * 99] * 40)
    for name in ("a" * 256, "é" * 128, f"1/{'a' * 256}", f"{'a' * 256}/model.py", f"{path}bc"):
        parameters = {"config": json.dumps(ECHO_CONFIG), f"file:{name}": "AAAA"}
        refused = managed.load("echo", json={"parameters": parameters}, headers=bearer(ADMIN))
        assert_refused(refused, 400, "MALFORMED_REQUEST")
        assert "4000 bytes, and each name in it 255" in refused.json()["error"]
    assert managed.tritons[0].is_running


# The file, as it changes.


@contextmanager
def gateway_with(path: Path, url: str, **settings: str) -> Iterator[tuple[httpx.Client, Command]]:
    with gateway(url, keys_file=str(path), **settings) as pair:
        yield pair


def status(client: httpx.Client, key: str) -> int:
    return client.get("/v1/models", headers=bearer(key)).status_code


@pytest.mark.long
@pytest.mark.fault(
    "no key, a key of another role, a key that lacks a character, a key that is revoked"
)
def test_keys_file_that_changes_takes_effect_unless_it_is_invalid(
    demo_triton: EmbeddedTriton, tmp_path: Path
) -> None:
    path = written(tmp_path / "keys.yaml", ENTRIES)
    with gateway_with(path, demo_triton.options.url) as (client, command):
        assert status(client, INFER) == 200
        remove_key(path, "infer")
        wait_until(lambda: status(client, INFER) == 401)
        assert status(client, ADMIN) == 200
        path.write_text(f"keys: [{{name: {INFER!r}, sha256: '{INFER}', *broken")
        command.wait_for("stays in use")
        assert status(client, ADMIN) == 200
        path.unlink()
        command.wait_for("No such file")
        assert status(client, ADMIN) == 200
        written(path, [entry(INFER, "infer")])
        wait_until(lambda: status(client, INFER) == 200)
        assert status(client, ADMIN) == 401
        path.write_text("keys: []")
        wait_until(lambda: status(client, INFER) == 401)
        assert client.get("/livez").status_code == 200
        assert command.output.count("stays in use") == 2
        assert "tgw_" not in command.output


def test_keys_file_behind_a_replaced_link_is_read_again(
    demo_triton: EmbeddedTriton, tmp_path: Path
) -> None:
    for name, key in (("..1", INFER), ("..2", ADMIN)):
        (tmp_path / name).mkdir()
        written(tmp_path / name / "keys.yaml", [entry(key, "infer", name="same")])
    for name in ("..1", "..2"):
        os.utime(tmp_path / name / "keys.yaml", (1, 1))  # not even the time tells them apart
    (tmp_path / "..data").symlink_to("..1")
    (tmp_path / "keys.yaml").symlink_to("..data/keys.yaml")
    with gateway_with(tmp_path / "keys.yaml", demo_triton.options.url) as (client, _):
        assert [status(client, key) for key in (INFER, ADMIN)] == [200, 401]
        (tmp_path / "..new").symlink_to("..2")
        (tmp_path / "..new").replace(tmp_path / "..data")
        wait_until(lambda: status(client, ADMIN) == 200)
        assert status(client, INFER) == 401


@pytest.mark.long
def test_keys_file_is_read_again_by_every_worker(
    demo_triton: EmbeddedTriton, tmp_path: Path
) -> None:
    path = written(tmp_path / "keys.yaml", ENTRIES)
    (port,) = free_ports(1)
    environment = {
        "GATEWAY_TRITON_URLS": demo_triton.options.url,
        "GATEWAY_KEYS_FILE": str(path),
    }
    arguments = ("serve", "--port", str(port), "--workers", "2")
    with Command(*arguments, environment=environment) as command:
        command.wait_for("serving")
        headers = [("X-API-Key", INFER)]

        def statuses() -> set[int]:
            """Return the statuses of new connections; the port is open before a worker is up."""
            return {ask(port, "GET", "/v1/models", headers).status for _ in range(20)}

        assert statuses() == {200}
        remove_key(path, "infer")
        wait_until(lambda: statuses() == {401})


GOOD = entry(INFER, "infer")
BAD: dict[str, str] = {
    "empty": "",
    "text": "keys",
    "no list": "keys: {a: b}",
    "another field": yaml.safe_dump({"keys": [GOOD], "more": 1}),
    "no object": "keys: [abc]",
    "an unknown field": yaml.safe_dump({"keys": [{**GOOD, "key": INFER}]}),
    "no name": yaml.safe_dump({"keys": [{**GOOD, "name": ""}]}),
    "a name of two lines": yaml.safe_dump({"keys": [{**GOOD, "name": "a\nb"}]}),
    "a key for a name": yaml.safe_dump({"keys": [{**GOOD, "name": INFER}]}),
    "a key for a hash": yaml.safe_dump({"keys": [{**GOOD, "sha256": INFER}]}),
    "no roles": yaml.safe_dump({"keys": [{**GOOD, "roles": []}]}),
    "an unknown role": yaml.safe_dump({"keys": [{**GOOD, "roles": ["root"]}]}),
    "roles as text": yaml.safe_dump({"keys": [{**GOOD, "roles": "infer"}]}),
    "no models": yaml.safe_dump({"keys": [{**GOOD, "models": []}]}),
    "a model that is none": yaml.safe_dump({"keys": [{**GOOD, "models": [1]}]}),
    "a rate of nothing": yaml.safe_dump({"keys": [{**GOOD, "requests_per_second": 0}]}),
    "a rate without end": yaml.safe_dump({"keys": [{**GOOD, "requests_per_second": float("inf")}]}),
    "a rate beyond floats": f"keys: [{{name: a, sha256: '{'0' * 64}', roles: [infer], "
    f"requests_per_second: 1{'0' * 400}}}]",
    "a rate that is true": yaml.safe_dump({"keys": [{**GOOD, "requests_per_second": True}]}),
    "a short secret": yaml.safe_dump({"keys": [{**GOOD, "callback_secrets": ["whsec_tgw_"]}]}),
    "a secret as text": yaml.safe_dump({"keys": [{**GOOD, "callback_secrets": "tgw_x"}]}),
    "a secret that is none": yaml.safe_dump({"keys": [{**GOOD, "callback_secrets": [1]}]}),
    "a quota of a half": yaml.safe_dump({"keys": [{**GOOD, "requests_per_day": 0.5}]}),
    "a quota that is true": yaml.safe_dump({"keys": [{**GOOD, "requests_per_month": True}]}),
    "no requests at once": yaml.safe_dump({"keys": [{**GOOD, "max_inflight": 0}]}),
    "an end without a zone": yaml.safe_dump({"keys": [{**GOOD, "expires": "2027-01-01T00:00:00"}]}),
    "an end that is a date": "keys: [{name: a, sha256: '%s', roles: [infer], expires: 2027-01-01}]"
    % ("0" * 64),
    "an end before the start": yaml.safe_dump(
        {
            "keys": [
                {**GOOD, "not_before": "2027-01-01T00:00:00Z", "expires": "2027-01-01T00:00:00Z"}
            ]
        }
    ),
    "two of one name": yaml.safe_dump({"keys": [GOOD, entry(ADMIN, "admin", name="infer")]}),
    "one key twice": yaml.safe_dump({"keys": [GOOD, entry(INFER, "admin", name="other")]}),
    "aliases": "keys: &a [*a]",
    "a field twice": "keys: []\nkeys: []",
    "no YAML": "keys: [tgw_infer-secret",
    "an object of Python": "keys: !!python/object/apply:os.system [tgw_infer-secret]",
    "a date that is none": "keys: [2020-13-45]",
    "very deep": "[" * 5000,
}


@pytest.mark.parametrize("text", BAD.values(), ids=BAD.keys())
def test_keys_file_that_is_invalid_is_refused_without_quoting_it(text: str) -> None:
    with pytest.raises(BadKeysFile) as caught:
        parse_keys_content(text, NO_RULES)
    sentence = str(caught.value)
    assert sentence
    assert "\n" not in sentence
    assert "tgw_" not in sentence
    assert GOOD["sha256"] not in sentence


@PROPERTY
@given(st.text(max_size=200) | st.text("keys:[]{}\n-! *&'\"name", max_size=80))
def test_keys_file_with_any_text_is_read_or_refused(text: str) -> None:
    with suppress(BadKeysFile):
        parse_keys_content(text, NO_RULES)


def test_gateway_does_not_start_with_an_invalid_keys_file(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_bytes(b"keys: [\xff]")
    os.mkfifo(pipe := tmp_path / "pipe")
    with ExitStack() as stack:
        commands = {}
        for keys_file in (path, tmp_path / "none.yaml", tmp_path, pipe):
            environment = {"GATEWAY_KEYS_FILE": str(keys_file)}
            serve = Command("serve", "--port", str(*free_ports(1)), environment=environment)
            commands[keys_file] = stack.enter_context(serve)
        for keys_file, command in commands.items():
            assert command.end() == 1
            assert command.output.startswith(f"triton-gateway: the keys file {keys_file}: ")
            assert len(command.lines) == 1


def test_gateway_warns_if_it_listens_on_every_address_without_keys(
    demo_triton: EmbeddedTriton, tmp_path: Path
) -> None:
    path = written(tmp_path / "keys.yaml", ENTRIES)
    with ExitStack() as stack:
        commands = {}
        for host, keys_file in (
            ("0.0.0.0", ""),
            ("0.0.0.0", str(path)),
            ("127.0.0.1", ""),
            ("localhost", ""),
        ):
            environment = {"GATEWAY_TRITON_URLS": demo_triton.options.url}
            if keys_file:
                environment["GATEWAY_KEYS_FILE"] = keys_file
            arguments = ("serve", "--host", host, "--port", str(*free_ports(1)))
            command = stack.enter_context(Command(*arguments, environment=environment))
            commands[host, keys_file] = command
        for command in commands.values():
            command.wait_for("serving")
            command.wait_for(" is UP")  # the first state of its replica
    for (host, keys_file), command in commands.items():
        warnings = command.output.count("GATEWAY_KEYS_FILE")
        assert warnings == (host == "0.0.0.0" and not keys_file), (host, keys_file)


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
def test_keys_reach_neither_triton_nor_logs_nor_metrics_nor_traces(tmp_path: Path) -> None:
    path = written(tmp_path / "keys.yaml", ENTRIES)
    with collecting() as collector:
        settings = {"log_level": "debug", "log_format": "json", "otlp_endpoint": collector.url}
        with (
            fake_triton() as fake,
            gateway_with(path, f"http://127.0.0.1:{fake.port}", **settings) as (client, command),
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


# The command line.


def key_command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return run_gateway("key", *arguments, environment={**os.environ, **environment})


def test_key_command_creates_lists_and_revokes_keys(
    demo_triton: EmbeddedTriton, tmp_path: Path
) -> None:
    path = tmp_path / "keys.yaml"
    rate = ("--requests-per-second", "2.5")
    made = key_command(
        "create", "shop", "--role", "infer", "--model", "text_*", *rate, "--file", str(path)
    )
    assert made.returncode == 0, made.stderr
    key = made.stdout.strip()
    assert key.startswith("tgw_")
    assert len(key) == 47
    assert key not in made.stderr
    assert key not in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600
    assert not [other for other in tmp_path.iterdir() if other != path]
    admin = key_command("create", "ops", "--role", "admin", GATEWAY_KEYS_FILE=str(path))
    listed = key_command("list", "--file", str(path))
    assert [line.split()[:3] for line in listed.stdout.splitlines()[1:]] == [
        ["shop", "infer", "text_*"],
        ["ops", "admin", "*"],
    ]
    assert "2.5" in listed.stdout
    for caller in read_keys_file(path).values():
        assert caller.digest.hex() not in listed.stdout
    with gateway_with(path, demo_triton.options.url) as (client, _):
        found = client.get("/v2/models", headers=bearer(key)).json()["models"]
        assert set(found) == TEXT_MODELS
        assert status(client, admin.stdout.strip()) == 200
        assert key_command("revoke", "shop", "--file", str(path)).returncode == 0
        wait_until(lambda: status(client, key) == 401)


@pytest.mark.parametrize("style", ["block", "flow"])
def test_rotated_keys_overlap_and_comments_stay(tmp_path: Path, style: str) -> None:
    path = tmp_path / "keys.yaml"
    ops, shop = entry(ADMIN, "admin", name="ops"), entry(INFER, "infer", requests_per_day=5)
    shop_text = f"  - {json.dumps(shop)}\n"
    if style == "block":
        shop_text = indent(yaml.safe_dump([shop], sort_keys=False), "  ")
    path.write_text(f"keys:\n{shop_text}  # of the operators\n  - {json.dumps(ops)}\n# the end\n")
    first_end = datetime(2999, 1, 1, tzinfo=timezone.utc)
    key = rotate_key(path, "infer", first_end, None)
    callers = read_keys_file(path)
    old = callers[hashlib.sha256(INFER.encode()).digest()]
    new = callers[hashlib.sha256(key.encode()).digest()]
    assert (old.name, old.limits, old.expires) == (
        "infer",
        CallerLimits(requests_per_day=5),
        first_end,
    )
    assert new == replace(old, digest=new.digest, expires=None)
    assert path.read_text().count("#") == 2
    expire_key(path, "infer", first_end - timedelta(days=1))
    ends = [caller.expires for caller in read_keys_file(path).values() if caller.name == "infer"]
    assert ends == [first_end - timedelta(days=1)] * 2
    assert path.read_text().count("#") == 2
    with pytest.raises(BadKeysFile, match="say when the new one does, with --expires"):
        rotate_key(path, "infer", first_end, None)
    remove_key(path, "infer")
    assert [caller.name for caller in read_keys_file(path).values()] == ["ops"]


def test_key_command_rotates_and_ends_keys(tmp_path: Path) -> None:
    file = ("--file", str(tmp_path / "keys.yaml"))
    limits = ("--requests-per-day", "100", "--max-inflight", "4", "--expires", "90d")
    assert key_command("create", "shop", *limits, *file).returncode == 0
    failed = key_command("rotate", "shop", "--overlap", "soon", *file)
    assert failed.returncode == 2
    assert "'soon' is neither a time" in failed.stderr
    failed = key_command("create", "late", "--expires", "2020-01-01T00:00:00Z", *file)
    assert failed.returncode == 2
    assert "has passed" in failed.stderr
    rotated = key_command(
        "rotate", "shop", "--overlap", "7d", "--expires", "2999-01-01T00:00:00Z", *file
    )
    assert rotated.stdout.startswith("tgw_")
    assert key_command("expire", "shop", "--at", "2998-01-01T00:00:00Z", *file).returncode == 0
    first, second = key_command("list", *file).stdout.splitlines()[1:]
    assert first.split()[:-1] == ["shop", "infer", "*", "unlimited", "100", "4"]
    assert second.split() == ["shop", "infer", "*", "unlimited", "100", "4", "2998-01-01T00:00:00Z"]


@pytest.mark.long
def test_key_command_that_fails_prints_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    add_key(path, "shop", [Role.infer], ["*"])
    before = path.read_text()
    broken = tmp_path / "broken.yaml"
    broken.write_text("keys: [tgw_infer-secret")
    for arguments, words in (
        (("create", "shop", "--file", str(path)), "key 'shop' already exists"),
        (("create", "a b", "--file", str(path)), "the name of the new key"),
        (("create", "tgw_x", "--file", str(path)), "the name of the new key"),
        (("create", "x", "--requests-per-second", "0", "--file", str(path)), "above 0"),
        (("create", "x", "--model", "", "--file", str(path)), "the models of"),
        (("create", "x", "--file", str(tmp_path / "no" / "k.yaml")), "No such file"),
        (("create", "x", "--file", str(broken)), "invalid YAML"),
        (("create", "x", "--file", str(tmp_path)), "Is a directory"),
        (("create", "x"), "no keys file"),
        (("revoke", "nobody", "--file", str(path)), "key 'nobody' not found"),
        (("revoke", "x", "--file", str(broken)), "invalid YAML"),
        (("list", "--file", str(tmp_path / "none")), "No such file"),
        (("list", "--file", str(broken)), "invalid YAML"),
    ):
        run = key_command(*arguments)
        assert run.returncode == 1, arguments
        assert run.stderr.startswith("triton-gateway: "), run.stderr
        assert words in run.stderr
        assert run.stderr.count("\n") == 1
        assert "tgw_infer" not in run.stderr
        assert run.stdout == ""
    assert path.read_text() == before
    assert broken.read_text() == "keys: [tgw_infer-secret"


COMMENTED = """# Who may call, kept by hand.
keys:
    # the shop's
    - name: shop
      sha256: "{shop}"
      roles: [infer]   # and no more
      models: ["res*"]
    - {{name: ops, sha256: "{ops}", roles: [admin]}}
"""


def test_keys_file_keeps_its_comments_when_a_key_is_added_or_removed(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    hashes = {name: hashlib.sha256(name.encode()).hexdigest() for name in ("shop", "ops")}
    path.write_text(COMMENTED.format(**hashes))
    add_key(path, "new", [Role.infer, Role.metrics], ["a*", "b"], requests_per_second=3)
    text = path.read_text()
    assert text.startswith(COMMENTED.format(**hashes))
    assert [caller.name for caller in read_keys_file(path).values()] == ["shop", "ops", "new"]
    remove_key(path, "ops")
    assert [caller.name for caller in read_keys_file(path).values()] == ["shop", "new"]
    assert "# and no more" in path.read_text()
    remove_key(path, "new")
    remove_key(path, "shop")
    assert read_keys_file(path) == {}


def test_keys_that_are_added_concurrently_through_a_link_are_all_kept(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    real = tmp_path / "real" / "keys.yaml"
    link = tmp_path / "keys.yaml"
    link.symlink_to(real)
    code = (
        "import sys; from pathlib import Path; from gateway.access.keys_editor import add_key\n"
        "from gateway.callers import Role\n"
        "for n in range(10): add_key(Path(sys.argv[1]), f'{sys.argv[2]}-{n}', [Role.infer], ['*'])"
    )
    running = [
        subprocess.Popen([sys.executable, "-c", code, str(link), str(number)], cwd=ROOT)
        for number in range(2)
    ]
    assert [process.wait(60) for process in running] == [0] * 2
    assert link.is_symlink()
    assert {caller.name for caller in read_keys_file(real).values()} == {
        f"{number}-{n}" for number in range(2) for n in range(10)
    }


NAMES = st.from_regex(r"\A[a-z][a-z0-9.@:/+-]{0,8}\Z")
ANY_GLOBS = st.lists(st.text(min_size=1, max_size=10), min_size=1, max_size=3)


@settings(PROPERTY, max_examples=10)
@given(
    st.lists(
        st.tuples(NAMES, st.lists(st.sampled_from(Role), min_size=1, max_size=3), ANY_GLOBS),
        min_size=1,
        max_size=5,
        unique_by=lambda made: made[0],
    )
)
def test_key_of_any_name_is_listed_until_it_is_removed(
    tmp_path_factory: pytest.TempPathFactory, made: list[tuple[str, list[Role], list[str]]]
) -> None:
    path = tmp_path_factory.mktemp("made") / "keys.yaml"
    for name, roles, globs in made:
        key = add_key(path, name, roles, globs)
        found = read_keys_file(path)[hashlib.sha256(key.encode()).digest()]
        assert (found.name, found.roles, found.models) == (name, tuple(roles), tuple(globs))
    assert [caller.name for caller in read_keys_file(path).values()] == [
        name for name, _, _ in made
    ]
    for name, _, _ in made:
        remove_key(path, name)
        assert name not in [caller.name for caller in read_keys_file(path).values()]
