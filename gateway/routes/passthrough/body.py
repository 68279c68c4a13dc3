"""The body of a pass-through request: reading, inflating, coalescing and validation.

Triton starts an inference only when the body is complete, so holding back small chunks delays nothing.
Many small chunks crash Triton: it keeps a buffer for each, and a list of them on its stack.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Final

import orjson
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive

from gateway.capacity.body_chunks import (
    BODY_FRAMING_HEADERS,
    ZLIB_WBITS,
    inflate_chunks,
    iterate_once,
    limit_length,
)
from gateway.errors import BodyTooLarge, InputMismatch, MalformedRequest
from gateway.http_client.response import Headers
from gateway.memory import MemoryCharge
from gateway.routes.passthrough.headers import RequestHeaders
from gateway.routes.passthrough.rules import Forwarding
from gateway.telemetry.request_info import RequestInfo, measure_phase
from gateway.tensors.signature import Signature
from gateway.triton.inference import find_outputs_without_classes
from gateway.triton.json_guard import (
    GUARD_CHUNK_BYTES,
    SEQUENCE_ID_KEY,
    JsonGuard,
    JsonRules,
    check_complete_json,
)
from gateway.triton.sequence import SequenceStep, parse_sequence_parameters

MAX_SMALL_BODY_BYTES: Final = 64 * 1024
MAX_SEQUENCE_JSON_BYTES: Final = 128 * 1024  # larger JSON is not searched for a sequence
PassthroughBody = bytes | AsyncIterator[bytes]

MIN_CHUNK_BYTES: Final = 32 * 1024
# A compressed body of at most this inflated size is sent as one buffer, so that it can be retried.
MAX_BUFFERED_BYTES: Final = 1 << 20
# Larger JSON is not parsed to find the outputs with a classification.
MAX_PARSED_BYTES: Final = 64 * 1024


@dataclass(slots=True)
class PreparedBody:
    """The body for Triton and the headers that fit it. Each step of the preparation returns another one.

    It is not frozen, because that costs 1 µs more for each request.
    """

    headers: Headers
    content: PassthroughBody
    max_bytes: int  # the length, or the limit of a stream
    beginning: bytes  # the part of a stream that has been received; all of a complete body


def begin_body(
    message: Message, receive: Receive, headers: RequestHeaders, limit: int, info: RequestInfo
) -> PreparedBody:
    """Return the body as bytes if it arrived in one message, else as a stream. Count `info.bytes_in`.

    Raises `MalformedRequest`, `BodyTooLarge` or `ClientDisconnect`, for a stream while it is read.
    """
    if message["type"] == "http.disconnect":
        raise ClientDisconnect
    length = headers.content_length
    data: bytes = message.get("body", b"")
    if message.get("more_body", False):
        stream = stream_limited_body(message, receive, limit, info)
        return PreparedBody(headers.forwarded, stream, limit if length is None else length, data)
    if length is not None and len(data) != length:
        raise MalformedRequest(
            f"the body has {len(data)} bytes, but its Content-Length is {length}"
        )
    if len(data) > limit:
        raise BodyTooLarge(limit)
    info.bytes_in = len(data)
    forwarded = headers.forwarded
    if length is None:
        forwarded = [header for header in forwarded if header[0] != b"transfer-encoding"]
        forwarded.append((b"content-length", b"%d" % len(data)))
    return PreparedBody(forwarded, data, len(data), data)


def count_buffered_bytes(headers: RequestHeaders, action: Forwarding) -> int:
    """Return how much of a body is received first: a small one, or the JSON that can name a sequence."""
    length = headers.content_length
    if length is not None and length <= MAX_SMALL_BODY_BYTES:
        return length
    if not action.json_rules.has_tensors or headers.step is not None:
        return 0
    json_bytes = length if headers.json_bytes is None else headers.json_bytes
    if json_bytes is None:
        return MAX_SEQUENCE_JSON_BYTES
    return json_bytes if json_bytes <= MAX_SEQUENCE_JSON_BYTES else 0


async def buffer_body(message: Message, receive: Receive, needed_bytes: int) -> Message:
    """Return a message with at least so many bytes of the body, or all of it.

    A client that sends a small body slowly must not hold a slot or a connection to Triton.
    """
    pieces: list[bytes] = []
    while message["type"] == "http.request":
        pieces.append(message.get("body", b""))
        needed_bytes -= len(pieces[-1])
        has_more = message.get("more_body", False)
        if not has_more or needed_bytes <= 0:
            return {"type": "http.request", "body": b"".join(pieces), "more_body": has_more}
        message = await receive()
    raise ClientDisconnect


async def stream_limited_body(
    message: Message, receive: Receive, limit: int, info: RequestInfo
) -> AsyncIterator[bytes]:
    while message["type"] != "http.disconnect":
        data: bytes = message.get("body", b"")
        info.bytes_in += len(data)
        if info.bytes_in > limit:
            raise BodyTooLarge(limit)
        yield data
        if not message.get("more_body", False):
            return
        message = await receive()
    raise ClientDisconnect


# Triton leaks the memory of a compressed body that it rejects and inflates without a limit, so that
# compressed bodies are inflated here.


async def inflate_body(
    prepared: PreparedBody, encoding: str, *, limit: int, charge: MemoryCharge
) -> PreparedBody:
    """Return the inflated body; charge a body that is not streamed.

    Raises `MemoryBudgetExceeded`, and `BodyTooLarge` or `MalformedRequest`, for a stream while it is read.
    """
    content = prepared.content
    chunks = iterate_once(content) if isinstance(content, bytes) else content
    pieces = limit_length(inflate_chunks(chunks, ZLIB_WBITS[encoding]), limit)
    headers = [header for header in prepared.headers if header[0] not in BODY_FRAMING_HEADERS]
    if isinstance(content, bytes):
        buffered: list[bytes] = []
        remaining_bytes = MAX_BUFFERED_BYTES
        async for piece in pieces:
            buffered.append(piece)
            remaining_bytes -= len(piece)
            if remaining_bytes < 0:
                break
        else:
            data = b"".join(buffered)
            charge.add(len(data))
            headers.append((b"content-length", b"%d" % len(data)))
            return PreparedBody(headers, data, len(data), data)
        pieces = prepend_chunks(buffered, pieces)
    headers.append((b"transfer-encoding", b"chunked"))
    return PreparedBody(headers, pieces, limit, b"")


async def prepend_chunks(
    first_chunks: Iterable[bytes], remaining_chunks: AsyncIterator[bytes]
) -> AsyncIterator[bytes]:
    for piece in first_chunks:
        yield piece
    async for piece in remaining_chunks:
        yield piece


# Validation of the JSON.


def find_sequence_step(body: bytes, json_bytes: int | None) -> SequenceStep | None:
    """Return the sequence step in the JSON of an inference, or None if it is absent or incomplete.

    Triton reports invalid steps.
    """
    if body.find(SEQUENCE_ID_KEY, 0, json_bytes) < 0:
        return None
    text = memoryview(body)[:json_bytes]
    if len(text) > MAX_SEQUENCE_JSON_BYTES:
        return None
    try:
        document = orjson.loads(text)
        return parse_sequence_parameters(document["parameters"])
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError, InputMismatch):
        return None


def is_longer_than_searched(prepared: PreparedBody, json_bytes: int | None) -> bool:
    searched_bytes = min(len(prepared.beginning), MAX_SEQUENCE_JSON_BYTES)
    return (prepared.max_bytes if json_bytes is None else json_bytes) > searched_bytes


async def guard_body(
    prepared: PreparedBody,
    rules: JsonRules,
    json_bytes: int | None,
    *,
    load_signature: Callable[[], Awaitable[Signature]],
    turn: asyncio.Lock,
    searches_sequence: bool,
) -> PreparedBody:
    """Return the body, of which every byte is validated before Triton receives it.

    If `searches_sequence`, a sequence behind the JSON that `find_sequence_step` has searched is refused.

    Raises `InputMismatch` or `MalformedRequest`, for a stream while it is read.
    """
    content = prepared.content
    if isinstance(content, bytes) and len(content) <= GUARD_CHUNK_BYTES:
        has_classification = check_complete_json(content, json_bytes, rules)
    else:
        refuses_sequence = searches_sequence and is_longer_than_searched(prepared, json_bytes)
        guard = JsonGuard(prepared.max_bytes, json_bytes, rules, refuses_sequence=refuses_sequence)
        if not isinstance(content, bytes):
            chunks = guard_chunks(content, guard, load_signature, turn)
            return replace(prepared, content=chunks)
        with measure_phase("decode"):
            await guard_chunk(content, guard, turn)
        guard.finish()
        has_classification = guard.has_classification
    if has_classification:
        check_class_outputs(await load_signature(), find_class_outputs(content[:json_bytes]))
    return prepared


async def guard_chunks(
    body: AsyncIterator[bytes],
    guard: JsonGuard,
    load_signature: Callable[[], Awaitable[Signature]],
    turn: asyncio.Lock,
) -> AsyncIterator[bytes]:
    checked = False
    async for data in body:
        await guard_chunk(data, guard, turn)
        if guard.has_classification and not checked:
            checked = True
            # The output names may follow later in the stream, so that all outputs are checked.
            check_class_outputs(await load_signature(), None)
        yield data
    guard.finish()


async def guard_chunk(data: bytes, guard: JsonGuard, turn: asyncio.Lock) -> None:
    """Check a chunk in pieces. Large bodies share a turn, so that others run between any two pieces."""
    for start in range(0, len(data), GUARD_CHUNK_BYTES):
        if guard.is_past_json:
            guard.skip(len(data) - start)
            return
        async with turn:
            guard.feed(data[start : start + GUARD_CHUNK_BYTES])
            await asyncio.sleep(0)


def check_class_outputs(signature: Signature, output_names: list[str] | None) -> None:
    names = list(signature.outputs) if output_names is None else output_names
    if names:
        find_outputs_without_classes(signature, names)


def find_class_outputs(body: bytes) -> list[str] | None:
    """Return the outputs with a classification; None if the JSON is ambiguous or too large to parse."""
    if len(body) > MAX_PARSED_BYTES:
        return None
    try:
        outputs = json.loads(body, object_pairs_hook=reject_duplicate_keys)["outputs"]
        return [each["name"] for each in outputs if "classification" in each.get("parameters", {})]
    except KeyError:
        return []  # the request does not name outputs
    except (ValueError, RecursionError, TypeError, AttributeError):
        return None


def reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) < len(pairs):
        raise ValueError("duplicate key")
    return document
