"""`GET /v1/models`: what there is, and what each model takes and gives."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from gateway.routes.services import ServicesDep
from gateway.triton.complaints import Asked

router = APIRouter(tags=["models"])
TIMEOUT_S = 5.0


@router.get("/v1/models")
async def models(services: ServicesDep) -> dict[str, Any]:
    """Every model of the repository with its versions and their states."""
    index = await services.fleet.ask(
        b"POST", "/v2/repository/index", asked=Asked(), timeout_s=TIMEOUT_S
    )
    found: dict[str, dict[str, Any]] = {}
    for entry in index or ():
        model = found.setdefault(entry["name"], {"name": entry["name"], "versions": []})
        if "version" in entry:
            model["versions"].append(
                {key: entry[key] for key in ("version", "state", "reason") if entry.get(key)}
            )
    for model in found.values():
        model["ready"] = any(version.get("state") == "READY" for version in model["versions"])
    return {"models": list(found.values())}
