"""Uploads and removals of models, and the files of a model in the repository."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from hmac import compare_digest
from typing import Annotated, Any, Final
from urllib.parse import quote

import orjson
from fastapi import APIRouter, Query, Request, Response
from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse

from gateway.capabilities.uploads.errors import (
    DigestMismatch,
    RepositoryNotConfigured,
    UnsupportedUploadEncoding,
)
from gateway.capabilities.uploads.model_files.entry_names import (
    check_storable_name,
    is_storable_name,
    parse_version_number,
)
from gateway.capabilities.uploads.model_files.model_upload import (
    ModelUpload,
    UploadRules,
    build_upload,
)
from gateway.capabilities.uploads.model_files.received_body import (
    FileBody,
    FormBody,
    ReceivedBody,
    ReceivedFile,
    parse_sha256_digest,
)
from gateway.capabilities.uploads.model_files.staging import Staging
from gateway.capabilities.uploads.model_files.store import ModelStore
from gateway.capabilities.uploads.publisher import ModelPublisher
from gateway.capabilities.uploads.settings import UploadSettings
from gateway.capacity.body_chunks import coalesce_chunks
from gateway.config.settings import ModelUploads
from gateway.errors import Forbidden, MalformedRequest, UnknownModel
from gateway.headers import parse_content_type, parse_header_parameters
from gateway.inference.body import RequestBody
from gateway.media_types import JSON, MULTIPART, OCTET_STREAM
from gateway.routes.dependencies import ServicesForManagement, get_caller
from gateway.routes.openapi import (
    BINARY_CONTENT,
    BINARY_SCHEMA,
    COUNT_SCHEMA,
    STRING_SCHEMA,
    OpenApiResponses,
    build_error_responses,
    build_header_parameter,
    build_json_content,
    build_list_schema,
    build_object_schema,
    build_response,
)
from gateway.services import Services
from gateway.telemetry.request_info import CLIENT_CLOSED_REQUEST, RequestInfo

REPOSITORY_ERRORS: Final = {
    404: "No Triton has the model in its repository, or the caller cannot see it.",
    501: "The gateway has no model repository.",
}
CHECKSUM_SCHEMA: Final = {"type": "string", "pattern": "^[0-9a-f]{64}$"}
UPLOAD_SCHEMA: Final = build_object_schema(
    {
        "model": STRING_SCHEMA,
        "version": STRING_SCHEMA,
        "versions": build_list_schema(
            STRING_SCHEMA, "All versions, if the archive contained several."
        ),
        "ready": {"type": "boolean", "description": "The model is loaded, and can be called."},
        "infer": {"type": "string", "description": "The path of inference requests."},
        "sha256": CHECKSUM_SCHEMA | {"description": "Checksum of the model file or archive."},
        "bytes": COUNT_SCHEMA,
    },
    optional=("versions",),
    title="Upload",
)
REMOVAL_SCHEMA: Final = build_object_schema(
    {"model": STRING_SCHEMA, "version": STRING_SCHEMA}, optional=("version",), title="Removal"
)
FILE_SCHEMA: Final = build_object_schema(
    {
        "path": {"type": "string", "description": "Path in the folder of the model."},
        "bytes": COUNT_SCHEMA,
        "sha256": CHECKSUM_SCHEMA,
    },
    title="ModelFile",
)
FILE_LIST_SCHEMA: Final = build_object_schema(
    {"model": STRING_SCHEMA, "files": {"type": "array", "items": FILE_SCHEMA}},
    title="ModelFileList",
)
UPLOAD_ERRORS: Final = build_error_responses(
    *(*REPOSITORY_ERRORS, 409, 415, 502, 504, 507),
    schema={"$ref": "#/components/schemas/ManagementError"},
    descriptions=REPOSITORY_ERRORS
    | {
        400: "The request is malformed, or the body does not have the announced digest.",
        409: "The request conflicts with how the models are managed.",
        413: "The upload exceeds the size limit.",
        415: "The body has a Content-Encoding.",
        422: "The file is not a model, its config does not match, or Triton cannot load it.",
        502: "The model was loaded on some replicas only. The gateway retries on the others.",
        507: "The model does not fit into the repository.",
    },
)
UPLOAD_RESPONSES: Final[OpenApiResponses] = UPLOAD_ERRORS | {
    201: build_response(
        "The version was stored, and is loaded on every replica unless `load` is false.",
        build_json_content(UPLOAD_SCHEMA),
        {"Location": {"required": True, "schema": STRING_SCHEMA}},
    )
}
REMOVAL_RESPONSES: Final[OpenApiResponses] = UPLOAD_ERRORS | {
    200: build_response("The files were removed.", build_json_content(REMOVAL_SCHEMA))
}
FILE_ERRORS: Final = build_error_responses(*REPOSITORY_ERRORS, descriptions=REPOSITORY_ERRORS)
FILE_LIST_RESPONSES: Final[OpenApiResponses] = FILE_ERRORS | {
    200: build_response("The files, with their checksums.", build_json_content(FILE_LIST_SCHEMA))
}
FILE_RESPONSES: Final[OpenApiResponses] = FILE_ERRORS | {
    200: build_response(
        "The content of the file.",
        {OCTET_STREAM: BINARY_CONTENT},
        {"Repr-Digest": {"required": True, "schema": STRING_SCHEMA}},
    )
}
FORM_SCHEMA: Final[dict[str, Any]] = {
    "title": "UploadForm",
    "type": "object",
    "properties": {
        "model": BINARY_SCHEMA | {"description": "The model file, or an archive of a folder."},
        "config": {"type": "string", "description": "The content of config.pbtxt, or JSON."},
        "labels": BINARY_SCHEMA | {"description": "A file with one label per line."},
    },
    "required": ["model"],
}
UPLOAD_OPENAPI: Final = {
    "requestBody": {
        "required": True,
        "description": "A model file, a .zip or .tar.gz file of a model folder, or a form.",
        "content": {OCTET_STREAM: BINARY_CONTENT, MULTIPART: {"schema": FORM_SCHEMA}},
    },
    "parameters": [
        build_header_parameter(
            "Repr-Digest",
            "Checksum of the body, which is verified: `sha-256=:BASE64:` (RFC 9530).",
            STRING_SCHEMA,
        )
    ],
}


router = APIRouter(tags=["uploads"])
route_upload = partial(
    router.put, status_code=201, responses=UPLOAD_RESPONSES, openapi_extra=UPLOAD_OPENAPI
)
route_files = partial(router.get, responses=FILE_LIST_RESPONSES)
WRITE_BYTES: Final = 1 << 20
DIGEST_HEADERS: Final = (b"repr-digest", b"content-digest")


@route_upload("/v1/models/{model}", operation_id="upload_model", summary="Upload a model")
@route_upload(
    "/v1/models/{model}/versions/{version}",
    operation_id="upload_model_version",
    summary="Upload a version of a model",
)
async def upload_model(
    request: Request,
    services: ServicesForManagement,
    model: str,
    version: str = "",
    load: Annotated[bool, Query(description="Load the model on every replica.")] = True,
    filename: Annotated[str, Query(description="Name of the file, if its kind is not known.")] = "",
) -> Response:
    """Store a model as this or the next version, and load it on every replica.

    The kind of file is recognized by its content. If the model cannot be loaded, nothing is stored, and
    the previous version stays in use.
    """
    publisher = get_publisher(services)
    check_storable_name(model)
    number = parse_version_number(version) if version else None
    accepts_code = services.accepts_code(get_caller(request))
    max_bytes = services.get(UploadSettings).max_model_bytes
    rules = UploadRules(model, accepts_code, max_bytes, services.settings.max_body_bytes)
    body = RequestBody(request.scope, request.receive)
    try:
        async with receive_files(body, publisher.files, filename, rules) as (staging, received):
            build = partial(build_upload, received, staging, rules)
            change = publisher.publish(model, number, build, load=load)
            upload = await publisher.run("upload", model, change)
    except ClientDisconnect:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    versions = [str(version) for version in sorted(upload.versions)]
    record_version(request, ",".join(versions), upload)
    document: dict[str, Any] = {"model": model, "version": versions[-1]}
    if len(versions) > 1:
        document["versions"] = versions
    document |= {
        "ready": load,
        "infer": f"/v1/models/{quote(model)}/infer",
        "sha256": upload.sha256,
        "bytes": upload.size,
    }
    headers = {"Location": f"/v1/models/{quote(model)}/versions/{versions[-1]}"}
    return Response(orjson.dumps(document), 201, headers, JSON)


@router.delete(
    "/v1/models/{model}",
    operation_id="remove_model",
    summary="Remove a model",
    responses=REMOVAL_RESPONSES,
)
async def remove_model(request: Request, services: ServicesForManagement, model: str) -> Response:
    """Unload a model from every replica, and remove its files and labels."""
    publisher = get_publisher(services)
    check_stored_name(model)
    change = publisher.remove_model(model, get_caller(request).can_see)
    await publisher.run("removal", model, change)
    return Response(orjson.dumps({"model": model}), media_type=JSON)


@router.delete(
    "/v1/models/{model}/versions/{version}",
    operation_id="remove_model_version",
    summary="Remove a version of a model",
    responses=REMOVAL_RESPONSES,
)
async def remove_model_version(
    request: Request, services: ServicesForManagement, model: str, version: str
) -> Response:
    """Remove the files of a version, and reload the model if it is loaded."""
    publisher = get_publisher(services)
    number = find_stored_version(model, version)
    record_version(request, str(number))
    await publisher.run("removal", model, publisher.remove_version(model, number))
    return Response(orjson.dumps({"model": model, "version": str(number)}), media_type=JSON)


@route_files(
    "/v1/models/{model}/files", operation_id="list_model_files", summary="List the files of a model"
)
@route_files(
    "/v1/models/{model}/versions/{version}/files",
    operation_id="list_model_version_files",
    summary="List the files of a version of a model",
)
async def list_model_files(
    services: ServicesForManagement, model: str, version: str = ""
) -> dict[str, Any]:
    """Return the names, sizes and checksums of the files in the gateway's repository."""
    files = find_publisher(services).files
    folder = str(find_stored_version(model, version)) if version else ""
    check_stored_name(model)
    entries = await files.run(files.list_files, model, folder)
    return {
        "model": model,
        "files": [
            {"path": entry.path, "bytes": entry.size, "sha256": entry.sha256} for entry in entries
        ],
    }


