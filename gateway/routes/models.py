"""`GET /v1/models`: what there is, and what each model takes and gives."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from gateway.routes.services import ServicesDep
from gateway.tensors import examples, schema
from gateway.tensors.signature import Signature, Tensor
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


@router.get("/v2/models")
async def v2_models(services: ServicesDep) -> dict[str, list[str]]:
    """The models that are ready, as KServe lists them; Triton itself has no such path."""
    listed = (await models(services))["models"]
    return {"models": [model["name"] for model in listed if model["ready"]]}


@router.get("/v1/models/{model}")
@router.get("/v1/models/{model}/versions/{version}")
async def model(
    request: Request, services: ServicesDep, model: str, version: str = ""
) -> dict[str, Any]:
    """What a model takes and gives, and a request to paste that works."""
    signature = await services.fleet.signature(model, version)
    base_url = str(request.base_url).rstrip("/")
    return {
        **described(signature),
        "curl": examples.curl(signature, base_url),
        "python": examples.python(signature, base_url),
    }


@router.get("/v1/models/{model}/openapi.json")
@router.get("/v1/models/{model}/versions/{version}/openapi.json")
async def openapi(services: ServicesDep, model: str, version: str = "") -> dict[str, Any]:
    """The API description of this one model, with its own inputs and outputs."""
    return schema.openapi(await services.fleet.signature(model, version))


def described(signature: Signature) -> dict[str, Any]:
    return {
        "name": signature.model,
        "versions": list(signature.versions),
        "platform": signature.platform,
        "max_batch_size": signature.max_batch_size,
        "decoupled": signature.decoupled,
        "inputs": [tensor_described(tensor) for tensor in signature.inputs.values()],
        "outputs": [tensor_described(tensor) for tensor in signature.outputs.values()],
    }


def tensor_described(tensor: Tensor) -> dict[str, Any]:
    """The shape is the model's own, without the batch dimension."""
    told: dict[str, Any] = {
        "name": tensor.name,
        "datatype": tensor.datatype.name,
        "shape": list(tensor.shape),
    }
    if tensor.optional:
        told["optional"] = True
    if tensor.content_type:
        told["content_type"] = tensor.content_type
    if tensor.image is not None:
        image = tensor.image
        told["image"] = {
            "mode": image.mode,
            "layout": image.layout.value,
            "height": image.height,
            "width": image.width,
        }
    if tensor.labels:
        told["labels"] = True
    return told
