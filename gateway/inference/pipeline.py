"""The steps of a request to a model, in the order in which its handler takes them.

Open (resolve the model), receive (`body.py`), admit, decode (`decode.py`), run the inference, build the
response.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from gateway.callers import RIGHT_TO_INFER
from gateway.capacity.admission import Slot
from gateway.errors import (
    InputMismatch,
    MalformedRequest,
    ModelNotReady,
    TooLarge,
    UnknownModel,
    UnsupportedBody,
)
from gateway.fleet.signatures import SignatureCache, select_outputs
from gateway.http_client.response import Headers
from gateway.inference.body import Deadline, RequestBody, read_form_body
from gateway.inference.body_type import GENERIC_TYPES, recognize_body
from gateway.media_types import JSON, MULTIPART, OCTET_STREAM
from gateway.memory import MemoryCharge
from gateway.messages import quote_text, suggest_name
from gateway.repository.resolver import ModelTarget, VersionChoice
from gateway.services import INTERNAL_REQUEST, Inference, Services
from gateway.tasks import run_together
from gateway.telemetry.request_info import RequestInfo, RequestScope
from gateway.telemetry.tracing import TRACE_CONTEXT_HEADERS, select_trace_context
from gateway.tensors.codecs import CODECS_BY_TYPE, DEFAULT_CODEC, JSON_CODEC, parse_body_type
from gateway.tensors.inputs import Body, InferInputs, check_row_count
from gateway.tensors.multipart import Form
from gateway.tensors.outputs import EncodedBody, InferResult, are_large
from gateway.tensors.payload import PayloadOptions
from gateway.tensors.signature import Signature
from gateway.triton import sequence
from gateway.triton.inference import InferRequest
from gateway.triton.request_target import RequestTarget
from gateway.triton.sequence import SequenceStep

OPTION_HEADERS: Final = frozenset(
    (b"x-request-timeout", b"x-sequence-id", b"x-sequence", *TRACE_CONTEXT_HEADERS)
)
NO_HEADERS: Final[Headers] = []
# Bytes of memory per byte of the result's tensors, which are encoded as JSON.
RESPONSE_MEMORY_FACTOR: Final = 4
# Documents of types with these words can run scripts: text/html, image/svg+xml, application/xml, …
ACTIVE_CONTENT_WORDS: Final = ("html", "xml", "xsl", "script", "multipart")
# Responses have this header if a label decided on the version, or if their body does not contain it.
VERSION_HEADER: Final = b"x-model-version"
ATTACHMENT_HEADERS: Final = {"content-disposition": "attachment"}
# Of these, a misspelt one is reported.
KNOWN_PARAMETERS: Final = ("classification", "priority", "timeout", *sequence.SEQUENCE_KEYS)
MAX_SUGGESTED_PARAMETERS: Final = 16
MISSPELT_SIMILARITY: Final = 0.85
MAX_CONCURRENT_ROWS: Final = 16
# Returns the type of a body by its bytes, the type that it was sent with, and the model.
Recognize = Callable[[bytes, str, Signature], str]


class DryRunPassed(Exception):
    """The request has passed its checks, and the model would run now."""


class DryRun:
    """The place where a request runs that is only checked: nothing runs, and no model is loaded."""

    def __init__(self) -> None:
        self.request: InferRequest | None = None  # None if the model must be loaded first

    async def infer(self, request: InferRequest) -> InferResult:
        self.request = request
        raise DryRunPassed


@dataclass(slots=True)
class OpenedRequest:
    """A request to a model that its caller may use, before its body is received.

    Its fields are read so often that reading those of a tuple would cost 2 % of a request with a text.
    """

    services: Services
    info: RequestInfo
    body: RequestBody
    charge: MemoryCharge
    signature: Signature
    deadline: Deadline
    trace_headers: Headers  # the client's trace context
    # What the sequence headers say.
    step: SequenceStep | None
    # The decision of a label on the version.
    choice: VersionChoice | None
    run: Inference  # on the fleet, or a dry run


async def open_request(
    request: Request,
    services: Services,
    model: str,
    version: str = "",
    deadline: Deadline | None = None,
) -> OpenedRequest:
    """Check the caller's rights and find the model's signature.

    The deadline is that of a request whose body was received before.
    Raises `Forbidden`, `UnknownModel`, `ModelNotReady`, `DeadlinePassed` or `MalformedRequest`.
    """
    scope: RequestScope = request.scope  # type: ignore[assignment]  # typing.cast costs a call
    target = services.resolver.resolve(scope, RIGHT_TO_INFER, model, version)
    body = RequestBody(request.scope, request.receive)
    timeout_s = services.default_timeout_s
    step = None
    trace_headers = NO_HEADERS
    if not OPTION_HEADERS.isdisjoint(body.headers):
        timeout_s = services.resolve_timeout_s(body.get_header(b"x-request-timeout"))
        step = sequence.parse_sequence_headers(
            body.get_header(b"x-sequence-id"), body.get_header(b"x-sequence")
        )
        trace_headers = select_trace_context(scope["headers"])
    if step is not None:
        target = target.with_sequence(step)
    if deadline is None:
        deadline = Deadline.after(timeout_s)
    internal = request.scope.get(INTERNAL_REQUEST)
    run = services.inference if internal is None or internal.run is None else internal.run
    if isinstance(run, DryRun) and services.pool.is_awaited(target.model):
        services.record_model(scope["request_info"], target.model, target.version)
        raise DryRunPassed
    signature = services.signatures.find_signature(target.model, target.version)
    if signature is None:
        await services.dispatcher.wait_for_model(target.model, target.version, deadline.remaining_s)
        signature = await deadline.limit(read_signature(services.signatures, target, step))
    info = scope["request_info"]
    info.model = signature.model
    info.version = signature.version
    charge = services.get_charge(info)
    choice = target.choice
    return OpenedRequest(
        services, info, body, charge, signature, deadline, trace_headers, step, choice, run
    )


async def read_signature(
    signatures: SignatureCache, target: ModelTarget, step: SequenceStep | None
) -> Signature:
    """Return the signature of the target, or if it was unloaded, of another version of a split."""
    try:
        return await signatures.get_signature(target.model, target.version)
    except (ModelNotReady, UnknownModel):
        if target.choice is None:
            raise
        version = target.choice.choose_other_version(target.version, step)
        if not version:
            raise
    return await signatures.get_signature(target.model, version)


async def receive_body(opened: OpenedRequest, recognize: Recognize = recognize_body) -> Body:
    """Receive the complete body, which is not decoded yet; a form is split into its parts.

    `recognize` returns the type of a body that was sent with a generic one.
    Raises `UnsupportedBody` for a type that the model does not take, before the body is received.
    """
    body = opened.body
    content_type = body.content_type
    body_type = parse_body_type(content_type)
    if body_type.media_type in GENERIC_TYPES:
        received = await receive_bytes(opened)
        body.content_type = recognize(received, content_type, opened.signature)
        if body.content_type == JSON:
            more_factor = JSON_CODEC.memory_factor - DEFAULT_CODEC.memory_factor
            opened.charge.add(more_factor * len(received))
        return received
    if body_type.codec is None:
        if not opened.signature.takes_any_file or body_type.media_type.startswith("multipart/"):
            raise UnsupportedBody(content_type, CODECS_BY_TYPE)
        body.content_type = OCTET_STREAM  # the value of an input, such as audio
    elif body_type.media_type == MULTIPART:
        return await receive_form(opened)
    return await receive_bytes(opened)


async def receive_form(opened: OpenedRequest) -> Form:
    limits = opened.services.payload_limits
    await opened.body.receive_start(limits.max_bytes)
    return await opened.deadline.limit(read_form_body(opened.body, limits, opened.charge))


async def receive_bytes(opened: OpenedRequest) -> bytes:
    max_bytes = opened.services.payload_limits.max_bytes
    is_received = await opened.body.receive_start(max_bytes)
    reading = opened.body.read(max_bytes, opened.charge)
    return await (reading if is_received else opened.deadline.limit(reading))


async def admit(opened: OpenedRequest) -> Slot:
    """Return a slot of the model, which the request holds while it is converted, sent and rendered.

    A request takes it after its body is received, so that a slow client does not hold one.
    Raises `AdmissionQueueFull` or `DeadlinePassed`.
    """
    slot = Slot(opened.services.admission, opened.signature.model, opened.info)
    if not isinstance(opened.run, DryRun) and not slot.try_acquire():
        await slot.acquire(opened.deadline.remaining_s)
    return slot


def build_request(
    opened: OpenedRequest, options: PayloadOptions, inputs: InferInputs
) -> InferRequest:
    """Return the request to the model. Raises `InputMismatch` or `MalformedRequest` for its options."""
    signature = opened.signature
    version = signature.version
    deadline = opened.deadline
    choice = opened.choice
    step = resolve_sequence_step(opened, options.parameters) if options.parameters else opened.step
    if choice is not None and step is not None and step is not opened.step:
        version = opened.info.version = choice.choose_sequence_version(step)
    return InferRequest(
        RequestTarget(
            signature.model,
            version,
            deadline.timeout_s,
            sequence_step=step,
            can_activate=True,
            fallback=choice,
        ),
        signature,
        inputs,
        select_outputs(signature, options.outputs),
        options.parameters,
        options.id or opened.info.request_id,
        deadline.at,
        opened.trace_headers,
    )


def resolve_sequence_step(
    opened: OpenedRequest, parameters: Mapping[str, Any]
) -> SequenceStep | None:
    """Check the parameters, and return the request's step of a sequence. Raises `MalformedRequest`."""
    if len(parameters) <= MAX_SUGGESTED_PARAMETERS:
        check_parameter_names(parameters)
    step = sequence.parse_sequence_parameters(parameters)
    if step is not None and opened.step is not None:
        raise MalformedRequest(
            "the sequence is set by both X-Sequence-ID and a parameter; send only one of them"
        )
    return step or opened.step


