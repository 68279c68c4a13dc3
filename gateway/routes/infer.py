"""`POST /v1/models/{model}/infer`: decode, ask, encode."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Annotated, Any

import anyio
import numpy as np
import orjson
from fastapi import APIRouter, Query, Request, Response

from gateway.errors import DeadlinePassed, InputMismatch, MalformedRequest
from gateway.fleet.signatures import check_output_names
from gateway.fleet.transports import CallOptions
from gateway.memory import MemoryCharge
from gateway.request_info import RequestInfo
from gateway.routes.dependencies import Services, ServicesForInference
from gateway.routes.request_body import (
    MAX_INLINE_DECODE_BYTES,
    MAX_THREAD_JSON_BYTES,
    LargeBody,
    build_error_responses,
    build_success_response,
    read_request_body,
    receive_payload,
)
from gateway.routes.streams import InferStreamResponse, choose_stream_type
from gateway.tensors import kserve_v1, schema, sequence
from gateway.tensors.decode import decode_body, decode_form, decode_predict_body, parse_predict_body
from gateway.tensors.dtypes import DATATYPES
from gateway.tensors.image_header import find_header_reader
from gateway.tensors.images import ImageLimits
from gateway.tensors.inputs import InferInputs, convert_payload, inspect_payload
from gateway.tensors.outputs import (
    EncodedBody,
    InferResult,
    array_to_json,
    bytes_to_json,
    choose_result_encoder,
)
from gateway.tensors.payload import JSON, NPY, NPZ, Payload, PayloadLimits
from gateway.tensors.sequence import SequenceStep
from gateway.tensors.signature import Signature
from gateway.tracing import TRACE_CONTEXT_HEADERS
from gateway.triton.http.connection import Headers
from gateway.triton.json_guard import MAX_KEY_BYTES

router = APIRouter(tags=["inference"])
MAX_CONCURRENT_ROWS = 16
FIRST_VALUES_COUNT = 8
# Bytes of memory for a byte of the answer's tensors, which is written in JSON.
RESPONSE_MEMORY_FACTOR = 4
# What stands in the types of documents that run scripts: text/html, image/svg+xml, application/xml, …
ACTIVE_CONTENT_WORDS = ("html", "xml", "xsl", "script", "multipart")
ATTACHMENT_HEADERS = {"content-disposition": "attachment"}
MAX_PARAMETERS = 1000
# Converting values of this size is worth a thread: the event loop would notice.
LARGE_ARRAY_BYTES = 1 << 20
# Decoding more pixels takes long enough to be worth a process.
MAX_THREAD_PIXELS = 4_000_000
# A value in a list takes as long as so many bytes of an array, and a byte of what may be an image as four.
BYTES_PER_LISTED_VALUE = 32
BYTES_PER_CHARACTER = 4
# Of an image only the header is read at first, which takes as long as converting an array of this size.
IMAGE_HEADER_COST_BYTES = LARGE_ARRAY_BYTES // 4

# What the API's description says.
INFER_ERROR_RESPONSES = build_error_responses(404, 406, 409, 415, 502, 504)
BINARY_CONTENT = {"schema": schema.BINARY_SCHEMA}
INFER_RESPONSE_SCHEMA = {
    "type": "object",
    "properties": {
        "id": {"type": "string"},
        "model": {"type": "string"},
        "version": {"type": "string"},
        "outputs": {"type": "object", "description": "Values by output name."},
    },
    "required": ["id", "model", "version", "outputs"],
}
DRY_RUN_SCHEMA = {
    "type": "object",
    "description": "With `dry_run`: the tensors.",
    "properties": {
        "model": {"type": "string"},
        "version": {"type": "string"},
        "inputs": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "name": {"type": "string"},
                    "datatype": {"enum": list(DATATYPES)},
                    "shape": {"type": "array", "items": {"type": "integer", "minimum": 0}},
                    "bytes": {"type": "integer", "minimum": 0},
                    "first_values": {"type": "array"},
                },
                "required": ["name", "datatype", "shape", "bytes", "first_values"],
            },
        },
    },
    "required": ["model", "version", "inputs"],
}
PREDICT_RESPONSE_SCHEMA = {
    "oneOf": [
        {
            "type": "object",
            "properties": {"predictions": {"type": "array"}},
            "required": ["predictions"],
            "additionalProperties": False,
        },
        {
            "type": "object",
            "properties": {"outputs": {}},
            "required": ["outputs"],
            "additionalProperties": False,
        },
    ]
}
INFER_RESPONSES = INFER_ERROR_RESPONSES | build_success_response(
    {"anyOf": [INFER_RESPONSE_SCHEMA, DRY_RUN_SCHEMA]}, "The model's outputs."
)
INFER_RESPONSES[200]["content"] |= {
    NPY: BINARY_CONTENT,
    NPZ: BINARY_CONTENT,
    **schema.STREAM_CONTENT,
    # One output raw, by the type that the model declares for it.
    "*/*": BINARY_CONTENT,
}
PREDICT_RESPONSES = INFER_ERROR_RESPONSES | build_success_response(
    PREDICT_RESPONSE_SCHEMA, "A value for each row, or the columns."
)
INFER_HEADER_PARAMETERS = [
    {
        "name": "X-Request-Timeout",
        "in": "header",
        "required": False,
        "description": "Seconds until the request is given up; the gateway has a limit of its own.",
        "schema": {"type": "number", "exclusiveMinimum": 0},
    },
    {
        "name": "X-Request-ID",
        "in": "header",
        "required": False,
        "description": "A name for the request, in the answer and in the logs.",
        "schema": {"type": "string"},
    },
    {
        "name": "X-Sequence-ID",
        "in": "header",
        "required": False,
        "description": "The sequence that the request belongs to; a number, or a text.",
        "schema": {"type": "string", "maxLength": sequence.MAX_SEQUENCE_ID_BYTES},
    },
    {
        "name": "X-Sequence",
        "in": "header",
        "required": False,
        "description": "Whether the sequence starts or ends with the request.",
        "schema": {"type": "string", "examples": ["start", "end", "start, end"]},
    },
]
INFER_OPENAPI = {
    "requestBody": {"required": True, "content": schema.ANY_BODY_CONTENT},
    "parameters": INFER_HEADER_PARAMETERS,
}
PREDICT_REQUEST_SCHEMA = {
    "type": "object",
    "properties": {
        "instances": {
            "type": "array",
            "minItems": 1,
            "description": "Rows: values, or objects of values by input name.",
        },
        "inputs": {"description": "Columns: a value, or an object of values by input name."},
        "signature_name": {},
        "parameters": {},
        "id": {},
    },
    "oneOf": [{"required": ["instances"]}, {"required": ["inputs"]}],
    "additionalProperties": False,
}
PREDICT_OPENAPI = {
    "requestBody": {"required": True, "content": {JSON: {"schema": PREDICT_REQUEST_SCHEMA}}},
    "parameters": INFER_HEADER_PARAMETERS,
}


@dataclass(frozen=True)
class InferExchange:
    """One request to a model: what answers it, and until when."""

    services: Services
    signature: Signature
    request_id: str
    timeout_s: float
    deadline: float
    trace_headers: Headers  # the caller's trace context, for Triton
    caller: str  # the name of its key
    step: SequenceStep | None  # of a sequence, as its headers say
    charge: MemoryCharge
    exit_stack: AsyncExitStack  # what is given back at the end

    async def acquire_slot(self) -> None:
        """Take a place for the inference. Not before the body is there: one that trickles would hold it."""
        gate, model = self.services.admission, self.signature.model
        await gate.acquire(model, self.timeout_s, self.caller)
        self.exit_stack.callback(gate.release, model)

    @property
    def payload_limits(self) -> PayloadLimits:
        return PayloadLimits(
            max_bytes=self.services.settings.max_body_bytes,
            max_json_memory_bytes=self.services.decode_executor.max_process_bytes,
        )

    @property
    def image_limits(self) -> ImageLimits:
        return ImageLimits(self.services.settings.max_image_pixels)

    @property
    def remaining_s(self) -> float:
        """The seconds until the deadline."""
        return max(self.deadline - anyio.current_time(), 0.0)

    async def receive_inputs(self, request: Request) -> tuple[Payload, InferInputs]:
        """Receive the body, take a place, and return the tensors and what else the body said."""
        decoders = self.services.decode_executor
        body = await receive_payload(request, self.payload_limits, decoders, self.charge)
        await self.acquire_slot()
        if isinstance(body, Payload):
            return body, await self.convert_payload(body)
        run = partial(decoders.run_in_process, 0, self.remaining_s)
        arguments = (self.signature, self.payload_limits, self.image_limits)
        if isinstance(body, LargeBody):
            return await run(decode_body, body.data, body.content_type, *arguments)
        return await run(decode_form, body, *arguments)

    async def convert_payload(self, payload: Payload) -> InferInputs:
        """Return the tensors; images and large arrays are converted off the event loop."""
        decoders = self.services.decode_executor
        look = partial(inspect_payload, payload, self.signature, self.image_limits)
        is_large = estimate_payload_bytes(payload) > LARGE_ARRAY_BYTES
        screened = await decoders.run_in_thread(0, look) if is_large else look()
        cost = screened.decoding_cost
        self.charge.add(screened.decoded_bytes)
        if cost > MAX_THREAD_PIXELS:
            arguments = (screened, self.signature)
            return await decoders.run_in_process(
                cost, self.remaining_s, convert_payload, *arguments
            )
        if cost or is_large:
            return await decoders.run_in_thread(
                cost, partial(convert_payload, screened, self.signature)
            )
        return convert_payload(screened, self.signature)

    async def receive_predict_inputs(self, request: Request) -> tuple[bool, list[InferInputs]]:
        """Receive the body of `:predict` and take a place; whether it has columns, and the tensors."""
        body = await read_request_body(request, self.payload_limits.max_bytes, self.charge)
        await self.acquire_slot()
        decoders = self.services.decode_executor
        if len(body) > MAX_THREAD_JSON_BYTES:
            arguments = (body, self.signature, self.payload_limits, self.image_limits)
            return await decoders.run_in_process(
                0, self.remaining_s, decode_predict_body, *arguments
            )
        read = partial(parse_predict_body, body, self.signature, self.payload_limits)
        is_inline = len(body) <= MAX_INLINE_DECODE_BYTES
        is_columns, payloads = read() if is_inline else await decoders.run_in_thread(0, read)
        return is_columns, [await self.convert_payload(payload) for payload in payloads]

    async def run_inference(self, inputs: InferInputs, payload: Payload) -> InferResult:
        result = await self.services.models.infer(
            self.signature, inputs, self.build_call_options(payload)
        )
        self.charge.add(RESPONSE_MEMORY_FACTOR * result.size_bytes)
        return result

    async def build_response(
        self, results: list[InferResult], render: Callable[[], EncodedBody]
    ) -> Response:
        """Return the answer as `render` writes it, in a thread if it is large."""
        is_large = any(result.is_large for result in results)
        rendered = (
            await self.services.decode_executor.run_in_thread(0, render) if is_large else render()
        )
        # A browser that is sent to an output which could run a script saves it.
        headers = ATTACHMENT_HEADERS if is_active_content(rendered.content_type) else None
        return Response(rendered.body, headers=headers, media_type=rendered.content_type)

    def build_call_options(self, payload: Payload) -> CallOptions:
        if len(payload.parameters) > MAX_PARAMETERS:  # which keep Triton busy for minutes
            raise MalformedRequest(f"a request has at most {MAX_PARAMETERS} parameters")
        if max(map(len, payload.parameters), default=0) > MAX_KEY_BYTES:  # as do long names
            raise MalformedRequest(
                f"the name of a parameter has at most {MAX_KEY_BYTES} characters"
            )
        step = sequence.parse_sequence_parameters(payload.parameters)
        if step is not None and self.step is not None:
            raise MalformedRequest(
                "the sequence is named by X-Sequence-ID and by a parameter; name it once"
            )
        outputs = check_output_names(self.signature, payload.outputs)
        return CallOptions(
            outputs,
            payload.parameters,
            payload.id or self.request_id,
            self.deadline,
            self.trace_headers,
            step or self.step,
        )


@asynccontextmanager
async def open_exchange(
    request: Request, services: Services, model: str, version: str
) -> AsyncIterator[InferExchange]:
    """Everything inside ends at the request's deadline. Raises `DeadlinePassed`."""
    timeout_s = services.resolve_timeout_s(request.headers.get("x-request-timeout"))
    async with AsyncExitStack() as stack:
        with enforce_timeout(timeout_s):
            yield await start_exchange(request, services, model, version, timeout_s, stack)


