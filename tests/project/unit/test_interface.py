"""The public interface is the recorded one, and nothing is removed from it unnoticed."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.interface import names, openapi
from tests.support.servers import ROOT

Document = dict[str, Any]
INFER = "/v1/models/{model}/infer"
REPLICAS = "/v1/replicas"


@pytest.fixture(scope="module")
def document() -> Document:
    return openapi.build_document()


@pytest.fixture(scope="module")
def recorded() -> Document:
    return openapi.read_recorded_document()


def replica_schema(document: Document) -> Any:
    return document["components"]["schemas"]["Replica"]


def test_generators_find_named_schemas_and_no_boolean_constants(document: Document) -> None:
    schemas = document["components"]["schemas"]
    assert {"Model", "ModelList", "InferRequest", "InferResponse", "Job", "Event", "Error"} <= {
        *schemas
    }
    assert all(name.isidentifier() for name in schemas)
    inline = [each for each in find_nodes(document["paths"], "title") if "properties" in each]
    assert [each["title"] for each in inline if str(each["title"]).isidentifier()] == []
    constants = {str(each["const"]) for each in find_nodes(document, "const")}
    assert not constants & {"True", "False"}


def find_nodes(node: Any, key: str) -> Iterator[dict[str, Any]]:
    if isinstance(node, dict):
        if key in node:
            yield node
        node = list(node.values())
    if isinstance(node, list):
        for each in node:
            yield from find_nodes(each, key)


def test_no_public_name_is_removed(document: Document) -> None:
    removed = names.read_recorded_names() - names.list_names(document)
    assert not removed, "make interface ARGS=--breaking, and a line in CHANGELOG.md"


def test_every_public_name_is_recorded(document: Document) -> None:
    assert names.list_names(document) == names.read_recorded_names(), "make interface"


def test_recorded_names_cover_every_kind(document: Document) -> None:
    kinds = {name.split()[0] for name in names.list_names(document)}
    assert kinds == {
        "setting",
        "path",
        "python",
        "code",
        "metric",
        "field",
        "command",
        "flag",
        "variable",
        "exit",
        "value",
    }
    text = (ROOT / "docs/reference/stability.md").read_text()
    for kind in kinds:
        assert re.search(rf"\b{kind}s?\b", text), kind


def test_operations_have_names_summaries_and_tags(document: Document) -> None:
    operations = [operation for path in document["paths"].values() for operation in path.values()]
    names = [operation["operationId"] for operation in operations]
    assert len(set(names)) == len(names)
    for operation in operations:
        assert re.fullmatch("[a-z]+(_[a-z]+)*", operation["operationId"])
        assert operation["summary"]
        assert operation["description"].endswith(".")
        assert len(operation["tags"]) == 1


def test_openapi_document_breaks_no_recorded_client(document: Document, recorded: Document) -> None:
    assert [*openapi.find_breaks(recorded, document)] == []


def test_recorded_openapi_document_is_current(document: Document) -> None:
    current = openapi.format_document(document)
    assert current == openapi.DOCUMENT_FILE.read_text(), "make interface"


BREAKS: dict[str, tuple[Callable[[Document], Any], str]] = {
    "a path": (lambda new: new["paths"].pop(REPLICAS), f"paths {REPLICAS}: removed"),
    "a method": (
        lambda new: new["paths"][INFER].pop("post"),
        f"paths {INFER} post: removed",
    ),
    "a code": (
        lambda new: new["paths"][INFER]["post"]["responses"].pop("429"),
        f"paths {INFER} post responses 429: removed",
    ),
    "a field": (
        lambda new: replica_schema(new)["properties"].pop("outstanding"),
        "items properties outstanding: removed",
    ),
    "a field that is no longer there always": (
        lambda new: replica_schema(new)["required"].remove("state"),
        "required state: no longer required",
    ),
    "a value": (
        lambda new: replica_schema(new)["properties"]["state"]["enum"].remove("DOWN"),
        "state enum DOWN: removed",
    ),
    "a type": (
        lambda new: replica_schema(new)["properties"]["outstanding"].update(type="string"),
        "outstanding type: changed from 'integer' to 'string'",
    ),
    "a header of a request": (
        lambda new: new["paths"][INFER]["post"]["parameters"].pop(),
        f"paths {INFER} post parameters",
    ),
    "a parameter that is now required": (
        lambda new: new["paths"][INFER]["post"]["parameters"].append(
            {"name": "unit", "in": "query", "required": True, "schema": {"type": "string"}}
        ),
        f"paths {INFER} post parameters unit: now required",
    ),
    "a body that is now required": (
        lambda new: new["paths"]["/v2/repository/index"]["post"]["requestBody"].update(
            required=True
        ),
        "requestBody required: changed from False to True",
    ),
    "a media type": (
        lambda new: new["paths"][INFER]["post"]["requestBody"]["content"].pop("application/json"),
        "requestBody content application/json: removed",
    ),
    "the name of an operation": (
        lambda new: new["paths"][REPLICAS]["get"].update(operationId="other"),
        "operationId: changed from 'list_replicas' to 'other'",
    ),
}


@pytest.mark.parametrize("removed", BREAKS)
def test_removal_from_the_openapi_document_is_found(recorded: Document, removed: str) -> None:
    change, message = BREAKS[removed]
    new = copy.deepcopy(recorded)
    change(new)
    found = [*openapi.find_breaks(recorded, new)]
    assert any(message in line for line in found), found


def test_addition_to_the_openapi_document_is_no_break(recorded: Document) -> None:
    new = copy.deepcopy(recorded)
    new["paths"]["/v3"] = {"get": {"responses": {}}}
    replica_schema(new)["properties"]["zone"] = {"type": "string"}
    replica_schema(new)["required"].append("zone")
    new["paths"][INFER]["post"]["responses"]["418"] = {"description": "A teapot."}
    new["paths"][INFER]["post"]["parameters"].append(
        {"name": "unit", "in": "query", "required": False, "schema": {"type": "string"}}
    )
    new["paths"][INFER]["post"]["summary"] = "Other words"
    assert [*openapi.find_breaks(recorded, new)] == []
