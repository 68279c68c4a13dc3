"""Inference endpoints of `/v1`: `/infer` and KServe's `:predict`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
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
from gateway.http_client.connection import Headers
from gateway.media_types import JSON
from gateway.memory import MemoryCharge
from gateway.openapi.infer import (
    INFER_OPENAPI,
    INFER_RESPONSES,
    PREDICT_OPENAPI,
    PREDICT_RESPONSES,
)
from gateway.request_info import RequestInfo
from gateway.routes.dependencies import ServicesForInference
from gateway.routes.request_body import (
    LargeBody,
    read_request_body,
    receive_payload,
)
from gateway.routes.streams import InferStreamResponse, choose_stream_type
from gateway.services import Services
from gateway.tensors import kserve_v1, sequence
from gateway.tensors.codecs import JSON_CODEC
from gateway.tensors.decode import decode_body, decode_form, decode_predict_body, parse_predict_body
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
from gateway.tensors.payload import Payload, PayloadLimits
from gateway.tensors.sequence import SequenceStep
from gateway.tensors.signature import Signature
from gateway.tracing import TRACE_CONTEXT_HEADERS
from gateway.triton.error_mapping import RequestTarget
from gateway.triton.inference import InferRequest
from gateway.triton.json_guard import MAX_KEY_BYTES

router = APIRouter(tags=["inference"])
MAX_CONCURRENT_ROWS = 16
FIRST_VALUES_COUNT = 8
# Bytes of memory per byte of the result's tensors, which are encoded as JSON.
RESPONSE_MEMORY_FACTOR = 4
# Documents of types with these words can run scripts: text/html, image/svg+xml, application/xml, …
ACTIVE_CONTENT_WORDS = ("html", "xml", "xsl", "script", "multipart")
ATTACHMENT_HEADERS = {"content-disposition": "attachment"}
MAX_PARAMETERS = 1000
# Larger values are converted in a thread, because they would block the event loop.
LARGE_ARRAY_BYTES = 1 << 20
# Images with more pixels are decoded in a process, because it can be killed at the deadline.
MAX_THREAD_PIXELS = 4_000_000
# Costs of a list's value and of a character, as the bytes of an array that take as long to convert.
BYTES_PER_LISTED_VALUE = 32
BYTES_PER_CHARACTER = 4
# Reading an image's header takes as long as converting an array of this size.
IMAGE_HEADER_COST_BYTES = LARGE_ARRAY_BYTES // 4


@dataclass(frozen=True)
class InferExchange:
    """One request to a model, before its body is decoded, with the resources that it holds."""

    services: Services
    info: RequestInfo
    signature: Signature
    timeout_s: float
    deadline: float
    trace_headers: Headers  # the client's trace context
    step: SequenceStep | None  # from the sequence headers
    exit_stack: AsyncExitStack  # releases the slot

    async def acquire_slot(self) -> None:
        # Called after the body is received, so that a slow client does not hold a slot.
        admission, model = self.services.admission, self.signature.model
        await admission.acquire(model, self.timeout_s, self.info.key)
        self.exit_stack.callback(admission.release, model)

    @property
    def charge(self) -> MemoryCharge:
        return self.services.get_charge(self.info)

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
        return max(self.deadline - anyio.current_time(), 0.0)

    async def receive_inputs(self, request: Request) -> tuple[Payload, InferInputs]:
        """Receive the body, acquire a slot, and return the body's payload and its tensors."""
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
        decoders = self.services.decode_executor
        inspect = partial(inspect_payload, payload, self.signature, self.image_limits)
        is_large = estimate_payload_bytes(payload) > LARGE_ARRAY_BYTES
        inspected = await decoders.run_in_thread(0, inspect) if is_large else inspect()
        cost = inspected.decoding_cost
        self.charge.add(inspected.decoded_bytes)
        if cost > MAX_THREAD_PIXELS:
            arguments = (inspected, self.signature)
            return await decoders.run_in_process(
                cost, self.remaining_s, convert_payload, *arguments
            )
        if cost or is_large:
            return await decoders.run_in_thread(
                cost, partial(convert_payload, inspected, self.signature)
            )
        return convert_payload(inspected, self.signature)

    async def receive_predict_inputs(self, request: Request) -> tuple[bool, list[InferInputs]]:
        """Receive the body, acquire a slot, and return whether the body has columns, and its tensors."""
        body = await read_request_body(request, self.payload_limits.max_bytes, self.charge)
        await self.acquire_slot()
        decoders = self.services.decode_executor
        if len(body) > JSON_CODEC.max_thread_bytes:
            arguments = (body, self.signature, self.payload_limits, self.image_limits)
            return await decoders.run_in_process(
                0, self.remaining_s, decode_predict_body, *arguments
            )
        read = partial(parse_predict_body, body, self.signature, self.payload_limits)
        is_inline = len(body) <= JSON_CODEC.max_inline_bytes
        is_columns, payloads = read() if is_inline else await decoders.run_in_thread(0, read)
        return is_columns, [await self.convert_payload(payload) for payload in payloads]

    def build_request(self, payload: Payload, inputs: InferInputs) -> InferRequest:
        # Triton takes minutes for many parameters, and for long names.
        if len(payload.parameters) > MAX_PARAMETERS:
            raise MalformedRequest(f"a request can have at most {MAX_PARAMETERS} parameters")
        if max(map(len, payload.parameters), default=0) > MAX_KEY_BYTES:
            raise MalformedRequest(f"a parameter name can have at most {MAX_KEY_BYTES} characters")
        step = sequence.parse_sequence_parameters(payload.parameters)
        if step is not None and self.step is not None:
            raise MalformedRequest(
                "the sequence is set by both X-Sequence-ID and a parameter; send only one of them"
            )
        signature = self.signature
        return InferRequest(
            RequestTarget(
                signature.model, signature.version, self.timeout_s, sequence_step=step or self.step
            ),
            signature,
            inputs,
            check_output_names(signature, payload.outputs),
            payload.parameters,
            payload.id or self.info.request_id,
            self.deadline,
            self.trace_headers,
        )

    async def run_inference(self, request: InferRequest) -> InferResult:
        result = await self.services.models.infer(request)
        self.charge.add(RESPONSE_MEMORY_FACTOR * result.size_bytes)
        return result

    async def build_response(
        self, results: list[InferResult], render: Callable[[], EncodedBody]
    ) -> Response:
        is_large = any(result.is_large for result in results)
        encoded = (
            await self.services.decode_executor.run_in_thread(0, render) if is_large else render()
        )
        # Browsers download an output that could run a script instead of displaying it.
        headers = ATTACHMENT_HEADERS if is_active_content(encoded.content_type) else None
        return Response(encoded.body, headers=headers, media_type=encoded.content_type)


