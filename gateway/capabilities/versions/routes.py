"""Version labels of models: list, read, change and delete."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from fastapi import APIRouter, Request

from gateway.capabilities.versions.label_manager import LabelManager
from gateway.capabilities.versions.labels import LABEL_NAME, MAX_SHARE, MAX_VERSIONS, STICKY_BY_KEY
from gateway.fleet.index import Index
from gateway.routes.dependencies import ServicesForInference, ServicesForManagement, record_label
from gateway.routes.models import VERSION_STATUS_SCHEMA
from gateway.routes.openapi import (
    STRING_SCHEMA,
    Schema,
    build_json_body,
    build_list_schema,
    build_map_schema,
    build_object_schema,
    build_responses,
)
from gateway.routes.repository import read_management_body
from gateway.services import ModelDescriber, Services

VERSION_NUMBER_SCHEMA: Final[dict[str, Any]] = {"type": "string", "pattern": "^[0-9]{1,19}$"}
SHARES_SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "minProperties": 1,
    "maxProperties": MAX_VERSIONS,
    "propertyNames": {"pattern": "^[0-9]{1,19}$"},
    "additionalProperties": {"type": "integer", "minimum": 1, "maximum": MAX_SHARE},
    "description": "Versions and their shares of the requests, which need not add up to 100.",
}
SHADOW_SCHEMA: Final = build_object_schema(
    {
        "version": VERSION_NUMBER_SCHEMA,
        "percent": {"type": "number", "exclusiveMinimum": 0, "maximum": 100, "default": 100},
    },
    optional=("percent",),
    additionalProperties=False,
    description="A version that gets a copy of some requests. Its responses are forgotten.",
)
LABEL_PROPERTIES: Final = {
    "version": VERSION_NUMBER_SCHEMA,
    "versions": SHARES_SCHEMA,
    "sticky": {
        "const": STICKY_BY_KEY,
        "description": "Without X-Split-Key, the name of the caller's key decides on the version.",
    },
    "shadow": SHADOW_SCHEMA,
}
LABEL_SCHEMA: Final = build_object_schema(
    {
        "model": STRING_SCHEMA,
        "label": {"type": "string", "pattern": f"^{LABEL_NAME.pattern}$"},
        **LABEL_PROPERTIES,
        "declared": {"const": True, "description": "The models file contains the label."},
        "ready": build_map_schema({"type": "boolean"}, "Versions that a replica can serve now."),
        "model_version_status": build_list_schema(
            VERSION_STATUS_SCHEMA, "The same in TensorFlow Serving's format."
        ),
    },
    optional=("version", "versions", "sticky", "shadow", "declared"),
)
LABEL_LIST_SCHEMA: Final = build_object_schema(
    {"model": STRING_SCHEMA, "labels": {"type": "array", "items": LABEL_SCHEMA}}
)
LABEL_RESPONSES: Final = build_responses(LABEL_SCHEMA, "The label.", 404)
LABEL_CHANGE_RESPONSES: Final = build_responses(LABEL_SCHEMA, "The label.", 404, 409)
LABEL_LIST_RESPONSES: Final = build_responses(LABEL_LIST_SCHEMA, "The labels of the model.", 404)
LABEL_OPENAPI: Final = build_json_body(
    {
        "type": "object",
        "properties": LABEL_PROPERTIES,
        "additionalProperties": False,
        "oneOf": [{"required": ["version"]}, {"required": ["versions"]}],
    },
    example={"versions": {"1": 90, "2": 10}},
)
LABEL_FIELDS: Final[Schema] = {
    "labels": build_map_schema(
        {"type": "object"}, "Version labels: the version, or the versions with their shares."
    )
}


class LabelDescriber(ModelDescriber):
    """Adds the labels of each model to the list."""

    listed_model_fields = LABEL_FIELDS

    def complete_listed_model(
        self, services: Services, model: dict[str, Any], indexes: Mapping[str, Index]
    ) -> None:
        if labels := services.get(LabelManager).list_labels(model["name"]):
            model["labels"] = labels


router = APIRouter(tags=["labels"])


@router.get(
    "/v1/models/{model}/labels",
    operation_id="list_labels",
    summary="List the labels of a model",
    responses=LABEL_LIST_RESPONSES,
)
async def list_labels(services: ServicesForInference, model: str) -> dict[str, Any]:
    """Return the version labels of a model, declared ones included."""
    return {"model": model, "labels": services.get(LabelManager).describe_labels(model)}


@router.get(
    "/v1/models/{model}/labels/{label}",
    operation_id="get_label",
    summary="A label of a model",
    responses=LABEL_RESPONSES,
)
async def get_label(services: ServicesForInference, model: str, label: str) -> dict[str, Any]:
    """Return the versions that a label means, and whether they are ready."""
    return services.get(LabelManager).describe_label(model, label)


@router.put(
    "/v1/models/{model}/labels/{label}",
    operation_id="set_label",
    summary="Set a label of a model",
    responses=LABEL_CHANGE_RESPONSES,
    openapi_extra=LABEL_OPENAPI,
)
async def set_label(
    request: Request, services: ServicesForManagement, model: str, label: str
) -> dict[str, Any]:
    """Let a label mean a version, or split its requests between versions.

    Every version must be ready. All gateways with the same state use the label within two seconds.
    """
    document = await read_management_body(request, services)
    record_label(request, services, model, label)
    return await services.get(LabelManager).set_label(model, label, document)


@router.delete(
    "/v1/models/{model}/labels/{label}",
    operation_id="delete_label",
    summary="Delete a label of a model",
    responses=LABEL_CHANGE_RESPONSES,
)
async def delete_label(
    request: Request, services: ServicesForManagement, model: str, label: str
) -> dict[str, Any]:
    """Delete a label and return what it was."""
    record_label(request, services, model, label)
    return await services.get(LabelManager).delete_label(model, label)
