"""Triton's errors become ours: corrected by one table, and scrubbed of what no caller should see.

Triton's own statuses mislead: everything but INTERNAL, NOT_FOUND, UNAVAILABLE and UNSUPPORTED is 400,
a body that is not JSON is 500, a full queue is 503. So both the status and the words decide.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import orjson

from gateway.errors import (
    BadUpstream,
    DeadlinePassed,
    DoesNotFit,
    GatewayError,
    Malformed,
    ModelControlMode,
    ModelFault,
    ModelNotReady,
    NotFound,
    Overloaded,
    RefusedByModel,
    SequenceNotRunning,
    Unavailable,
    UnknownModel,
)
from gateway.tensors.sequence import Step
from gateway.words import quoted

log = logging.getLogger(__name__)

# Clients' words come back in Triton's errors: what is searched is bounded.
LONGEST = 2048
LOGGED = 16_384
# Python's stack, as Triton's Python backend appends it.
STACK = re.compile(r"\n[ \t]*At:[ \t]*\n.*", re.S)
FOLDERS = re.compile(r"(?<![\w:/])/(?:[\w.@+~-]+/)+")
POINTER = re.compile(r"\b0x[0-9a-fA-F]{6,}\b")
REGION = re.compile(r"\b/?triton_(?:python_backend_shm_region|gateway)_[\w-]+")
# What surrounds the reason and helps nobody to mend a request.
WRAPPING = (
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


def scrubbed(text: str) -> str:
    """Triton's reason without stack, folders, addresses and names of shared memory; one line."""
    text = STACK.sub("", text[:LONGEST].strip())
    before = ""
    while text != before:
        before = text
        for wrapping in WRAPPING:
            text = wrapping.sub("", text)
    for secret in (FOLDERS, POINTER, REGION):
        text = secret.sub("", text)
    return " ".join(text.split()).rstrip(" ;")


class LoadFailed(GatewayError):
    """Triton could not load or unload the model, for a reason that lies in the model."""

    status, code = 422, "LOAD_FAILED"

    def __init__(self, model: str, reason: str, verb: str = "load") -> None:
        super().__init__(f"failed to {verb} {quoted(model)}: {reason}")


class Asked(NamedTuple):
    """What is asked of Triton: for the choice of a replica, and for the sentence of an error."""

    model: str = ""
    version: str = ""
    timeout_s: float = 0.0
    health: bool = False
    sequence: Step | None = None
    unknown: type[UnknownModel] = UnknownModel  # the error for a model that is not found


@dataclass(frozen=True)
class Rule:
    """One row of the table: which answers it concerns, and what they mean."""

    statuses: frozenset[int]
    words: re.Pattern[str]
    error: Callable[[str, Asked], GatewayError]


def rule(statuses: set[int], words: str, error: Callable[[str, Asked], GatewayError]) -> Rule:
    return Rule(frozenset(statuses), re.compile(words, re.I | re.S), error)


ANY = {400, 404, 500, 501, 503}
# In mode none as well it speaks of polling.
MODE = re.compile(r"explicit model load / unload is not allowed", re.I)

