"""The route of the secret that signs callbacks."""

from __future__ import annotations

from typing import Final

import orjson
from fastapi import APIRouter, Response

from gateway.capabilities.jobs.callbacks import CallbackSecrets
from gateway.media_types import JSON
from gateway.routes.dependencies import ServicesForAdministration
from gateway.routes.openapi import build_list_schema, build_responses
from gateway.tensors.codecs import STRING_SCHEMA
from gateway.tensors.schema import build_object_schema

SECRETS_SCHEMA: Final = build_object_schema(
    {"secrets": build_list_schema(STRING_SCHEMA, "Each callback has a signature by each of them.")}
)

router = APIRouter(tags=["jobs"])


@router.get(
    "/v1/jobs/secret",
    operation_id="get_callback_secret",
    summary="The secret that signs callbacks",
    responses=build_responses(SECRETS_SCHEMA, "The secrets.", 403),
)
async def get_callback_secret(services: ServicesForAdministration) -> Response:
    """Return the secrets of callbacks of keys without their own."""
    document = {"secrets": services.get(CallbackSecrets).own}
    return Response(orjson.dumps(document), headers={"Cache-Control": "no-store"}, media_type=JSON)