@contextmanager
def enforce_timeout(timeout_s: float) -> Iterator[None]:
    try:
        with anyio.fail_after(timeout_s):
            yield
    except TimeoutError as exc:
        raise DeadlinePassed(timeout_s) from exc


async def start_exchange(
    request: Request,
    services: Services,
    model: str,
    version: str,
    timeout_s: float,
    exit_stack: AsyncExitStack,
) -> InferExchange:
    deadline = anyio.current_time() + timeout_s
    signature = await services.models.get_signature(model, version)
    notes: RequestInfo = request.scope["request_info"]
    notes.model, notes.version = signature.model, signature.version
    trace = [header for header in request.headers.raw if header[0] in TRACE_CONTEXT_HEADERS]
    step = sequence.parse_sequence_headers(
        request.headers.get("x-sequence-id"), request.headers.get("x-sequence")
    )
    charge = services.get_charge(notes)
    return InferExchange(
        *(services, signature, notes.request_id, timeout_s, deadline, trace, notes.key, step),
        charge=charge,
        exit_stack=exit_stack,
    )


@router.post(
    "/v1/models/{model}/infer",
    operation_id="infer",
    summary="Inference with a model",
    responses=INFER_RESPONSES,
    openapi_extra=INFER_OPENAPI,
)
@router.post(
    "/v1/models/{model}/versions/{version}/infer",
    operation_id="infer_version",
    summary="Inference with a version of a model",
    responses=INFER_RESPONSES,
    openapi_extra=INFER_OPENAPI,
)
async def handle_infer(
    request: Request,
    services: ServicesForInference,
    model: str,
    version: str = "",
    dry_run: Annotated[bool, Query(description="Answer the tensors, and send nothing.")] = False,
) -> Response:
    """Inference from what people have: an image, a text, numbers, a form, JSON or NumPy's files."""
    form = choose_stream_type(request.headers.get("accept", ""))
    if form and not dry_run:
        return await stream_inference(request, services, model, version, form)
    async with open_exchange(request, services, model, version) as asked:
        payload, inputs = await asked.receive_inputs(request)
        outputs = check_output_names(asked.signature, payload.outputs) or tuple(
            asked.signature.outputs
        )
        render = choose_result_encoder(request.headers.get("accept", ""), asked.signature, outputs)
        if dry_run:
            document = await services.decode_executor.run_in_thread(
                0, partial(build_dry_run_description, asked.signature, inputs)
            )
            return Response(orjson.dumps(document), media_type=JSON)
        result = await asked.run_inference(inputs, payload)
        return await asked.build_response([result], partial(render, result))


