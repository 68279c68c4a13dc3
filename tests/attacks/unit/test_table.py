"""The table of attacks has a row for each body, call, upload and watched file that the gateway reads."""

from __future__ import annotations

import re
from pathlib import Path

from gateway.capabilities.grpc_api.health import HEALTH_SERVICE
from gateway.capabilities.grpc_api.methods import TRITON_METHODS
from gateway.capabilities.grpc_api.reflection import REFLECTION_VERSIONS
from gateway.capabilities.uploads.model_files.kinds import VERIFIABLE_SUFFIXES
from gateway.capacity.body_chunks import ZLIB_WBITS
from gateway.config.files import watched_files
from gateway.config.settings import Settings
from gateway.routes.passthrough.rules import ROUTE_RULES, Forwarding
from gateway.services import build_components
from gateway.tensors.codecs import CODECS, parse_body_type
from gateway.tensors.images import FORMATS
from tests.attacks.table import (
    ATTACKS,
    FileChange,
    FrameWriter,
    GrpcCall,
    HeldCalls,
    HttpRequest,
    Upload,
)
from tests.capabilities.grpc_api.support.grpc_gateway import SERVICE
from tests.interface.openapi import build_document

REQUESTS = [request for attack in ATTACKS.values() for request in attack.requests]
HTTP_REQUESTS = [request for request in REQUESTS if isinstance(request, HttpRequest)]
# A path that also names a version is read by the same function.
VERSION = re.compile(r"/(versions|labels)/\{version\}|/\{model_version\}")


def media_type(request: HttpRequest) -> str:
    return request.content_type.partition(";")[0]


def test_each_path_with_a_body_has_an_attack() -> None:
    described = {
        VERSION.sub("", path)
        for path, operations in build_document()["paths"].items()
        for operation in operations.values()
        if "requestBody" in operation
    }
    patterns = {re.sub(r"\\\{\w+\\\}", "[^/:]+", re.escape(path)) for path in described}
    patterns |= {
        rule.pattern.pattern
        for rule in ROUTE_RULES
        if "POST" in rule.methods and isinstance(rule.action, Forwarding)
    }
    patterns.remove("/v1/models/[^/:]+")  # uploads
    attacked = {request.path for request in HTTP_REQUESTS}
    missing = [
        pattern for pattern in patterns if not any(re.fullmatch(pattern, path) for path in attacked)
    ]
    assert not missing


def test_each_type_and_encoding_of_a_body_has_an_attack() -> None:
    inferences = [request for request in HTTP_REQUESTS if request.path.endswith("/infer")]
    codecs = [parse_body_type(media_type(request)).codec for request in inferences]
    attacked = {codec.media_type for codec in codecs if codec is not None}
    assert attacked == {codec.media_type for codec in CODECS}
    image_types = {f"image/{name.lower()}" for name in FORMATS}
    assert image_types <= set(map(media_type, inferences))
    headers = [header for request in inferences for header in request.headers]
    encodings = {
        ZLIB_WBITS[header.partition(": ")[2]]
        for header in headers
        if header.startswith("Content-Encoding")
    }
    assert encodings == set(ZLIB_WBITS.values())


def test_each_grpc_method_has_an_attack() -> None:
    methods = {f"{SERVICE}/{name}" for name in (*TRITON_METHODS, "ServerReady", "ModelStreamInfer")}
    methods |= {f"/{HEALTH_SERVICE}/{name}" for name in ("Check", "Watch")}
    methods |= {
        f"/{package}.ServerReflection/ServerReflectionInfo" for package in REFLECTION_VERSIONS
    }
    calls = [each for each in REQUESTS if isinstance(each, GrpcCall | HeldCalls | FrameWriter)]
    assert methods == {call.method for call in calls}


def test_each_kind_of_upload_has_an_attack() -> None:
    kinds = {request.kind for request in REQUESTS if isinstance(request, Upload)}
    assert kinds == {*VERIFIABLE_SUFFIXES, "config"}


def test_each_watched_file_has_an_attack(tmp_path: Path) -> None:
    """The gateway has no certificate here, which only its owner can change."""
    files = {name: tmp_path / name for name in ("keys", "models")}
    for name, file in files.items():
        file.write_text(f"{name}: []")
    settings = Settings(keys_file=files["keys"], models_file=files["models"])
    components = build_components(settings)
    changes = {request.label for request in REQUESTS if isinstance(request, FileChange)}
    assert components
    assert changes == set(watched_files) - {"certificate"}  # of another test in this process
