"""One request to a model: its deadline and slot, its body as tensors, and its results as a response."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, Final, TypeVar

import anyio
from starlette.requests import Request
from starlette.responses import Response

from gateway.callers import Right
from gateway.capacity.admission import Slot
from gateway.errors import (
    DeadlinePassed,
    InputMismatch,
    MalformedRequest,
    ModelNotReady,
    UnknownModel,
)
from gateway.fleet.signatures import SignatureCache, check_output_names
from gateway.http_client.connection import Headers
from gateway.inference.body import DeferredPayload, RequestBody, receive_payload
from gateway.media_types import OCTET_STREAM
from gateway.memory import MemoryCharge
from gateway.messages import quote_text, suggest_name
from gateway.repository.resolver import ModelTarget, StartCopy, VersionChoice
from gateway.services import Services
from gateway.tasks import run_together
from gateway.telemetry.request_info import RequestInfo
from gateway.telemetry.tracing import TRACE_CONTEXT_HEADERS
from gateway.tensors import sequence
from gateway.tensors.codecs import JSON_CODEC
from gateway.tensors.inputs import (
    InferInputs,
    JsonInferences,
    JsonParser,
    check_row_count,
    convert_payload,
    decode_json_inferences,
    inspect_payload,
)
from gateway.tensors.outputs import EncodedBody, InferResult, are_large
from gateway.tensors.payload import LARGE_ARRAY_BYTES, Payload, estimate_payload_bytes
from gateway.tensors.sequence import SequenceStep
from gateway.tensors.signature import Signature
from gateway.triton.inference import InferRequest
from gateway.triton.request_target import RequestTarget

T = TypeVar("T")
OPTION_HEADERS: Final = frozenset(
    (b"x-request-timeout", b"x-sequence-id", b"x-sequence", *TRACE_CONTEXT_HEADERS)
)
NO_HEADERS: Final[Headers] = []
# Bytes of memory per byte of the result's tensors, which are encoded as JSON.
RESPONSE_MEMORY_FACTOR: Final = 4
# Documents of types with these words can run scripts: text/html, image/svg+xml, application/xml, …
ACTIVE_CONTENT_WORDS: Final = ("html", "xml", "xsl", "script", "multipart")
VERSION_HEADER: Final = "x-model-version"  # of responses whose version a label decided
ATTACHMENT_HEADERS: Final = {"content-disposition": "attachment"}
# Of these, a misspelt one is reported.
KNOWN_PARAMETERS: Final = ("classification", "priority", "timeout", *sequence.SEQUENCE_KEYS)
MAX_SUGGESTED_PARAMETERS: Final = 16
MISSPELT_SIMILARITY: Final = 0.85
MAX_CONCURRENT_ROWS: Final = 16
PAYLOADS_PER_TURN: Final = 32  # converted on the event loop in about a millisecond
NO_PAYLOAD: Final = Payload({})
# Images with more pixels are decoded in a process, because it can be killed at the deadline.
MAX_THREAD_PIXELS: Final = 4_000_000


@dataclass
class InferExchange:
    """One request to a model, with the slot that it holds until the end of its context."""

    services: Services
    body: RequestBody
    info: RequestInfo
    charge: MemoryCharge
    signature: Signature
    timeout_s: float
    deadline: float
    trace_headers: Headers  # the client's trace context
    step: SequenceStep | None  # from the sequence headers
    slot: Slot
    choice: VersionChoice | None = None  # if a rule decided on the version
    copies: list[StartCopy] = field(default_factory=list)  # sent after this exchange

    def __enter__(self) -> InferExchange:
        return self

    def __exit__(self, *_: object) -> None:
        self.slot.release()
        for start_copy in self.copies:
            start_copy()

    @property
    def remaining_s(self) -> float:
        return max(self.deadline - anyio.current_time(), 0.0)

    # From the body to the tensors.

    async def receive_inputs(self) -> tuple[Payload, InferInputs]:
        """Receive the body, acquire a slot, and return the body's payload and its tensors."""
        decoders, limits = self.services.decode_executor, self.services.payload_limits
        if not self.body.content_type and self.body.has_content and is_text_model(self.signature):
            self.body.content_type = OCTET_STREAM  # a text, as Triton takes it
        is_received = await self._receive_start()
        receiving = receive_payload(self.body, limits, self.charge)
        body = await (receiving if is_received else self._limit_time(receiving))
        if isinstance(body, DeferredPayload):
            body = await self._limit_time(decoders.run_in_thread(0, body))
        # After the body is received, so that a slow client does not hold a slot.
        await self.slot.acquire(self.remaining_s)
        if isinstance(body, Payload):
            return body, await self._convert_payload(body)
        arguments = (*body.args, self.signature, limits)
        work = decoders.run_in_process(0, self.remaining_s, body.func, *arguments)
        return await self._limit_time(work)

    async def receive_json_inferences(self, parse: JsonParser) -> JsonInferences:
        """Receive a JSON body, acquire a slot, and return its tensors and how to encode the results."""
        decoders, limits = self.services.decode_executor, self.services.payload_limits
        is_received = await self._receive_start()
        reading = self.body.read(limits.max_bytes, self.charge)
        body = await (reading if is_received else self._limit_time(reading))
        await self.slot.acquire(self.remaining_s)
        if len(body) > JSON_CODEC.max_thread_bytes:
            arguments = (parse, body, self.signature, limits)
            work = decoders.run_in_process(0, self.remaining_s, decode_json_inferences, *arguments)
            return await self._limit_time(work)
        read = partial(parse, body, self.signature, limits)
        is_inline = len(body) <= JSON_CODEC.max_inline_bytes
        parsed = read() if is_inline else await self._limit_time(decoders.run_in_thread(0, read))
        return JsonInferences(await self._convert_payloads(parsed.payloads), parsed.encode)

    async def _receive_start(self) -> bool:
        """Return whether the whole body is there when the application starts (`server/protocol/`)."""
        if b"expect" in self.body.headers:  # the client waits for 100 Continue
            return False
        return await self.body.receive_start(self.services.payload_limits.max_bytes)

    async def _convert_payloads(self, payloads: Sequence[Payload]) -> list[InferInputs]:
        """Convert payloads of separate inferences; let the event loop run between them."""
        inputs: list[InferInputs] = []
        for payload in payloads:
            if len(inputs) % PAYLOADS_PER_TURN == PAYLOADS_PER_TURN - 1:
                await asyncio.sleep(0)
            inputs.append(await self._convert_payload(payload))
        return inputs

    async def _convert_payload(self, payload: Payload) -> InferInputs:
        decoders = self.services.decode_executor
        limits = self.services.payload_limits
        inspect = partial(inspect_payload, payload, self.signature, limits)
        is_large = estimate_payload_bytes(payload, self.signature) > LARGE_ARRAY_BYTES
        inspected = (
            await self._limit_time(decoders.run_in_thread(0, inspect)) if is_large else inspect()
        )
        cost = inspected.decoding_cost
        if inspected.decoded_bytes:
            self.charge.add(inspected.decoded_bytes)
        if not cost and not is_large:
            return convert_payload(inspected, self.signature)
        convert = partial(convert_payload, inspected, self.signature)
        if cost <= MAX_THREAD_PIXELS:
            return await self._limit_time(decoders.run_in_thread(cost, convert))
        return await self._limit_time(decoders.run_in_process(cost, self.remaining_s, convert))

    async def _limit_time(self, work: Awaitable[T]) -> T:
        """Await work that may take long, and cancel it at the deadline. Raises `DeadlinePassed`."""
        return await limit_time(work, self.deadline, self.timeout_s)

    # From the tensors to the response.

    def build_request(self, payload: Payload, inputs: InferInputs) -> InferRequest:
        step = self._read_parameters(payload.parameters) if payload.parameters else self.step
        signature, version = self.signature, self.signature.version
        if self.choice is not None and step is not None and step is not self.step:
            version = self.info.version = self.choice.choose_sequence_version(step)
        return InferRequest(
            RequestTarget(
                signature.model,
                version,
                self.timeout_s,
                sequence_step=step,
                can_activate=True,
                fallback=self.choice,
            ),
            signature,
            inputs,
            check_output_names(signature, payload.outputs),
            payload.parameters,
            payload.id or self.info.request_id,
            self.deadline,
            self.trace_headers,
        )

    def _read_parameters(self, parameters: Mapping[str, Any]) -> SequenceStep | None:
        """Check the parameters, and return the request's step of a sequence. Raises `MalformedRequest`."""
        if len(parameters) <= MAX_SUGGESTED_PARAMETERS:
            check_parameter_names(parameters)
        step = sequence.parse_sequence_parameters(parameters)
        if step is not None and self.step is not None:
            raise MalformedRequest(
                "the sequence is set by both X-Sequence-ID and a parameter; send only one of them"
            )
        return step or self.step

    async def run_payloads(self, payloads: Sequence[Payload]) -> list[InferResult]:
        """Acquire a slot and return the results of the payloads, which have no order."""
        await self.slot.acquire(self.remaining_s)
        inputs = await self._convert_payloads(payloads)
        return await self.run_all(inputs, payloads[0]._replace(parts={}))

    async def run_all(
        self, inputs_list: Sequence[InferInputs], payload: Payload = NO_PAYLOAD
    ) -> list[InferResult]:
        """Return the results of inferences that differ in their tensors.

        Raises `InputMismatch` or `RateLimitExceeded`.
        """
        if len(inputs_list) == 1:
            return [await self.run_inference(self.build_request(payload, inputs_list[0]))]
        # Concurrent inferences have no order, which a sequence requires.
        if self.step is not None and inputs_list:
            raise InputMismatch(
                "the model has no batch dimension: a sequence step must have exactly one instance"
            )
        await self._count_rows(len(inputs_list))
        semaphore = asyncio.Semaphore(MAX_CONCURRENT_ROWS)

        async def infer_one(inputs: InferInputs) -> InferResult:
            async with semaphore:
                return await self.run_inference(self.build_request(payload, inputs))

        return await run_together(map(infer_one, inputs_list))

    async def run_inference(self, request: InferRequest) -> InferResult:
        """Return the result; raises `TooLarge` or `RateLimitExceeded` for a batch that must be split."""
        if request.inputs.exceeds(self.signature.max_batch_size):
            await self._count_rows(request.inputs.batch_size)
        result = await self.services.inference.infer(request)
        self.charge.change_kind("response")
        self.charge.add(RESPONSE_MEMORY_FACTOR * result.size_bytes)
        if self.choice is not None:
            self.info.version = result.version or self.info.version
            if start_copy := self.choice.copy_inference(request, result):
                self.copies.append(start_copy)
        return result

    async def _count_rows(self, rows: int) -> None:
        """Count the inferences of a request that is several as requests of its key."""
        check_row_count(self.signature, rows, self.services.payload_limits)
        info, caller = self.info, self.info.caller
        if caller.requests_per_second is not None:
            await self.services.rate_limiter.count_request(
                caller.name,
                caller.requests_per_second,
                inferences=self.signature.count_inferences(rows),
                opens_window=info.opens_window,
            )

    async def build_response(
        self, results: list[InferResult], render: Callable[[], EncodedBody], more_bytes: int = 0
    ) -> Response:
        """Return the rendered results, which contain `more_bytes` of the request."""
        is_large = are_large(results, more_bytes)
        decoders = self.services.decode_executor
        encoded = (
            await self._limit_time(decoders.run_in_thread(0, render)) if is_large else render()
        )
        # Browsers download an output that could run a script instead of displaying it.
        headers = ATTACHMENT_HEADERS if is_active_content(encoded.content_type) else None
        if self.choice is not None:
            headers = {**(headers or {}), VERSION_HEADER: self.info.version}
        return Response(encoded.body, headers=headers, media_type=encoded.content_type)