async def stream_inference(
    request: Request, services: Services, model: str, version: str, stream_type: str
) -> Response:
    """As the answers are made. Until the first is there, a failure is an answer like any other; then each
    may take as long as the first might have."""
    timeout_s = services.resolve_timeout_s(request.headers.get("x-request-timeout"))
    async with AsyncExitStack() as stack:
        with enforce_timeout(timeout_s):
            asked = await start_exchange(request, services, model, version, timeout_s, stack)
            payload, inputs = await asked.receive_inputs(request)
        call = asked.build_call_options(payload)
        results = await services.models.stream(asked.signature, inputs, call, timeout_s)
        return InferStreamResponse(results, stream_type, asked.request_id, stack.pop_all())


@router.post(
    "/v1/models/{model}:predict",
    operation_id="predict",
    summary="Inference with a model, in KServe's V1 dialect",
    responses=PREDICT_RESPONSES,
    openapi_extra=PREDICT_OPENAPI,
)
@router.post(
    "/v1/models/{model}/versions/{version}:predict",
    operation_id="predict_version",
    summary="Inference with a version of a model, in KServe's V1 dialect",
    responses=PREDICT_RESPONSES,
    openapi_extra=PREDICT_OPENAPI,
)
async def predict(
    request: Request, services: ServicesForInference, model: str, version: str = ""
) -> Response:
    """KServe's V1 dialect: `instances` (rows) → `predictions`, or `inputs` (columns) → `outputs`."""
    async with open_exchange(request, services, model, version) as asked:
        is_columns, pieces = await asked.receive_predict_inputs(request)
        results = await infer_all(pieces, asked)
        if is_columns:
            return await asked.build_response(
                results, partial(kserve_v1.encode_output_columns, results[0])
            )
        return await asked.build_response(results, partial(kserve_v1.encode_predictions, results))


