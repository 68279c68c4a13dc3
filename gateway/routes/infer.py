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

from gateway.context import Notes
from gateway.errors import DeadlinePassed, DoesNotFit, Malformed
from gateway.fleet.calls import Call
from gateway.fleet.models import output_names
from gateway.memory import Charge
from gateway.routes.bodies import (
    MAX_INLINE_BYTES,
    MAX_THREAD_JSON_BYTES,
    LargeBody,
    answers,
    receive_payload,
    refusals,
    whole_body,
)
from gateway.routes.services import Services, ServicesForInference
from gateway.routes.streams import Streamed, form_of
from gateway.tensors import predict as dialect
from gateway.tensors import schema, sequence
from gateway.tensors.decode import decode_body, decode_form, decode_predict, read_predict
from gateway.tensors.dtypes import DATATYPES
from gateway.tensors.image_header import find_reader
from gateway.tensors.images import ImageLimits
from gateway.tensors.inputs import Inputs, convert, screen
from gateway.tensors.outputs import Rendered, Result, jsonable, renderer, text_or_base64
from gateway.tensors.payload import JSON, NPY, NPZ, Limits, Payload
from gateway.tensors.sequence import Step
from gateway.tensors.signature import Signature
from gateway.tracing import TRACE_CONTEXT
from gateway.triton.screening import MOST_KEY_BYTES
from gateway.triton.wire import Headers

router = APIRouter(tags=["inference"])
ROWS_AT_A_TIME = 16
FIRST_VALUES = 8
# Bytes of memory for a byte of the answer's tensors, which is written in JSON.
ANSWER_MEMORY_FACTOR = 4
# What stands in the types of documents that run scripts: text/html, image/svg+xml, application/xml, …
ACTIVE = ("html", "xml", "xsl", "script", "multipart")
ATTACHED = {"content-disposition": "attachment"}
MOST_PARAMETERS = 1000
# Converting values of this size is worth a thread: the event loop would notice.
LARGE_ARRAY_BYTES = 1 << 20
# Decoding more pixels takes long enough to be worth a process.
MAX_THREAD_PIXELS = 4_000_000
# A value in a list takes as long as so many bytes of an array, and a byte of what may be an image as four.
BYTES_PER_LISTED_VALUE = 32
BYTES_PER_CHARACTER = 4
# Of an image only the header is read at first, which takes as long as converting an array of this size.
HEADER_BYTES = LARGE_ARRAY_BYTES // 4

