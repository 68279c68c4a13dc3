"""The OpenAPI documents are true: schemathesis sends all that they declare, and more.

A long run, different every time: `SCHEMA_EXAMPLES=300 make test-long ARGS="-k test_schema"`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import httpx
import jsonschema_rs
import pytest
import requests
import schemathesis
from fastapi.routing import APIRoute
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import CheckFunction, load_all_checks, not_a_server_error
from schemathesis.config import SchemathesisConfig
from schemathesis.core.result import Ok
from schemathesis.generation.hypothesis.builder import (
    HypothesisTestConfig,
    HypothesisTestMode,
    create_test,
)
from schemathesis.specs.openapi.checks import negative_data_rejection, positive_data_acceptance
from schemathesis.specs.openapi.definitions import OPENAPI_31_VALIDATOR

from gateway.app import create_app
from gateway.capabilities.torchserve.routes import router as torchserve
from gateway.config.settings import Settings
from gateway.embedded.supervisor import EmbeddedTriton
from gateway.media_types import JSON, MULTIPART, NPY, NPZ, OCTET_STREAM
from tests.interface.openapi import find_broken_references
from tests.support.keys import bearer, entry, written
from tests.support.model_zoo.zoo import AS_WRITTEN, MANAGED, Zoo
from tests.support.servers import gateway_before

EXAMPLES = int(os.environ.get("SCHEMA_EXAMPLES", "4"))
LONG = EXAMPLES > 50
ADMIN = "tgw_schema-secret"
SERVING = (
    "single_BYTES",
    "single_INT32",
    "pair",
    "nhwc",
    "optional",
    "plain_BOOL",
    "not_finite",
)
STORED = ("kept", "removed", "replaced")  # in the repository for uploads, which no Triton reads
Case = schemathesis.Case[Any]
Operation = schemathesis.APIOperation[Any, Any, Any, Any]
DIALECT = "https://json-schema.org/draft/2020-12/schema"
PROPERTY = settings(
    max_examples=EXAMPLES,
    derandomize=not LONG,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
)
pytestmark = pytest.mark.long
patiently = pytest.mark.timeout(3600 if LONG else 300)
load_all_checks()

# A value that fits each.
FITTING: dict[str, Any] = {
    "single_BYTES": "a text",
    "single_INT32": 7,
    "not_finite": 1,
    "pair": {"A": [1, 2], "B": [3, 4]},
    "nhwc": {"X": [[[0, 1, 2]] * 4] * 6},
    "optional": {"X": [1, 2], "FACTOR": 3},
    "plain_BOOL": [[True, False]],
}
# What cannot hold of an operation, by the nature of it.
# Which values fit is the model's business, of which this document knows nothing; the models' own do.
EXCLUDED: dict[str, list[CheckFunction]] = {
    "infer": [positive_data_acceptance],
    "infer_version": [positive_data_acceptance],
    "predict": [positive_data_acceptance],
    "predict_version": [positive_data_acceptance],
    # No server of completions is there: 501.
    "create_completion": [positive_data_acceptance, not_a_server_error],
    "create_chat_completion": [positive_data_acceptance, not_a_server_error],
    "create_embeddings": [positive_data_acceptance],
    "rerank": [positive_data_acceptance],
    "predict_label": [positive_data_acceptance],
    "put_prediction": [positive_data_acceptance],
    "create_prediction": [positive_data_acceptance],
    "put_version_prediction": [positive_data_acceptance],
    "create_version_prediction": [positive_data_acceptance],
    # Which names are models, and which numbers are versions that are ready, is known at runtime only.
    "register_model": [positive_data_acceptance],
    "set_default_version": [positive_data_acceptance],
    # 501, always.
    "scale_model": [positive_data_acceptance, not_a_server_error],
    "scale_model_version": [positive_data_acceptance, not_a_server_error],
    # Nor that one version is written as 1 and 01, or is a label's own shadow.
    "set_label": [positive_data_acceptance],
    # Which bytes are a model, and that those of the zoo are in use, no schema can say.
    "upload_model": [positive_data_acceptance],
    "upload_model_version": [positive_data_acceptance],
}


def is_opaque(media_type: str) -> bool:
    """OpenAPI cannot say which bytes are a picture, an array, or a form of them."""
    return media_type.startswith("image/") or media_type in (OCTET_STREAM, NPY, NPZ, MULTIPART)


def is_beyond_words(inputs: Any) -> bool:
    """Nor that lists have the same lengths, which numbers are exact in FP32, and what is a picture."""
    values = [inputs]
    if isinstance(inputs, dict) and "b64" not in inputs:
        values = list(inputs.values())
    return shape_of(values) is None or any(map(is_inexact, leaves(values)))


def shape_of(value: Any) -> tuple[int, ...] | None:
    """None for ragged lists."""
    if not isinstance(value, list):
        return ()
    shapes = {shape_of(item) for item in value} or {()}
    (shape,) = shapes if len(shapes) == 1 else (None,)
    return None if shape is None else (len(value), *shape)


def leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, list):
        for item in value:
            yield from leaves(item)
    else:
        yield value


def is_inexact(leaf: Any) -> bool:
    return isinstance(leaf, dict) or (isinstance(leaf, int) and abs(leaf) > 1 << 24)


def is_fine_beside_its_inputs(case: Case) -> bool:
    """Return whether a body is valid but for its inputs, which are accepted in more forms than described."""
    if not isinstance(case.body, dict) or "inputs" not in case.body:
        return False
    (body,) = (body for body in case.operation.body if body.media_type == JSON)
    properties = {**body.definition["schema"]["properties"], "inputs": {}}
    schema = {**body.definition["schema"], "properties": properties}
    return jsonschema_rs.is_valid(schema, case.body)


@dataclass(frozen=True)
class Service:
    """A gateway that asks for keys."""

    client: httpx.Client
    session: requests.Session

    @property
    def url(self) -> str:
        return str(self.client.base_url).rstrip("/")

    def document(self, path: str = "/openapi.json") -> dict[str, Any]:
        return dict(self.client.get(path).raise_for_status().json())

    def ask(self, case: Case, excluded: Sequence[CheckFunction]) -> None:
        case.call_and_validate(
            session=self.session,
            headers=bearer(ADMIN),
            excluded_checks=list(excluded),
            timeout=60,
        )

    def schema(self, path: str = "/openapi.json") -> schemathesis.BaseSchema:
        config = SchemathesisConfig(seed=1)
        config.projects.default.update(base_url=self.url)
        # A longer list than the maximum is 413.
        rejection = config.projects.default.checks.negative_data_rejection
        rejection.expected_statuses = [*rejection.expected_statuses, "413"]
        # Keys that are made up would be 401 and nothing else; `ignored_auth` tries them.
        config.projects.default.generation.update(with_security_parameters=False)
        return schemathesis.openapi.from_dict(self.document(path), config=config)


@pytest.fixture(scope="module")
def service(
    zoo_triton: EmbeddedTriton, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Service]:
    keys = written(tmp_path_factory.mktemp("keys") / "keys.yaml", [entry(ADMIN, "admin")])
    # The Triton does not read this repository, so that nothing drawn becomes a model of it.
    stored = tmp_path_factory.mktemp("stored")
    for model in STORED:
        for version in ("1", "2"):
            (stored / model / version).mkdir(parents=True)
            (stored / model / version / "model.onnx").write_bytes(b"anything")
    settings = {
        "repository": f"file://{stored}",
        "model_uploads": "artifacts",
        "dialects": "torchserve",
    }
    with (
        gateway_before(zoo_triton.options.url, keys_file=str(keys), **settings) as client,
        requests.Session() as session,
    ):
        client.headers.update(bearer(ADMIN))
        Zoo(client, AS_WRITTEN).load(*SERVING, MANAGED.name)
        yield Service(client, session)


def settle(case: Case) -> None:
    """Replace half of the drawn values by existing ones: a model, its version, values that fit it."""
    models: Sequence[str] = [MANAGED.name] if "repository" in case.path else SERVING
    if case.method in ("PUT", "DELETE") or "files" in case.path:
        models = STORED
    for values in (case.path_parameters, case.query):
        replace(values, "model", models)
        replace(values, "version", ["1"])
    headers: MutableMapping[str, Any] = case.headers if case.headers is not None else {}
    replace(headers, "Prefer", ["respond-async"])
    if is_short(str(headers.get("X-Request-Timeout", ""))):
        headers["X-Request-Timeout"] = "60"
    model = (case.path_parameters or {}).get("model")
    body = case.body
    if model in FITTING and isinstance(body, dict) and is_positive(case):
        drawn = crc32(repr(body).encode(errors="replace"))
        if "inputs" in body and drawn % 2:
            case.body = {**body, "inputs": FITTING[model]}
        elif "instances" in body and drawn % 2:
            case.body = {**body, "instances": [FITTING[model]] * (1 + drawn % 3)}


def replace(values: MutableMapping[str, Any] | None, name: str, existing: Sequence[str]) -> None:
    """Half of the drawn texts, and always the same half."""
    if values is not None and isinstance(drawn := values.get(name), str):
        choice = crc32(drawn.encode(errors="replace"))
        if choice % 2:
            values[name] = existing[choice // 2 % len(existing)]


def is_positive(case: Case) -> bool:
    return case.meta is not None and case.meta.generation.mode.is_positive


def is_short(timeout: str) -> bool:
    """Too short for any answer: 504 is right then, and a fault of the gateway's everywhere else."""
    try:
        return 0 < float(timeout) < 60
    except ValueError:
        return False