@router.get(
    "/v1/models/{model}/files/{path:path}",
    operation_id="download_model_file",
    summary="Download a file of a model",
    responses=FILE_RESPONSES,
    response_class=StreamingResponse,
)
async def download_model_file(
    services: ServicesForManagement, model: str, path: str
) -> StreamingResponse:
    """Return the content of a file in the gateway's repository."""
    files = find_publisher(services).files
    check_stored_name(model)
    content = await files.run(files.open_file, model, path)
    digest = base64.b64encode(bytes.fromhex(content.sha256)).decode()
    headers = {"Content-Length": str(content.size), "Repr-Digest": f"sha-256=:{digest}:"}
    pieces = stream_pieces(files, content.pieces)
    return StreamingResponse(pieces, headers=headers, media_type=OCTET_STREAM)


async def stream_pieces(files: ModelStore, pieces: Iterator[bytes]) -> AsyncIterator[bytes]:
    while piece := await files.run(next, pieces, b""):
        yield piece


def find_publisher(services: Services) -> ModelPublisher:
    """Return the publisher, also if uploads are disabled. Raises `RepositoryNotConfigured`."""
    publisher = services.find(ModelPublisher)
    if publisher is None:
        raise RepositoryNotConfigured
    return publisher


def get_publisher(services: Services) -> ModelPublisher:
    """Return the publisher. Raises `RepositoryNotConfigured`, or `Forbidden` if uploads are disabled."""
    publisher = find_publisher(services)
    if services.settings.model_uploads is ModelUploads.off:
        raise Forbidden("uploads are disabled; set GATEWAY_MODEL_UPLOADS to artifacts or code")
    return publisher