def check_parameter_names(parameters: Iterable[str]) -> None:
    """Check for names that differ a little from one that the gateway reads. Raises `MalformedRequest`.

    Triton ignores a parameter that the model does not read.
    """
    for name in parameters:
        if name not in KNOWN_PARAMETERS and (
            hint := suggest_name(name, KNOWN_PARAMETERS, cutoff=MISSPELT_SIMILARITY)
        ):
            raise MalformedRequest(f"unknown parameter {quote_text(name)}{hint}")


async def run_inference(opened: OpenedRequest, slot: Slot, request: InferRequest) -> InferResult:
    """Return the result; raises `TooLarge` or `RateLimitExceeded` for a batch that must be split."""
    if request.inputs.exceeds(opened.signature.max_batch_size):
        await count_rows(opened, request.inputs.batch_size, len(request.inputs.items))
    result = await opened.run.infer(request)
    opened.charge.change_kind("response")
    opened.charge.add(RESPONSE_MEMORY_FACTOR * result.size_bytes)
    if opened.choice is not None:
        opened.info.version = result.version or opened.info.version
    return result


async def run_inferences(
    opened: OpenedRequest, slot: Slot, options: PayloadOptions, inputs_list: Sequence[InferInputs]
) -> list[InferResult]:
    """Return the results of inferences that differ in their tensors.

    Raises `InputMismatch` or `RateLimitExceeded`.
    """
    if len(inputs_list) == 1:
        request = build_request(opened, options, inputs_list[0])
        return [await run_inference(opened, slot, request)]
    # Concurrent inferences have no order, which a sequence requires.
    if opened.step is not None and inputs_list:
        raise InputMismatch(
            "the model has no batch dimension: a sequence step must have exactly one instance"
        )
    await count_rows(opened, len(inputs_list))
    semaphore = asyncio.Semaphore(MAX_CONCURRENT_ROWS)

    async def infer_one(inputs: InferInputs) -> InferResult:
        async with semaphore:
            return await run_inference(opened, slot, build_request(opened, options, inputs))

    return await run_together(map(infer_one, inputs_list))