@pytest.fixture(scope="module")
def whole(service: Service) -> schemathesis.BaseSchema:
    return service.schema()


APPLICATION: Any = create_app(Settings(state="memory:"))
LABELS = [
    f"{method} {route.path_format}"
    for route in (*APPLICATION.framework.routes, *torchserve.routes)
    if isinstance(route, APIRoute) and route.include_in_schema
    for method in route.methods or ()
]


def name_of(operation: Operation) -> str:
    return str(operation.definition.raw["operationId"])


def ask_everything(operation: Operation, ask: Callable[[Case], None]) -> None:
    """Examples, the corners of every schema, and what is drawn from it; valid and not."""

    def test(case: Case) -> None:
        ask(case)

    config = HypothesisTestConfig(
        project=operation.schema.config, modes=list(HypothesisTestMode), settings=PROPERTY
    )
    create_test(operation=operation, test_func=test, config=config)()


@patiently
@pytest.mark.parametrize("label", LABELS)
def test_operation_does_what_the_document_says(
    service: Service, whole: schemathesis.BaseSchema, label: str
) -> None:
    operation = whole.find_operation_by_label(label)
    assert operation is not None
    excluded = EXCLUDED.get(name_of(operation), [])

    def ask(case: Case) -> None:
        settle(case)
        service.ask(case, excluded)

    ask_everything(operation, ask)


