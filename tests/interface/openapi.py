"""The OpenAPI document, the recorded one, and what a client of the recorded one would miss."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gateway.app import create_app
from gateway.config.settings import Settings
from tests.support.servers import ROOT

DOCUMENT_FILE = ROOT / "docs" / "openapi.json"
# What people read; a change of it breaks no program.
TEXTS = {"description", "summary", "title", "example", "examples", "links", "info", "tags"}
# Bounds of numbers and lengths: wider or narrower is a change of values, not of the form.
BOUNDS = {
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    *("minLength", "maxLength", "minItems", "maxItems"),
}
REQUEST_PARTS = {"requestBody", "parameters"}


def build_framework() -> Any:
    """Return the FastAPI application of a gateway with every capability."""
    options: dict[str, Any] = {"dialects": "torchserve", "jobs": "sqlite:///jobs"}
    application: Any = create_app(Settings(state="memory:", **options))
    return application.framework


def build_document() -> dict[str, Any]:
    return dict(json.loads(json.dumps(build_framework().openapi())))


def read_recorded_document() -> dict[str, Any]:
    return dict(json.loads(DOCUMENT_FILE.read_text()))


def find_broken_references(document: Mapping[str, Any]) -> set[str]:
    """Return each `$ref` that names nothing in the document."""
    nodes: list[Any] = [document]
    references: set[str] = set()
    while nodes:
        node = nodes.pop()
        if isinstance(node, Mapping):
            references |= {value for key, value in node.items() if key == "$ref"}
            nodes += node.values()
        elif isinstance(node, list):
            nodes += node
    return {each for each in references if not has_node(document, each)}


def has_node(document: Mapping[str, Any], reference: str) -> bool:
    node: Any = document
    for part in reference.removeprefix("#/").split("/"):
        if part not in node:
            return False
        node = node[part]
    return True


def format_document(document: Mapping[str, Any]) -> str:
    return json.dumps(document, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def find_breaks(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    """Yield what the new document lacks, or newly requires."""
    yield from compare_nodes(put_schemas_in_place(old, old), put_schemas_in_place(new, new))


def put_schemas_in_place(node: Any, document: Mapping[str, Any]) -> Any:
    """Return a copy without references: where a schema is used decides what its change breaks."""
    if isinstance(node, list):
        return [put_schemas_in_place(each, document) for each in node]
    if not isinstance(node, Mapping):
        return node
    if "$ref" in node:
        name = node["$ref"].removeprefix("#/components/schemas/")
        return put_schemas_in_place(document["components"]["schemas"][name], document)
    return {key: put_schemas_in_place(value, document) for key, value in node.items()}


def compare_nodes(old: Any, new: Any, place: tuple[str, ...] = ()) -> Iterator[str]:
    where = " ".join(place)
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        yield from find_breaks_of_objects(old, new, place)
    elif isinstance(old, list) and isinstance(new, list):
        yield from find_breaks_of_lists(old, new, place)
    elif type(old) is not type(new) or (old != new and place[-1] not in BOUNDS):
        yield f"{where}: changed from {old!r} to {new!r}"


def find_breaks_of_objects(
    old: Mapping[str, Any], new: Mapping[str, Any], place: tuple[str, ...]
) -> Iterator[str]:
    is_named = bool(place) and place[-1] in ("properties", "paths", "schemas", "headers")
    for key, value in old.items():
        if key in TEXTS and not is_named:
            continue
        if key not in new:
            if key == "required" or key in BOUNDS:
                continue  # less is required
            yield f"{' '.join((*place, key))}: removed"
        else:
            yield from compare_nodes(value, new[key], (*place, key))
    if REQUEST_PARTS & set(place) and new.get("required") and not old.get("required"):
        yield f"{' '.join(place)}: now required"


def find_breaks_of_lists(
    old: Sequence[Any], new: Sequence[Any], place: tuple[str, ...]
) -> Iterator[str]:
    where = " ".join(place)
    key = place[-1]
    if key == "parameters":
        named = {(each["in"], each["name"]): each for each in new}
        for each in old:
            name = each["in"], each["name"]
            if name in named:
                yield from compare_nodes(each, named.pop(name), (*place, each["name"]))
            else:
                yield f"{where} {each['name']}: removed"
        yield from (
            f"{where} {each['name']}: now required"
            for each in named.values()
            if each.get("required")
        )
    elif key == "required":
        is_request = bool(REQUEST_PARTS & set(place))
        # A client relies on the fields of a response, and on what a request may leave out.
        lost = set(new) - set(old) if is_request else set(old) - set(new)
        yield from (
            f"{where} {name}: {'now' if is_request else 'no longer'} required" for name in lost
        )
    elif all(isinstance(each, str | int | float | bool | None) for each in (*old, *new)):
        yield from (f"{where} {each}: removed" for each in old if each not in new)
    else:
        if len(new) < len(old):
            yield f"{where}: {len(old) - len(new)} alternatives removed"
        for number, pair in enumerate(zip(old, new, strict=False)):
            yield from compare_nodes(*pair, (*place, str(number)))