@asynccontextmanager
async def open_exchange(
    request: Request, services: Services, model: str, version: str, exit_stack: AsyncExitStack
) -> AsyncIterator[InferExchange]:
    """Provide an exchange, and cancel its user at the request's deadline. Raises `DeadlinePassed`."""
    timeout_s = services.resolve_timeout_s(request.headers.get("x-request-timeout"))
    deadline = anyio.current_time() + timeout_s
    try:
        with anyio.fail_after(timeout_s):
            signature = await services.models.get_signature(model, version)
            info: RequestInfo = request.scope["request_info"]
            info.model, info.version = signature.model, signature.version
            trace = [header for header in request.headers.raw if header[0] in TRACE_CONTEXT_HEADERS]
            step = sequence.parse_sequence_headers(
                request.headers.get("x-sequence-id"), request.headers.get("x-sequence")
            )
            yield InferExchange(
                services, info, signature, timeout_s, deadline, trace, step, exit_stack
            )
    except TimeoutError as exc:
        raise DeadlinePassed(timeout_s) from exc


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
    dry_run: Annotated[
        bool, Query(description="Return the tensors without running the model.")
    ] = False,
) -> Response:
    """Run inference on an image, a text, numbers, a form, JSON or a NumPy file."""
    stream_type = choose_stream_type(request.headers.get("accept", ""))
    if stream_type and not dry_run:
        return await stream_inference(request, services, model, version, stream_type)
    async with (
        AsyncExitStack() as stack,
        open_exchange(request, services, model, version, stack) as exchange,
    ):
        payload, inputs = await exchange.receive_inputs(request)
        outputs = check_output_names(exchange.signature, payload.outputs) or tuple(
            exchange.signature.outputs
        )
        render = choose_result_encoder(
            request.headers.get("accept", ""), exchange.signature, outputs
        )
        if dry_run:
            document = await services.decode_executor.run_in_thread(
                0, partial(build_dry_run_description, exchange.signature, inputs)
            )
            return Response(orjson.dumps(document), media_type=JSON)
        result = await exchange.run_inference(exchange.build_request(payload, inputs))
        return await exchange.build_response([result], partial(render, result))