@patiently
@pytest.mark.parametrize("model", SERVING)
def test_model_does_what_its_own_document_says(service: Service, model: str) -> None:
    schema = service.schema(f"/v1/models/{model}/openapi.json")
    (result,) = schema.get_all_operations()
    assert isinstance(result, Ok)
    operation = result.ok()

    def ask(case: Case) -> None:
        excluded: list[CheckFunction] = []
        values = case.body.get("inputs") if isinstance(case.body, dict) else case.body
        if is_opaque(case.media_type or "") or is_beyond_words(values):
            excluded.append(positive_data_acceptance)
        if is_fine_beside_its_inputs(case):
            excluded.append(negative_data_rejection)
        service.ask(case, excluded)

    ask_everything(operation, ask)


def test_documents_are_valid_openapi(service: Service) -> None:
    documents = [
        service.document(),
        *(service.document(f"/v1/models/{m}/openapi.json") for m in SERVING),
    ]
    for document in documents:
        assert document["openapi"].startswith("3.1.")
        assert not find_broken_references(document)
        assert {*document["security"][0], *document["security"][1]} == {"bearer", "header"}
        OPENAPI_31_VALIDATOR.validate(document)
        for schema in schemas(document["paths"]):
            jsonschema_rs.meta.validate({"$schema": DIALECT, **schema})


def schemas(node: Any) -> Iterator[dict[str, Any]]:
    """Every schema that stands in this part of a document."""
    if isinstance(node, list):
        for item in node:
            yield from schemas(item)
    elif isinstance(node, dict):
        for key, value in node.items():
            if key == "schema":
                yield value
            else:
                yield from schemas(value)
