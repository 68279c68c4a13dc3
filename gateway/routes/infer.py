"""The inference endpoint of `/v1`: `/infer`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Annotated, Any, Final

import numpy as np
import orjson
from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from gateway.capacity.admission import Slot
from gateway.errors import GatewayError, serialize_error
from gateway.fleet.inference import ResultStream
from gateway.fleet.signatures import select_outputs
from gateway.headers import list_accepted_types
from gateway.inference import pipeline
from gateway.inference.decode import decode
from gateway.media_types import EVENT_STREAM, JSON, NDJSON, NPY, NPZ, escape_line_separators
from gateway.routes.dependencies import InferenceRoute
from gateway.routes.model_openapi import INFER_BODY_CONTENT
from gateway.routes.openapi import (
    ARRAY_SCHEMA,
    BINARY_CONTENT,
    COUNT_SCHEMA,
    ERROR_DESCRIPTIONS,
    REQUEST_HEADER_PARAMETERS,
    STREAM_CONTENT,
    STRING_SCHEMA,
    build_header_parameter,
    build_object_schema,
    build_responses,
)
from gateway.services import Services
from gateway.tensors.dtypes import DATATYPES
from gateway.tensors.inputs import InferInputs
from gateway.tensors.outputs import array_to_json, bytes_to_json, choose_result_encoder
from gateway.tensors.signature import Signature
from gateway.triton.sequence import MAX_SEQUENCE_ID_BYTES

INFER_RESPONSE_SCHEMA = build_object_schema(
    {
        "id": STRING_SCHEMA,
        "model": STRING_SCHEMA,
        "version": STRING_SCHEMA,
        "outputs": {"type": "object", "description": "Values by output name."},
    },
    title="InferResponse",
)
DRY_RUN_INPUT_SCHEMA = build_object_schema(
    {
        "name": STRING_SCHEMA,
        "datatype": {"enum": list(DATATYPES)},
        "shape": {"type": "array", "items": COUNT_SCHEMA},
        "bytes": COUNT_SCHEMA,
        "first_values": ARRAY_SCHEMA,
    },
    title="DecodedInput",
)
DRY_RUN_SCHEMA = build_object_schema(
    {
        "model": STRING_SCHEMA,
        "version": STRING_SCHEMA,
        "inputs": {"type": "array", "items": DRY_RUN_INPUT_SCHEMA},
    },
    description="The tensors, if `dry_run` is true.",
    title="DryRun",
)
VERSION_HEADERS = {
    "X-Model-Version": {
        "description": "The version that answered, if a label decided on it or the body does not say it.",
        "required": False,
        "schema": STRING_SCHEMA,
    }
}
INFER_RESPONSES = build_responses(
    {"anyOf": [INFER_RESPONSE_SCHEMA, DRY_RUN_SCHEMA]},
    "The model's outputs.",
    *ERROR_DESCRIPTIONS,
    headers=VERSION_HEADERS,
)
INFER_RESPONSES[200]["content"] |= {
    NPY: BINARY_CONTENT,
    NPZ: BINARY_CONTENT,
    **STREAM_CONTENT,
    # A single output in the content type that the model declares.
    "*/*": BINARY_CONTENT,
}
INFER_HEADER_PARAMETERS = [
    *REQUEST_HEADER_PARAMETERS,
    build_header_parameter(
        "X-Sequence-ID",
        "ID of the request's sequence: a number or a string.",
        {"type": "string", "maxLength": MAX_SEQUENCE_ID_BYTES},
    ),
    build_header_parameter(
        "X-Sequence",
        "Set to start or end the sequence with this request.",
        {"type": "string", "examples": ["start", "end", "start, end"]},
    ),
    build_header_parameter(
        "X-Split-Key",
        "A user or session that keeps its version if the version is a label with several.",
        STRING_SCHEMA,
    ),
]
INFER_OPENAPI = {
    "requestBody": {"required": True, "content": INFER_BODY_CONTENT},
    "parameters": INFER_HEADER_PARAMETERS,
}


router = APIRouter(tags=["inference"], route_class=InferenceRoute)
MAX_CLASSES = (1 << 31) - 1
FIRST_VALUES_COUNT: Final = 8
MAX_VALUE_BYTES: Final = 200
route_infer = partial(router.post, responses=INFER_RESPONSES, openapi_extra=INFER_OPENAPI)
# The second one tells proxies not to buffer.
STREAM_HEADERS: Final = {"cache-control": "no-store", "x-accel-buffering": "no"}
# After so many results that have arrived at once, other tasks run.
RESULTS_PER_PASS: Final = 32


@route_infer("/v1/models/{model}/infer", operation_id="infer", summary="Inference with a model")
@route_infer(
    "/v1/models/{model}/versions/{version}/infer",
    operation_id="infer_version",
    summary="Inference with a version of a model",
)
async def handle_infer(
    request: Request,
    model: str,
    version: str = "",
    dry_run: Annotated[
        bool, Query(description="Return the tensors without running the model.")
    ] = False,
    classification: Annotated[
        int | None,
        Query(
            ge=0,
            le=MAX_CLASSES,
            description="Return this number of the highest scores with their labels, or 0 for all values.",
        ),
    ] = None,
) -> Response:
    """Run inference on an image, a text, numbers, a form, JSON or a NumPy file."""
    services: Services = request.scope["services"]
    opened = await pipeline.open_request(request, services, model, version)
    signature = opened.signature
    accept = opened.body.get_header(b"accept") or ""
    stream_format = choose_stream_format(accept)
    body = await pipeline.receive_body(opened)
    with await pipeline.admit(opened) as slot:
        decoded = await decode(opened, body)
        options = decoded.options
        inputs = decoded.inputs
        del body  # its memory is free while the model runs
        if classification is not None:
            parameters = {**options.parameters, "classification": classification}
            options = options._replace(parameters=parameters)
        if stream_format is not None and not dry_run:
            infer_request = pipeline.build_request(opened, options, inputs)
            results = await services.inference.stream(infer_request)
            request_id = opened.info.request_id
            return InferStreamResponse(results, stream_format, request_id, slot.transfer())
        outputs = select_outputs(signature, options.outputs) or tuple(signature.outputs)
        render = choose_result_encoder(accept, signature, outputs)
        if dry_run:
            describe = partial(build_dry_run_description, signature, inputs)
            document = await services.decode_executor.run_in_thread(describe)
            return Response(orjson.dumps(document), media_type=JSON)
        infer_request = pipeline.build_request(opened, options, inputs)
        result = await pipeline.run_inference(opened, slot, infer_request)
        return await pipeline.render_results(opened, [result], partial(render, result))


def build_dry_run_description(signature: Signature, inputs: InferInputs) -> Mapping[str, Any]:
    return {
        "model": signature.model,
        "version": signature.version,
        "inputs": [
            {
                "name": name,
                "datatype": signature.inputs[name].datatype.name,
                "shape": list(array.shape),
                "bytes": encoded_size_bytes(array),
                "first_values": first_values(array),
            }
            for inference in inputs.items or (inputs,)
            for name, array in inference.arrays.items()
        ],
    }


def encoded_size_bytes(array: np.ndarray) -> int:
    # On the wire, each element of BYTES is preceded by its length in 4 bytes.
    return sum(4 + len(value) for value in array.flat) if array.dtype.kind == "O" else array.nbytes


def first_values(array: np.ndarray) -> Sequence[Any]:
    first = array.ravel()[:FIRST_VALUES_COUNT]
    if array.dtype.kind == "O":
        return [bytes_to_json(value[:MAX_VALUE_BYTES]) for value in first]
    values = array_to_json(first)
    return list(values.tolist() if isinstance(values, np.ndarray) else values)


# The response as a stream.


@dataclass(frozen=True)
class StreamFormat:
    """The form of a stream of JSON documents: templates, and the end."""

    media_type: str
    result: bytes
    error: bytes
    end: bytes = b""


STREAM_FORMATS: Final = {
    EVENT_STREAM: StreamFormat(  # server-sent events (WHATWG HTML, section 9.2)
        EVENT_STREAM,
        b"id: %(number)d\ndata: %(result)b\n\n",
        b"event: error\ndata: %b\n\n",
        b"event: end\ndata: {}\n\n",
    ),
    NDJSON: StreamFormat(NDJSON, b"%(result)b\n", b"%b\n"),
}


@lru_cache(128)
def choose_stream_format(accept: str) -> StreamFormat | None:
    """Return the form of the stream that `Accept` prefers; None if it prefers no stream."""
    preferred = next(iter(list_accepted_types(accept)), "")
    return STREAM_FORMATS.get(preferred)


class InferStreamResponse(StreamingResponse):
    """A stream of results, each with its own timeout. Client disconnects cancel the inference.

    An error before the first result is an ordinary response. The body is sent without the tasks and
    iterators of Starlette, which cost more than making a result.
    """

    def __init__(
        self, results: ResultStream, stream_format: StreamFormat, request_id: str, slot: Slot
    ) -> None:
        super().__init__((), headers=STREAM_HEADERS, media_type=stream_format.media_type)
        self._results = results
        self._format = stream_format
        self._request_id = request_id
        self._slot = slot

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watching = asyncio.create_task(self._close_at_disconnect(receive))
        try:
            await self.stream_response(send)
        finally:
            watching.cancel()
            self._slot.release()
            self._results.close()

    async def _close_at_disconnect(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._results.close()

    async def stream_response(self, send: Send) -> None:
        await send(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )
        number = 0
        last = b""
        try:
            while (result := await self._results.read_json()) is not None:
                number += 1
                line = escape_line_separators(result)
                body = self._format.result % {b"number": number, b"result": line}
                await send({"type": "http.response.body", "body": body, "more_body": True})
                if not number % RESULTS_PER_PASS:
                    await asyncio.sleep(0)
        except GatewayError as exc:
            error = serialize_error(exc.detail, exc.code, self._request_id)
            last = self._format.error % escape_line_separators(error)
        await send({"type": "http.response.body", "body": last + self._format.end})