async def stream_inference(
    request: Request, services: Services, model: str, version: str, stream_type: str
) -> Response:
    """Return the results as a stream.

    An error before the first result is an ordinary error response. The timeout applies to each result.
    """
    async with AsyncExitStack() as stack:
        async with open_exchange(request, services, model, version, stack) as exchange:
            payload, inputs = await exchange.receive_inputs(request)
        results = await services.models.stream(exchange.build_request(payload, inputs))
        return InferStreamResponse(results, stream_type, exchange.info.request_id, stack.pop_all())


@router.post(
    "/v1/models/{model}:predict",
    operation_id="predict",
    summary="Inference with a model, in KServe's V1 format",
    responses=PREDICT_RESPONSES,
    openapi_extra=PREDICT_OPENAPI,
)
@router.post(
    "/v1/models/{model}/versions/{version}:predict",
    operation_id="predict_version",
    summary="Inference with a version of a model, in KServe's V1 format",
    responses=PREDICT_RESPONSES,
    openapi_extra=PREDICT_OPENAPI,
)
async def predict(
    request: Request, services: ServicesForInference, model: str, version: str = ""
) -> Response:
    """Return `predictions` for `instances` (rows), or `outputs` for `inputs` (columns)."""
    async with (
        AsyncExitStack() as stack,
        open_exchange(request, services, model, version, stack) as exchange,
    ):
        is_columns, pieces = await exchange.receive_predict_inputs(request)
        results = await infer_all(pieces, exchange)
        if is_columns:
            return await exchange.build_response(
                results, partial(kserve_v1.encode_output_columns, results[0])
            )
        return await exchange.build_response(
            results, partial(kserve_v1.encode_predictions, results)
        )


async def infer_all(inputs_list: list[InferInputs], exchange: InferExchange) -> list[InferResult]:
    # Concurrent inferences have no order, which a sequence requires.
    if exchange.step is not None and len(inputs_list) > 1:
        raise InputMismatch(
            "the model has no batch dimension: a sequence step must have exactly one instance"
        )
    semaphore = asyncio.Semaphore(MAX_CONCURRENT_ROWS)

    async def infer_one(inputs: InferInputs) -> InferResult:
        async with semaphore:
            return await exchange.run_inference(exchange.build_request(Payload({}), inputs))

    return list(await asyncio.gather(*map(infer_one, inputs_list)))


def is_active_content(content_type: str) -> bool:
    content_type = content_type.lower()
    return any(word in content_type for word in ACTIVE_CONTENT_WORDS)


def estimate_payload_bytes(payload: Payload) -> int:
    """Return the approximate size, or any number above `LARGE_ARRAY_BYTES` for a large payload."""
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
    items, size = value, BYTES_PER_LISTED_VALUE * len(value)
    while items and size <= LARGE_ARRAY_BYTES:
        types = set(map(type, items))
        if not types.isdisjoint((str, bytes)):
            size += sum(
                map(estimate_value_bytes, (item for item in items if not isinstance(item, list)))
            )
        if list not in types:
            break
        nested = chain.from_iterable(item for item in items if isinstance(item, list))
        items = list(islice(nested, LARGE_ARRAY_BYTES // BYTES_PER_LISTED_VALUE + 1))
        size += BYTES_PER_LISTED_VALUE * len(items)
    return size


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
            for name, array in inputs.arrays.items()
        ],
    }


def encoded_size_bytes(array: np.ndarray) -> int:
    # On the wire, each element of BYTES is preceded by its length in 4 bytes.
    return sum(4 + len(value) for value in array.flat) if array.dtype.kind == "O" else array.nbytes


def first_values(array: np.ndarray) -> Sequence[Any]:
    first = array.ravel()[:FIRST_VALUES_COUNT]
    if array.dtype.kind == "O":
        return [bytes_to_json(value[:200]) for value in first]
    values = array_to_json(first)
    return list(values.tolist() if isinstance(values, np.ndarray) else values)