# What the API's description says.
FAILURES = refusals(404, 406, 409, 415, 502, 504)
BINARY = {"schema": schema.BINARY}
ANSWER = {
    "type": "object",
    "properties": {
        "id": {"type": "string"},
        "model": {"type": "string"},
        "version": {"type": "string"},
        "outputs": {"type": "object", "description": "Values by output name."},
    },
    "required": ["id", "model", "version", "outputs"],
}
WOULD_BE_SENT = {
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
PREDICTED = {
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
INFERRED = FAILURES | answers({"anyOf": [ANSWER, WOULD_BE_SENT]}, "The model's outputs.")
INFERRED[200]["content"] |= {
    NPY: BINARY,
    NPZ: BINARY,
    **schema.STREAMED,
    # One output raw, by the type that the model declares for it.
    "*/*": BINARY,
}
PREDICTIONS = FAILURES | answers(PREDICTED, "A value for each row, or the columns.")
HEADERS = [
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
        "schema": {"type": "string", "maxLength": sequence.LONGEST},
    },
    {
        "name": "X-Sequence",
        "in": "header",
        "required": False,
        "description": "Whether the sequence starts or ends with the request.",
        "schema": {"type": "string", "examples": ["start", "end", "start, end"]},
    },
]
BODY = {"requestBody": {"required": True, "content": schema.ANY_BODY}, "parameters": HEADERS}
ROWS_OR_COLUMNS = {
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
DIALECT = {
    "requestBody": {"required": True, "content": {JSON: {"schema": ROWS_OR_COLUMNS}}},
    "parameters": HEADERS,
}


@dataclass(frozen=True)
class Exchange:
    """One request to a model: what answers it, and until when."""

    services: Services
    signature: Signature
    request_id: str
    timeout_s: float
    deadline: float
    trace: Headers  # the caller's trace context, for Triton
    caller: str  # the name of its key
    step: Step | None  # of a sequence, as its headers say
    charge: Charge
    stack: AsyncExitStack  # what is given back at the end

    async def enter(self) -> None:
        """Take a place for the inference. Not before the body is there: one that trickles would hold it."""
        gate, model = self.services.gate, self.signature.model
        await gate.enter(model, self.timeout_s, self.caller)
        self.stack.callback(gate.leave, model)

    @property
    def limits(self) -> Limits:
        return Limits(
            max_bytes=self.services.settings.max_body_bytes,
            max_json_memory_bytes=self.services.decoders.max_process_bytes,
        )

    @property
    def image_limits(self) -> ImageLimits:
        return ImageLimits(self.services.settings.max_image_pixels)

    @property
    def left_s(self) -> float:
        """The seconds until the deadline."""
        return max(self.deadline - anyio.current_time(), 0.0)

    async def decode(self, request: Request) -> tuple[Payload, Inputs]:
        """Receive the body, take a place, and return the tensors and what else the body said."""
        decoders = self.services.decoders
        body = await receive_payload(request, self.limits, decoders, self.charge)
        await self.enter()
        if isinstance(body, Payload):
            return body, await self.convert(body)
        run = partial(decoders.run_process, 0, self.left_s)
        arguments = (self.signature, self.limits, self.image_limits)
        if isinstance(body, LargeBody):
            return await run(decode_body, body.data, body.content_type, *arguments)
        return await run(decode_form, body, *arguments)

    async def convert(self, payload: Payload) -> Inputs:
        """Return the tensors; images and large arrays are converted off the event loop."""
        decoders = self.services.decoders
        look = partial(screen, payload, self.signature, self.image_limits)
        is_large = size_of(payload) > LARGE_ARRAY_BYTES
        screened = await decoders.run(0, look) if is_large else look()
        cost = screened.decoding_cost
        self.charge.add(screened.decoded_bytes)
        if cost > MAX_THREAD_PIXELS:
            arguments = (screened, self.signature)
            return await decoders.run_process(cost, self.left_s, convert, *arguments)
        if cost or is_large:
            return await decoders.run(cost, partial(convert, screened, self.signature))
        return convert(screened, self.signature)

    async def decode_predict(self, request: Request) -> tuple[bool, list[Inputs]]:
        """Receive the body of `:predict` and take a place; whether it has columns, and the tensors."""
        body = await whole_body(request, self.limits.max_bytes, self.charge)
        await self.enter()
        decoders = self.services.decoders
        if len(body) > MAX_THREAD_JSON_BYTES:
            arguments = (body, self.signature, self.limits, self.image_limits)
            return await decoders.run_process(0, self.left_s, decode_predict, *arguments)
        read = partial(read_predict, body, self.signature, self.limits)
        is_inline = len(body) <= MAX_INLINE_BYTES
        is_columns, payloads = read() if is_inline else await decoders.run(0, read)
        return is_columns, [await self.convert(payload) for payload in payloads]

    async def result(self, inputs: Inputs, payload: Payload) -> Result:
        result = await self.services.models.infer(self.signature, inputs, self.call(payload))
        self.charge.add(ANSWER_MEMORY_FACTOR * result.size_bytes)
        return result

    async def respond(self, results: list[Result], render: Callable[[], Rendered]) -> Response:
        """Return the answer as `render` writes it, in a thread if it is large."""
        is_large = any(result.is_large for result in results)
        rendered = await self.services.decoders.run(0, render) if is_large else render()
        # A browser that is sent to an output which could run a script saves it.
        headers = ATTACHED if is_active(rendered.content_type) else None
        return Response(rendered.body, headers=headers, media_type=rendered.content_type)

    def call(self, payload: Payload) -> Call:
        if len(payload.parameters) > MOST_PARAMETERS:  # which keep Triton busy for minutes
            raise Malformed(f"a request has at most {MOST_PARAMETERS} parameters")
        if max(map(len, payload.parameters), default=0) > MOST_KEY_BYTES:  # as do long names
            raise Malformed(f"the name of a parameter has at most {MOST_KEY_BYTES} characters")
        step = sequence.from_parameters(payload.parameters)
        if step is not None and self.step is not None:
            raise Malformed(
                "the sequence is named by X-Sequence-ID and by a parameter; name it once"
            )
        outputs = output_names(self.signature, payload.outputs)
        return Call(
            outputs,
            payload.parameters,
            payload.id or self.request_id,
            self.deadline,
            self.trace,
            step or self.step,
        )


@asynccontextmanager
async def exchange(
    request: Request, services: Services, model: str, version: str
) -> AsyncIterator[Exchange]:
    """Everything inside ends at the request's deadline. Raises `DeadlinePassed`."""
    timeout_s = services.timeout_s(request.headers.get("x-request-timeout"))
    async with AsyncExitStack() as stack:
        with within(timeout_s):
            yield await begun(request, services, model, version, timeout_s, stack)


@contextmanager
def within(timeout_s: float) -> Iterator[None]:
    try:
        with anyio.fail_after(timeout_s):
            yield
    except TimeoutError as exc:
        raise DeadlinePassed(timeout_s) from exc


async def begun(
    request: Request,
    services: Services,
    model: str,
    version: str,
    timeout_s: float,
    stack: AsyncExitStack,
) -> Exchange:
    deadline = anyio.current_time() + timeout_s
    signature = await services.models.signature(model, version)
    notes: Notes = request.scope["notes"]
    notes.model, notes.version = signature.model, signature.version
    trace = [header for header in request.headers.raw if header[0] in TRACE_CONTEXT]
    step = sequence.from_headers(
        request.headers.get("x-sequence-id"), request.headers.get("x-sequence")
    )
    charge = services.charge_for(notes)
    return Exchange(
        *(services, signature, notes.request_id, timeout_s, deadline, trace, notes.key, step),
        charge=charge,
        stack=stack,
    )


@router.post(
    "/v1/models/{model}/infer",
    operation_id="infer",
    summary="Inference with a model",
    responses=INFERRED,
    openapi_extra=BODY,
)
@router.post(
    "/v1/models/{model}/versions/{version}/infer",
    operation_id="infer_version",
    summary="Inference with a version of a model",
    responses=INFERRED,
    openapi_extra=BODY,
)
async def infer(
    request: Request,
    services: ServicesForInference,
    model: str,
    version: str = "",
    dry_run: Annotated[bool, Query(description="Answer the tensors, and send nothing.")] = False,
) -> Response:
    """Inference from what people have: an image, a text, numbers, a form, JSON or NumPy's files."""
    form = form_of(request.headers.get("accept", ""))
    if form and not dry_run:
        return await streamed(request, services, model, version, form)
    async with exchange(request, services, model, version) as asked:
        payload, inputs = await asked.decode(request)
        outputs = output_names(asked.signature, payload.outputs) or tuple(asked.signature.outputs)
        render = renderer(request.headers.get("accept", ""), asked.signature, outputs)
        if dry_run:
            document = await services.decoders.run(0, partial(described, asked.signature, inputs))
            return Response(orjson.dumps(document), media_type=JSON)
        result = await asked.result(inputs, payload)
        return await asked.respond([result], partial(render, result))


async def streamed(
    request: Request, services: Services, model: str, version: str, form: str
) -> Response:
    """As the answers are made. Until the first is there, a failure is an answer like any other; then each
    may take as long as the first might have."""
    timeout_s = services.timeout_s(request.headers.get("x-request-timeout"))
    async with AsyncExitStack() as stack:
        with within(timeout_s):
            asked = await begun(request, services, model, version, timeout_s, stack)
            payload, inputs = await asked.decode(request)
        call = asked.call(payload)
        results = await services.models.stream(asked.signature, inputs, call, timeout_s)
        return Streamed(results, form, asked.request_id, stack.pop_all())


@router.post(
    "/v1/models/{model}:predict",
    operation_id="predict",
    summary="Inference with a model, in KServe's V1 dialect",
    responses=PREDICTIONS,
    openapi_extra=DIALECT,
)
@router.post(
    "/v1/models/{model}/versions/{version}:predict",
    operation_id="predict_version",
    summary="Inference with a version of a model, in KServe's V1 dialect",
    responses=PREDICTIONS,
    openapi_extra=DIALECT,
)
async def predict(
    request: Request, services: ServicesForInference, model: str, version: str = ""
) -> Response:
    """KServe's V1 dialect: `instances` (rows) → `predictions`, or `inputs` (columns) → `outputs`."""
    async with exchange(request, services, model, version) as asked:
        is_columns, pieces = await asked.decode_predict(request)
        results = await results_of(pieces, asked)
        if is_columns:
            return await asked.respond(results, partial(dialect.outputs, results[0]))
        return await asked.respond(results, partial(dialect.predictions, results))


async def results_of(pieces: list[Inputs], asked: Exchange) -> list[Result]:
    """Return the answers to the inferences of one request, in their order."""
    if asked.step is not None and len(pieces) > 1:  # they would have no order
        raise DoesNotFit("the model has no batch dimension: a step of a sequence has one instance")
    gate = asyncio.Semaphore(ROWS_AT_A_TIME)

    async def one(inputs: Inputs) -> Result:
        async with gate:
            return await asked.result(inputs, Payload({}))

    return list(await asyncio.gather(*map(one, pieces)))


def is_active(content_type: str) -> bool:
    """Whether a document of this type can run a script, be it in a part of it."""
    kind = content_type.lower()
    return any(word in kind for word in ACTIVE)


def size_of(payload: Payload) -> int:
    """About how many bytes there are to convert; of what is large, a number above `LARGE_ARRAY_BYTES`."""
    return sum(size_of_value(part.value) for parts in payload.parts.values() for part in parts)


def size_of_value(value: Any) -> int:
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, bytes) and find_reader(value) is not None:
        return HEADER_BYTES
    if not isinstance(value, list):
        return BYTES_PER_CHARACTER * len(value) if isinstance(value, (str, bytes)) else 0
    level, size = value, BYTES_PER_LISTED_VALUE * len(value)
    while level and size <= LARGE_ARRAY_BYTES:
        kinds = set(map(type, level))
        if not kinds.isdisjoint((str, bytes)):
            size += sum(map(size_of_value, (item for item in level if not isinstance(item, list))))
        if list not in kinds:
            break
        nested = chain.from_iterable(item for item in level if isinstance(item, list))
        level = list(islice(nested, LARGE_ARRAY_BYTES // BYTES_PER_LISTED_VALUE + 1))
        size += BYTES_PER_LISTED_VALUE * len(level)
    return size


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