async def infer_all(inputs_list: list[InferInputs], exchange: InferExchange) -> list[InferResult]:
    """Return the answers to the inferences of one request, in their order."""
    if exchange.step is not None and len(inputs_list) > 1:  # they would have no order
        raise InputMismatch(
            "the model has no batch dimension: a step of a sequence has one instance"
        )
    gate = asyncio.Semaphore(MAX_CONCURRENT_ROWS)

    async def one(inputs: InferInputs) -> InferResult:
        async with gate:
            return await exchange.run_inference(inputs, Payload({}))

    return list(await asyncio.gather(*map(one, inputs_list)))


def is_active_content(content_type: str) -> bool:
    """Whether a document of this type can run a script, be it in a part of it."""
    kind = content_type.lower()
    return any(word in kind for word in ACTIVE_CONTENT_WORDS)


def estimate_payload_bytes(payload: Payload) -> int:
    """About how many bytes there are to convert; of what is large, a number above `LARGE_ARRAY_BYTES`."""
    return sum(
        estimate_value_bytes(part.value) for parts in payload.parts.values() for part in parts
    )


def estimate_value_bytes(value: Any) -> int:
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, bytes) and find_header_reader(value) is not None:
        return IMAGE_HEADER_COST_BYTES
    if not isinstance(value, list):
        return BYTES_PER_CHARACTER * len(value) if isinstance(value, (str, bytes)) else 0
    level, size = value, BYTES_PER_LISTED_VALUE * len(value)
    while level and size <= LARGE_ARRAY_BYTES:
        kinds = set(map(type, level))
        if not kinds.isdisjoint((str, bytes)):
            size += sum(
                map(estimate_value_bytes, (item for item in level if not isinstance(item, list)))
            )
        if list not in kinds:
            break
        nested = chain.from_iterable(item for item in level if isinstance(item, list))
        level = list(islice(nested, LARGE_ARRAY_BYTES // BYTES_PER_LISTED_VALUE + 1))
        size += BYTES_PER_LISTED_VALUE * len(level)
    return size


def build_dry_run_description(signature: Signature, inputs: InferInputs) -> Mapping[str, Any]:
    """What `?dry_run=true` answers: the tensors that would be sent."""
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
            for name, array in inputs.arrays.items()
        ],
    }


def encoded_size_bytes(array: np.ndarray) -> int:
    """The size on the wire; an element of BYTES has its length before it, in 4 bytes."""
    return sum(4 + len(value) for value in array.flat) if array.dtype.kind == "O" else array.nbytes


def first_values(array: np.ndarray) -> Sequence[Any]:
    first = array.ravel()[:FIRST_VALUES_COUNT]
    if array.dtype.kind == "O":
        return [bytes_to_json(value[:200]) for value in first]
    values = array_to_json(first)
    return list(values.tolist() if isinstance(values, np.ndarray) else values)