async def open_exchange(
    request: Request,
    services: Services,
    model: str,
    version: str = "",
    deadline: float | None = None,
) -> InferExchange:
    """Check the caller's rights and open the exchange with the model.

    The deadline is that of a request whose body was received before.
    Raises `Forbidden`, `UnknownModel`, `ModelNotReady`, `DeadlinePassed` or `MalformedRequest`.
    """
    target = services.resolver.resolve(request.scope, Right.infer, model, version)
    body = RequestBody(request.scope, request.receive)
    timeout_s, step, trace_headers = services.default_timeout_s, None, NO_HEADERS
    if not OPTION_HEADERS.isdisjoint(body.headers):
        timeout_s = services.resolve_timeout_s(body.get_header(b"x-request-timeout"))
        step = sequence.parse_sequence_headers(
            body.get_header(b"x-sequence-id"), body.get_header(b"x-sequence")
        )
        trace_headers = [
            pair for pair in request.scope["headers"] if pair[0] in TRACE_CONTEXT_HEADERS
        ]
    if step is not None:
        target = target.with_sequence(step)
    now = asyncio.get_running_loop().time()
    if deadline is None:
        deadline = now + timeout_s
    if services.pool.activator is not None:
        await services.activate_model(target.model, target.version, max(deadline - now, 0.0))
    signature = services.signatures.find_signature(target.model, target.version)
    if signature is None:
        read = read_signature(services.signatures, target, step)
        signature = await limit_time(read, deadline, timeout_s)
    info: RequestInfo = request.scope["request_info"]
    info.model, info.version = signature.model, signature.version
    return InferExchange(
        services,
        body,
        info,
        services.get_charge(info),
        signature,
        timeout_s,
        deadline,
        trace_headers,
        step,
        Slot(services.admission, signature.model, info.caller_name),
        target.choice,
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


def check_parameter_names(parameters: Iterable[str]) -> None:
    """Raise `MalformedRequest` for a name that differs a little from one that the gateway reads.

    Triton ignores a parameter that the model does not read.
    """
    for name in parameters:
        if name not in KNOWN_PARAMETERS and (
            hint := suggest_name(name, KNOWN_PARAMETERS, cutoff=MISSPELT_SIMILARITY)
        ):
            raise MalformedRequest(f"unknown parameter {quote_text(name)}{hint}")


async def limit_time(work: Awaitable[T], deadline: float, timeout_s: float) -> T:
    """Await work until a time of the event loop's clock. Raises `DeadlinePassed`."""
    try:
        with anyio.fail_after(deadline - anyio.current_time()):
            return await work
    except TimeoutError as exc:
        raise DeadlinePassed(timeout_s) from exc


def is_text_model(signature: Signature) -> bool:
    """Return whether a body without a type can only be a text or a file."""
    required = signature.required_inputs
    return len(required) == 1 and signature.accepts_only_bytes


@lru_cache(256)
def is_active_content(content_type: str) -> bool:
    content_type = content_type.lower()
    return any(word in content_type for word in ACTIVE_CONTENT_WORDS)
