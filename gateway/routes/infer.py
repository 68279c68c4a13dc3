"""`POST /v1/models/{model}/infer`: decode, ask, encode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import anyio
import numpy as np
import orjson
from fastapi import APIRouter, Request, Response

from gateway.errors import DeadlinePassed
from gateway.fleet.pool import Call, output_names
from gateway.limits import Decoders
from gateway.routes.bodies import payload_of
from gateway.routes.services import Services, ServicesDep
from gateway.tensors.images import ImageLimits, pixels
from gateway.tensors.inputs import Inputs, images_of, to_inputs
from gateway.tensors.outputs import jsonable, renderer, text_or_base64
from gateway.tensors.payload import JSON, Limits, Payload
from gateway.tensors.signature import Signature

router = APIRouter(tags=["inference"])
FIRST_VALUES = 8
# Converting numbers of this many bytes is worth a thread.
LARGE_ARRAY_BYTES = 1 << 20


@router.post("/v1/models/{model}/infer")
@router.post("/v1/models/{model}/versions/{version}/infer")
async def infer(request: Request, services: ServicesDep, model: str, version: str = "") -> Response:
    """Inference from what people have: an image, a text, numbers, a form, JSON or NumPy's files."""
    timeout_s = services.timeout_s(request.headers.get("x-request-timeout"))
    try:
        with anyio.fail_after(timeout_s):
            return await answer(
                request, services, await services.fleet.signature(model, version), timeout_s
            )
    except TimeoutError as exc:
        raise DeadlinePassed(timeout_s) from exc


async def answer(
    request: Request, services: Services, signature: Signature, timeout_s: float
) -> Response:
    deadline = anyio.current_time() + timeout_s
    limits = Limits(max_bytes=services.settings.max_body_bytes)
    payload = await payload_of(request, limits, services.decoders)
    outputs = output_names(signature, payload.outputs)
    render = renderer(
        request.headers.get("accept", ""), signature, outputs or tuple(signature.outputs)
    )
    image_limits = ImageLimits(services.settings.max_image_pixels)
    inputs = await converted(payload, signature, image_limits, services.decoders)
    if request.query_params.get("dry_run", "").lower() in ("1", "true", "yes"):
        return Response(orjson.dumps(described(signature, inputs)), media_type=JSON)
    request.scope["model"] = signature.model
    call = Call(outputs, payload.parameters, payload.id or request.scope["request_id"], deadline)
    result = await services.fleet.infer(signature, inputs, call)
    rendered = render(result)
    return Response(rendered.body, media_type=rendered.content_type)


async def converted(
    payload: Payload, signature: Signature, limits: ImageLimits, decoders: Decoders
) -> Inputs:
    """The tensors; images and large arrays are converted in a thread, a few pixels at a time."""
    images = images_of(payload, signature, limits)
    work = partial(to_inputs, payload, signature, limits)
    if images or size_of(payload) > LARGE_ARRAY_BYTES:
        return await decoders.run(sum(map(pixels, images)), work)
    return work()


def size_of(payload: Payload) -> int:
    """About how many bytes of numbers there are to convert."""
    values = [part.value for parts in payload.parts.values() for part in parts]
    return sum(
        value.nbytes if isinstance(value, np.ndarray) else 8 * len(value)
        for value in values
        if isinstance(value, (np.ndarray, list))
    )


def described(signature: Signature, inputs: Inputs) -> Mapping[str, Any]:
    """What `?dry_run=true` answers: the tensors that would be sent."""
    return {
        "model": signature.model,
        "version": signature.version,
        "inputs": [
            {
                "name": name,
                "datatype": signature.inputs[name].datatype.name,
                "shape": list(array.shape),
                "bytes": byte_size(array),
                "first_values": first_values(array),
            }
            for name, array in inputs.arrays.items()
        ],
    }


def byte_size(array: np.ndarray) -> int:
    """The size on the wire; an element of BYTES has its length before it, in 4 bytes."""
    return sum(4 + len(value) for value in array.flat) if array.dtype.kind == "O" else array.nbytes


def first_values(array: np.ndarray) -> Sequence[Any]:
    first = array.ravel()[:FIRST_VALUES]
    if array.dtype.kind == "O":
        return [text_or_base64(value[:200]) for value in first]
    values = jsonable(first)
    return list(values.tolist() if isinstance(values, np.ndarray) else values)