def check_stored_name(model: str) -> None:
    if not is_storable_name(model):
        raise UnknownModel(model)


def find_stored_version(model: str, version: str) -> int:
    """Return the number of a version. Raises `UnknownModel` for an impossible one."""
    check_stored_name(model)
    try:
        return parse_version_number(version)
    except MalformedRequest:
        raise UnknownModel(model, version) from None


def record_version(request: Request, version: str, upload: ModelUpload | None = None) -> None:
    info: RequestInfo = request.scope["request_info"]
    if info.management_call is not None:
        info.management_call.version = version
        info.management_call.sha256 = "" if upload is None else upload.sha256


@asynccontextmanager
async def receive_files(
    body: RequestBody, files: ModelStore, file_name: str, rules: UploadRules
) -> AsyncIterator[tuple[Staging, list[ReceivedFile]]]:
    """Write the body to temporary files, which are removed at the end if they were not installed.

    Raises `TooManyUploads`, `RepositoryFull`, `TooLarge`, `DigestMismatch` or `MalformedRequest`.
    """
    digest = find_digest(body)
    with files.hold_upload_slot():
        await files.run(files.check_quota, body.content_length or 0)
        staging = await files.run(files.create_staging)
        try:
            received_body = await files.run(create_body, body, staging, file_name)
            # Larger chunks, because each is passed to a thread.
            async for chunk in coalesce_chunks(body.stream(rules.max_bytes), WRITE_BYTES):
                await files.run(received_body.feed, chunk)
            received = await files.run(received_body.finish)
            if digest and not compare_digest(digest, received_body.digest):
                raise DigestMismatch
            yield staging, received
        finally:
            # Not in a thread: all threads may work for clients that have left.
            staging.stop()
            await files.run(staging.discard)


def find_digest(body: RequestBody) -> bytes:
    """Return the announced digest of the body. Raises `MalformedRequest` or `UnsupportedUploadEncoding`."""
    if body.get_header(b"content-encoding") not in (None, "", "identity"):
        raise UnsupportedUploadEncoding
    headers = filter(None, map(body.get_header, DIGEST_HEADERS))
    header = next(headers, None)
    return b"" if header is None else parse_sha256_digest(header)


def create_body(body: RequestBody, staging: Staging, file_name: str) -> ReceivedBody:
    if parse_content_type(body.content_type)[0] == MULTIPART:
        return FormBody(staging, body.content_type)
    disposition = body.get_header(b"content-disposition") or ""
    named = file_name or parse_header_parameters(disposition)[1].get("filename", "")
    return FileBody(staging, named)
