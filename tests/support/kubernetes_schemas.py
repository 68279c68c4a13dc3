"""Schemas of Kubernetes objects: those of three versions, and of the operators' custom resources."""

from __future__ import annotations

import json
import re
import subprocess
from functools import cache
from importlib.resources import files
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
from referencing import Registry
from referencing.jsonschema import DRAFT202012

from tests.support.manifests import Resource
from tests.support.missing import find_program, format_reason
from tests.support.servers import ROOT

KUBERNETES = ("1.33", "1.35", "1.37")
CUSTOM = {"GRPCRoute", "PodMonitor", "PrometheusRule", "ScaledObject", "HTTPRoute"}


@cache
def schema_of(version: str, name: str) -> Any:
    """Return the schema that kubernetes-validate --strict uses; None for an unknown kind."""
    folder = files("kubernetes_validate") / "kubernetes-json-schema" / f"v{version}.0-local-strict"
    path = folder / f"{name}.json"
    return json.loads(path.read_text()) if path.is_file() else None


@cache
def definitions(version: str) -> Registry[Any]:
    shared = DRAFT202012.create_resource(schema_of(version, "_definitions"))
    registry: Registry[Any] = Registry().with_resource("_definitions.json", shared)
    return registry.crawl()


@cache
def validator(version: str, kind: str, api_version: str) -> Any:
    api = re.sub(r"^([^./]*)(?:\.[^/]*)?/", r"\1-", api_version)
    schema = schema_of(version, f"{kind.lower()}-{api}")
    assert schema is not None, f"Kubernetes {version} has no {kind} of {api_version}"
    return jsonschema.Draft202012Validator(schema, registry=definitions(version))


def complaints(resource: Resource, version: str) -> list[str]:
    return complaints_of(json.dumps(resource), version)


@cache  # the variants have most of their resources in common
def complaints_of(document: str, version: str) -> list[str]:
    resource = json.loads(document)
    found = validator(version, resource["kind"], resource["apiVersion"]).iter_errors(resource)
    return [f"{resource['kind']} {resource['metadata']['name']}: {each.message}" for each in found]


def check_custom(resources: list[Resource]) -> str:
    folder = ROOT / "tests" / "crds"
    find_program("node", "nodejs npm")
    if not (folder / "node_modules").is_dir():
        pytest.skip(format_reason("the folder of schemas of custom resources", "make crds"))
    return subprocess.run(
        ["node", "check.mjs"],
        cwd=folder,
        input=json.dumps(resources),
        capture_output=True,
        text=True,
        timeout=60,
    ).stderr