async def count_rows(opened: OpenedRequest, rows: int, files: int = 0) -> None:
    """Count the inferences of a request that is several as requests of its key.

    Each of the files of different lengths is one.
    """
    limits = opened.services.payload_limits
    check_row_count(opened.signature, rows, limits)
    if files > limits.max_inferences:
        raise TooLarge(
            f"a request can have at most {limits.max_inferences} files of different lengths; got {files}"
        )
    inferences = files or opened.signature.count_inferences(rows)
    await opened.services.limiter.admit_inferences(opened.info, inferences)


async def render_results(
    opened: OpenedRequest,
    results: list[InferResult],
    render: Callable[[], EncodedBody],
) -> Response:
    is_large = are_large(results)
    executor = opened.services.decode_executor
    encoded = (
        await opened.deadline.limit(executor.run_in_thread(render, "render"))
        if is_large
        else render()
    )
    more_headers = NO_HEADERS
    if opened.choice is not None or encoded.content_type != JSON:
        version = results[0].version or opened.info.version
        more_headers = [(VERSION_HEADER, version.encode("latin-1"))]
    return ResultResponse(encoded, more_headers)


class ResultResponse(Response):
    """A response with encoded results. The headers that follow from its content type are built once."""

    def __init__(self, encoded: EncodedBody, more_headers: Headers) -> None:
        self.status_code = 200
        self.background = None
        self.body = encoded.body
        *first, content_type = build_content_headers(encoded.content_type)
        length = (b"content-length", b"%d" % len(encoded.body))
        self.raw_headers = [*first, *more_headers, length, content_type]


@lru_cache(256)
def build_content_headers(content_type: str) -> Headers:
    """Return the headers for a content type, which a model declares; Content-Type is the last."""
    # Browsers download an output that could run a script instead of displaying it.
    headers = ATTACHMENT_HEADERS if is_active_content(content_type) else None
    response = Response(headers=headers, media_type=content_type)
    return [pair for pair in response.raw_headers if pair[0] != b"content-length"]


@lru_cache(256)
def is_active_content(content_type: str) -> bool:
    content_type = content_type.lower()
    return any(word in content_type for word in ACTIVE_CONTENT_WORDS)
