"""Version labels of models: list, read, change and delete."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from gateway.capabilities.versions.description import (
    LABEL_CHANGE_RESPONSES,
    LABEL_LIST_RESPONSES,
    LABEL_OPENAPI,
    LABEL_RESPONSES,
)
from gateway.capabilities.versions.label_manager import LabelManager
from gateway.routes.dependencies import ServicesForInference, ServicesForManagement, record_label
from gateway.routes.repository import read_management_body

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
