"""The routes of uploaded models."""

from __future__ import annotations

from typing import Any, Final

from gateway.media_types import MULTIPART, OCTET_STREAM
from gateway.openapi.responses import OpenApiResponses, build_error_responses, build_response
from gateway.openapi.schemas import (
    BINARY_CONTENT,
    COUNT_SCHEMA,
    build_header_parameter,
    build_json_content,
    build_list_schema,
)
from gateway.tensors.codecs import BINARY_SCHEMA, STRING_SCHEMA
from gateway.tensors.schema import build_object_schema

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
        "sha256": CHECKSUM_SCHEMA | {"description": "Checksum of the model file or archive."},
        "bytes": COUNT_SCHEMA,
    },
    optional=("versions",),
)
REMOVAL_SCHEMA: Final = build_object_schema(
    {"model": STRING_SCHEMA, "version": STRING_SCHEMA}, optional=("version",)
)
FILE_SCHEMA: Final = build_object_schema(
    {
        "path": {"type": "string", "description": "Path in the folder of the model."},
        "bytes": COUNT_SCHEMA,
        "sha256": CHECKSUM_SCHEMA,
    }
)
FILE_LIST_SCHEMA: Final = build_object_schema(
    {"model": STRING_SCHEMA, "files": {"type": "array", "items": FILE_SCHEMA}}
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