RULES = (
    rule(ANY, r"has no available versions", lambda _, asked: ModelNotReady(asked.model, asked.version)),
    rule(ANY, r"unknown model|model '[^']{0,300}' is not found|failed to poll from model repository|"
         r"requested model '[^']{0,300}' is not available",
         lambda _, asked: asked.unknown(asked.model, asked.version)),
    rule(ANY, r"is not (at )?ready|not ready for inference|is unloaded",
         lambda _, asked: ModelNotReady(asked.model, asked.version)),
    rule(ANY, r"model version is not available|\bstol\b",
         lambda _, asked: asked.unknown(asked.model, asked.version)),
    rule({400, 500}, r"must specify the START flag", lambda _, asked: SequenceNotRunning(
        asked.model, asked.sequence.sequence_id if asked.sequence else None)),
    rule(ANY, r"Failed to process the request\(s\)", lambda text, asked: ModelFault(
        f"model '{asked.model}' failed: {text}")),
    rule(ANY, r"queue size|queue is full", lambda _, asked: Overloaded(
        f"the queue of model '{asked.model}' is full; try again shortly")),
    rule(ANY, r"timeout expired|timed out|deadline exceeded",
         lambda _, asked: DeadlinePassed(asked.timeout_s)),
    rule(ANY, r"server is (stopping|shutting|not ready|exiting)|exit timeout",
         lambda *_: Unavailable("the replica is stopping; try again")),
    rule(ANY, r"parse the request|inference header size|failed to parse|unable to parse|request JSON|"
         r"Unable to find 'inputs'|failed to get request params|attempt to access JSON",
         lambda text, _: Malformed(f"Triton cannot read the request: {text}")),
    rule(ANY, MODE.pattern, lambda *_: ModelControlMode()),
    rule(ANY, r"decoupled transaction", lambda _, asked: RefusedByModel(
        f"model '{asked.model}' answers several times (decoupled): stream it, by POST "
        f"/v1/models/{asked.model}/infer with Accept: text/event-stream")),
    rule({400, 501}, r"\bcuda\b|\bgpu\b|out of memory",
         lambda text, asked: ModelFault(f"model '{asked.model}' failed: {text}")),
    rule({400}, r"unexpected (shape|data-?type|size|number)|expected [^,]{0,40} inputs? but got|"
         r"input .* not found|unexpected inference (input|output)|byte size|batch[- ]size",
         lambda text, _: DoesNotFit(text)),
    rule({404}, "", lambda text, _: NotFound(text or "Triton has nothing at this path")),
    rule({400, 501}, "", lambda text, _: RefusedByModel(text or "Triton refused the request")),
    rule({503}, "", lambda text, _: Unavailable(text or "Triton cannot serve this now")),
    rule({500}, "", lambda text, asked: ModelFault(
        f"model '{asked.model}' failed: {text}" if asked.model else f"Triton failed: {text}")),
)  # fmt: skip


def text_of(body: bytes) -> str:
    """The `error` of a Triton answer; empty where the body is something else."""
    try:
        document = orjson.loads(body.removeprefix(b"data: ").rstrip())  # bare, or as an event
    except orjson.JSONDecodeError:
        return ""
    error = document.get("error", "") if isinstance(document, dict) else ""
    return error if isinstance(error, str) else ""


def scrubbed_event(payload: bytes) -> bytes:
    """The JSON of an error that comes in the middle of a stream, without what must not leave."""
    log.warning("Triton's stream failed: %s", payload[:LOGGED].decode(errors="replace"))
    text = text_of(payload)[:LONGEST]
    code = next(
        row.error("", Asked()).code
        for row in RULES
        if 400 in row.statuses and row.words.search(text)
    )
    return orjson.dumps({"error": scrubbed(text) or "the stream failed", "code": code})


def complaint(status: int, body: bytes, asked: Asked) -> GatewayError:
    """The error of ours that an answer of Triton's with this status means. The log has all of it."""
    if asked.health:  # Triton says 400 with an empty body
        return (
            ModelNotReady(asked.model, asked.version) if asked.model else Unavailable("not ready")
        )
    log.warning("Triton answered %d: %s", status, body[:LOGGED].decode(errors="replace"))
    text = text_of(body)[:LONGEST]
    shown = scrubbed(text)
    for row in RULES:
        if status in row.statuses and row.words.search(text):
            return row.error(shown, asked)
    return BadUpstream(f"the replica answered {status}")


def refusal(status: int, body: bytes, model: str, verb: str) -> GatewayError:
    """Why a load or an unload was refused: by Triton's mode, or by what the model is."""
    log.warning("Triton answered %d: %s", status, body[:LOGGED].decode(errors="replace"))
    text = text_of(body)[:LONGEST]
    shown = scrubbed(text)
    if MODE.search(text):
        return ModelControlMode()
    if not shown:
        return BadUpstream(f"the replica answered {status}")
    return LoadFailed(model, shown, verb)
