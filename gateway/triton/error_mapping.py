"""Triton's errors as errors of the gateway, without internals that callers must not see.

Triton's own statuses are misleading: everything but INTERNAL, NOT_FOUND, UNAVAILABLE and UNSUPPORTED is
400, a body that is not JSON is 500, a full queue is 503. So the table matches both status and message.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final

import orjson

from gateway.errors import (
    BadUpstream,
    DeadlinePassed,
    GatewayError,
    InputMismatch,
    MalformedRequest,
    ModelControlModeConflict,
    ModelFault,
    ModelNotReady,
    NotFound,
    Overloaded,
    RefusedByModel,
    SequenceNotRunning,
    Unavailable,
)
from gateway.media_types import EVENT_END
from gateway.messages import quote_text
from gateway.triton.request_target import RequestTarget

# `triton-gateway triton` maps errors in a log, and imports no client.
if TYPE_CHECKING:
    from gateway.http_client.client import UpstreamResponse

log = logging.getLogger(__name__)

# Triton's errors repeat text of the client, so the searched length is bounded.
MAX_ERROR_CHARS = 2048
MAX_LOGGED_BYTES = 16_384
NO_OBJECT: Final = "non-object"  # of Triton's message for a JSON body that is a list or a value
NO_OBJECT_HINT: Final = '; send an object with the inputs by name, as in {"NAME": "text"}'
MAX_ERROR_BODY_BYTES: Final = 1 << 20
MAX_ERROR_EVENT_BYTES: Final = 64 << 10
# The size of a repository's index, and of a model's metadata.
MAX_METADATA_BYTES: Final = 4 << 20
# The stack trace that Triton's Python backend appends.
STACK_TRACE = re.compile(r"\n[ \t]*At:[ \t]*\n.*", re.S)
FOLDER_PATH = re.compile(r"(?<![\w:/])/(?:[\w.@+~-]+/)+")
URL = re.compile(r"\b(?:\w{1,20}://|ipv[46]:)[^\s'\"),;]+")
POINTER = re.compile(r"\b0x[0-9a-fA-F]{6,}\b")
SHARED_MEMORY_REGION = re.compile(r"\b/?triton_(?:python_backend_shm_region|gateway)_[\w-]+")
# Wrappers around the reason that do not help to correct a request.
WRAPPER_PATTERNS = (
    re.compile(r"^\[request id: [^\]]*\] "),
    re.compile(r"^(?:load failed for model '[^']*': |failed to (?:un)?load '[^']*', )"),
    re.compile(r"^version \d+ is at UNAVAILABLE state: "),
    re.compile(
        r"^(?:Internal|Invalid argument|Not found|Unknown|Unsupported|Unavailable)(?:: | - )(?:- )?"
    ),
    re.compile(r"^in ensemble '[^']*', "),
    re.compile(r"^Failed to process the request\(s\) for model(?: instance)? '[^']*', message: "),
    re.compile(r"^(?:\w*Exception|ValueError|RuntimeError|TypeError): "),
)


def sanitize_message(text: str) -> str:
    """Return the reason on one line, without what describes the inside of the server.

    That is stack traces, folders, URLs, addresses, pointers and names of shared memory.
    """
    text = STACK_TRACE.sub("", text[:MAX_ERROR_CHARS].strip())
    previous = ""
    while text != previous:
        previous = text
        for wrapper in WRAPPER_PATTERNS:
            text = wrapper.sub("", text)
    for pattern in (URL, FOLDER_PATH, POINTER, SHARED_MEMORY_REGION):
        text = pattern.sub("", text)
    return " ".join(text.split()).rstrip(" ;")


class LoadFailed(GatewayError):
    """Triton could not load or unload the model because of the model itself."""

    status = 422
    code = "LOAD_FAILED"

    def __init__(self, model: str, reason: str, verb: str = "load") -> None:
        super().__init__(f"failed to {verb} {quote_text(model)}: {reason}")
        self.model = model
        self.reason = reason


class ReplicaStopping(Unavailable):
    """Triton exits, and has not run the request."""

    message = "the replica is shutting down; try again"


ANY_ERROR_STATUS = frozenset((400, 404, 500, 501, 503))


@dataclass(frozen=True)
class ErrorRule:
    """A row of the mapping: the responses that it matches, and the error that they mean."""

    pattern: str
    make_error: Callable[[str, RequestTarget], GatewayError]
    statuses: Collection[int] = ANY_ERROR_STATUS

    @cached_property
    def regex(self) -> re.Pattern[str]:
        return re.compile(self.pattern, re.I | re.S)

    def matches(self, status: int, text: str, target: RequestTarget) -> bool:
        match = self.regex.search(text) if status in self.statuses else None
        return match is not None and match.groupdict().get("model") in (None, target.model)


# Triton mentions polling in mode none as well.
CONTROL_MODE_MESSAGE = re.compile(r"explicit model load / unload is not allowed", re.I)

# A model can say anything about others that it calls. Triton itself did not run the request only if its own
# message names the requested model: the group `model` must be that.
NAMED_MODEL = r"^(?:\[request id: [^\]]{0,300}\] )?"
UNKNOWN_MODEL = NAMED_MODEL + r"request for unknown model: '(?P<model>[^']{0,300})' "


def make_unknown_model_error(_: str, target: RequestTarget) -> GatewayError:
    return target.not_found_error(target.model, target.version)


def make_not_ready_error(_: str, target: RequestTarget) -> GatewayError:
    return ModelNotReady(target.model, target.version)


def make_model_fault(text: str, target: RequestTarget) -> GatewayError:
    return ModelFault(
        f"model '{target.model}' failed: {text}" if target.model else f"Triton failed: {text}"
    )


ERROR_RULES = (
    ErrorRule(r"Failed to process the request\(s\)", make_model_fault),
    ErrorRule(UNKNOWN_MODEL + r"has no available versions", make_not_ready_error),
    ErrorRule(UNKNOWN_MODEL, make_unknown_model_error),
    ErrorRule(
        NAMED_MODEL
        + r"(?:request for unknown model : |requested model '(?P<model>[^']{0,300})' is not available|"
        r"failed to load '[^']{0,300}', failed to poll from model repository)",
        make_unknown_model_error,
    ),
    ErrorRule(
        NAMED_MODEL + r"model '(?P<model>[^']{0,300})' (?:version \d{1,20} )?is not (?:at )?ready",
        make_not_ready_error,
        statuses={400, 404, 503},
    ),
    ErrorRule(  # earlier steps of the ensemble have run
        NAMED_MODEL + r"in ensemble '[^']{0,300}', request for unknown model: ",
        lambda _, target: Unavailable(f"a step of model '{target.model}' is not ready; try again"),
    ),
    ErrorRule(r"model version is not available|\bstol\b", make_unknown_model_error),
    ErrorRule(
        r"must specify the START flag",
        lambda _, target: SequenceNotRunning(
            target.model, target.sequence_step.sequence_id if target.sequence_step else None
        ),
        statuses={400, 500},
    ),
    ErrorRule(
        r"queue size|queue is full",
        lambda _, target: Overloaded(
            f"the queue of model '{target.model}' is full; try again shortly"
        ),
    ),
    ErrorRule(
        r"timeout expired|timed out|deadline exceeded",
        lambda _, target: DeadlinePassed(target.timeout_s),
    ),
    ErrorRule(
        r"server is (stopping|shutting|not ready|exiting)|exit timeout",
        lambda *_: ReplicaStopping(),
    ),
    ErrorRule(
        r"parse the request|inference header size|failed to parse|unable to parse|request JSON|"
        r"Unable to find 'inputs'|failed to get request params|attempt to (?:access|get members)|"
        r"invalid argument for --|"  # a log setting; Triton's status is 503
        r"parameter key '.{0,300}' was not found in the JSON",  # a name with a NUL
        lambda text, _: MalformedRequest(
            f"Triton cannot read the request: {text}{NO_OBJECT_HINT if NO_OBJECT in text else ''}"
        ),
    ),
    ErrorRule(CONTROL_MODE_MESSAGE.pattern, lambda *_: ModelControlModeConflict()),
    ErrorRule(
        r"decoupled transaction",
        lambda _, target: RefusedByModel(
            f"model '{target.model}' is decoupled: it returns any number of responses; stream them with "
            f"POST /v1/models/{target.model}/infer and Accept: text/event-stream, or over gRPC with "
            "ModelStreamInfer"
        ),
    ),
    ErrorRule(r"\bcuda\b|\bgpu\b|out of memory", make_model_fault, statuses={400, 501}),
    ErrorRule(
        r"unexpected (shape|data-?type|size|number)|expected [^,]{0,40} inputs? but got|"
        r"input .* not found|unexpected inference (input|output)|byte size|batch[- ]size",
        lambda text, _: InputMismatch(text),
        statuses={400},
    ),
    ErrorRule("", lambda text, _: NotFound(text or "Triton has no such path"), statuses={404}),
    ErrorRule(
        "",
        lambda text, _: RefusedByModel(text or "Triton rejected the request"),
        statuses={400, 501},
    ),
    ErrorRule(
        "",
        lambda text, _: Unavailable(text or "Triton cannot serve the request now"),
        statuses={503},
    ),
    ErrorRule("", make_model_fault, statuses={500}),
)


def extract_error_text(body: bytes) -> str:
    """Return the `error` of a response of Triton; empty if the body is anything else."""
    try:
        document = orjson.loads(body.removeprefix(b"data: ").rstrip())  # plain, or an event
    except orjson.JSONDecodeError:
        return ""
    error = document.get("error", "") if isinstance(document, dict) else ""
    return error if isinstance(error, str) else ""


def sanitize_event(payload: bytes) -> bytes:
    log.warning("Triton's stream failed: %s", payload[:MAX_LOGGED_BYTES].decode(errors="replace"))
    text = extract_error_text(payload)[:MAX_ERROR_CHARS]
    code = next(
        rule.make_error("", RequestTarget()).code
        for rule in ERROR_RULES
        if 400 in rule.statuses and rule.regex.search(text)
    )
    return orjson.dumps({"error": sanitize_message(text) or "the stream failed", "code": code})


def map_triton_error(status: int, body: bytes, target: RequestTarget) -> GatewayError:
    """Return the gateway error for a response of Triton. The log gets the unsanitized response."""
    error = make_triton_error(status, body, target)
    error.is_from_triton = True
    return error


def make_triton_error(status: int, body: bytes, target: RequestTarget) -> GatewayError:
    if target.is_health_check:  # Triton returns 400 with an empty body
        return (
            ModelNotReady(target.model, target.version)
            if target.model
            else Unavailable("not ready")
        )
    text = extract_error_text(body)[:MAX_ERROR_CHARS]
    reason = sanitize_message(text)
    matching = (rule for rule in ERROR_RULES if rule.matches(status, text, target))
    rule = next(matching, None)
    if rule is None:
        error: GatewayError = BadUpstream(f"the replica returned status {status}")
    else:
        error = rule.make_error(reason, target)
    # Unknown models and paths, and what Triton cannot read, are the client's own mistakes.
    is_mistake = error.status in (NotFound.status, MalformedRequest.status)
    log_error(status, body, logging.INFO if is_mistake else logging.WARNING)
    return error


def log_error(status: int, body: bytes, level: int = logging.WARNING) -> None:
    text = body[:MAX_LOGGED_BYTES].decode(errors="replace")
    log.log(level, "Triton returned status %d: %s", status, text)


def map_load_error(status: int, body: bytes, model: str, verb: str) -> GatewayError:
    log_error(status, body)
    text = extract_error_text(body)[:MAX_ERROR_CHARS]
    reason = sanitize_message(text)
    if CONTROL_MODE_MESSAGE.search(text):
        return ModelControlModeConflict()
    if not reason:
        return BadUpstream(f"the replica returned status {status}")
    return LoadFailed(model, reason, verb)


async def read_error_response(response: UpstreamResponse, target: RequestTarget) -> GatewayError:
    body = bytearray()
    try:
        while len(body) < MAX_ERROR_BODY_BYTES and (chunk := await response.next_chunk()):
            body += chunk
    finally:
        response.close()
    return map_triton_error(response.status, bytes(body), target)


async def read_error_event(response: UpstreamResponse, target: RequestTarget) -> GatewayError:
    """Return the error in the first event of a stream. What follows it stays unread.

    A stream with a longer first event is closed.
    """
    received = b""
    try:
        while EVENT_END not in received and len(received) < MAX_ERROR_EVENT_BYTES:
            chunk = await response.next_chunk()
            if not chunk:
                break
            received += chunk
    except BaseException:
        response.close()
        raise
    event, end, following = received.partition(EVENT_END)
    if end:
        response.unread(following)
    else:
        response.close()
    return map_triton_error(response.status, event, target)
