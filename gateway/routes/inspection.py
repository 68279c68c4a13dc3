"""The body of a request that passes through, as Triton gets it: read, inflated, in sizeable pieces, screened.

Triton has nothing to do before a body is whole, so holding a small piece back delays nothing. Many small
ones end it: it keeps a buffer for each, and a list of them on its stack.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any, Final

from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive

from gateway.context import Notes
from gateway.errors import BodyTooLarge, Malformed
from gateway.routes.bodies import WINDOWS, inflated
from gateway.tensors.signature import Signature
from gateway.triton.infer import without_classes
from gateway.triton.screening import PIECE_BYTES, JsonScreening
from gateway.triton.wire import Headers

Body = bytes | AsyncIterator[bytes]

LEAST_PIECE_BYTES: Final = 32 * 1024
# A body that inflates to no more is sent whole, and may then go to a second replica.
WHOLE_BYTES: Final = 1 << 20
# Of the JSON that is parsed to see of which outputs classes are wanted.
MOST_PARSED_BYTES: Final = 64 * 1024
FRAMING_OF_BODY: Final = frozenset((b"content-length", b"transfer-encoding", b"content-encoding"))


async def gathered(message: Message, receive: Receive) -> Message:
    """A small body whole: one that trickles is to hold neither a place nor a connection to Triton."""
    pieces: list[bytes] = []
    while message["type"] == "http.request":
        pieces.append(message.get("body", b""))
        if not message.get("more_body", False):
            return {"type": "http.request", "body": b"".join(pieces)}
        message = await receive()
    raise ClientDisconnect


def body_of(
    message: Message,
    receive: Receive,
    headers: Headers,
    length: int | None,
    limit: int,
    notes: Notes,
) -> Body:
    """The body whole when it came at once, else as it comes; `notes` count its bytes."""
    if message["type"] == "http.disconnect":
        raise ClientDisconnect
    first: bytes = message.get("body", b"")
    if message.get("more_body", False):
        return streamed(first, receive, limit, notes)
    if length is not None and len(first) != length:
        raise Malformed(f"the body has {len(first)} bytes, and its Content-Length says {length}")
    if length is None:
        headers[:] = [header for header in headers if header[0] != b"transfer-encoding"]
        headers.append((b"content-length", b"%d" % len(first)))
    if len(first) > limit:
        raise BodyTooLarge(limit)
    notes.bytes_in = len(first)
    return first


async def streamed(
    first: bytes, receive: Receive, limit: int, notes: Notes
) -> AsyncIterator[bytes]:
    notes.bytes_in = len(first)
    yield first
    more = True
    while more:
        message: Message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        data: bytes = message.get("body", b"")
        notes.bytes_in += len(data)
        if notes.bytes_in > limit:
            raise BodyTooLarge(limit)
        more = message.get("more_body", False)
        yield data


async def in_large_pieces(body: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The same bytes, in pieces of `LEAST_PIECE_BYTES` or more but for the last."""
    small: list[bytes] = []
    size = 0
    async for data in body:
        small.append(data)
        size += len(data)
        if size >= LEAST_PIECE_BYTES:
            yield b"".join(small) if len(small) > 1 else data
            small.clear()
            size = 0
    if size:
        yield b"".join(small)


# Compression: Triton keeps the memory of a compressed body that it refuses, and inflates without a limit.


async def plain(body: Body, encoding: str, limit: int, headers: Headers) -> Body:
    """The body inflated, with the headers that frame it then. Raises `BodyTooLarge` or `Malformed`."""
    chunks = once(body) if isinstance(body, bytes) else body
    pieces = limited(inflated(chunks, WINDOWS[encoding]), limit)
    headers[:] = [header for header in headers if header[0] not in FRAMING_OF_BODY]
    if isinstance(body, bytes):
        begun: list[bytes] = []
        left = WHOLE_BYTES
        async for piece in pieces:
            begun.append(piece)
            left -= len(piece)
            if left < 0:
                break
        else:
            body = b"".join(begun)
            headers.append((b"content-length", b"%d" % len(body)))
            return body
        pieces = continued(begun, pieces)
    headers.append((b"transfer-encoding", b"chunked"))
    return pieces


async def once(body: bytes) -> AsyncIterator[bytes]:
    yield body


async def limited(pieces: AsyncIterator[bytes], limit: int) -> AsyncIterator[bytes]:
    length = 0
    async for piece in pieces:
        length += len(piece)
        if length > limit:
            raise BodyTooLarge(limit)
        yield piece


async def continued(begun: Iterable[bytes], rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    for piece in begun:
        yield piece
    async for piece in rest:
        yield piece


# Screening.


async def screened(
    body: Body, screening: JsonScreening, signature: Callable[[], Awaitable[Signature]]
) -> Body:
    """The body, of which Triton gets no byte that has not been screened.

    Raises `DoesNotFit` or `Malformed`, where it is streamed as it is read.
    """
    if not isinstance(body, bytes):
        return screened_pieces(body, screening, signature)
    await screen(body, screening)
    screening.end()
    if screening.asks_for_classes:
        check_classes(await signature(), outputs_with_classes(body[: screening.json_bytes]))
    return body


async def screened_pieces(
    body: AsyncIterator[bytes],
    screening: JsonScreening,
    signature: Callable[[], Awaitable[Signature]],
) -> AsyncIterator[bytes]:
    """Of which outputs classes are wanted is not known before the end: none may be one that has none."""
    checked = False
    async for data in body:
        await screen(data, screening)
        if screening.asks_for_classes and not checked:
            checked = True
            check_classes(await signature(), None)
        yield data
    screening.end()


async def screen(data: bytes, screening: JsonScreening) -> None:
    """Screen a piece of any size; others run in between."""
    if len(data) <= PIECE_BYTES:
        screening.feed(data)
        return
    for start in range(0, len(data), PIECE_BYTES):
        if screening.is_past_json:
            screening.skip(len(data) - start)
            return
        screening.feed(data[start : start + PIECE_BYTES])
        await asyncio.sleep(0)


def check_classes(model: Signature, named: list[str] | None) -> None:
    """Of any output, where it cannot be said of which. Raises `DoesNotFit`."""
    names = list(model.outputs) if named is None else named
    if names:
        without_classes(model, names)


def outputs_with_classes(body: bytes) -> list[str] | None:
    """The outputs of which the JSON of an inference wants classes; None where it can be read in two ways."""
    if len(body) > MOST_PARSED_BYTES:
        return None
    try:
        outputs = json.loads(body, object_pairs_hook=unambiguous)["outputs"]
        return [each["name"] for each in outputs if "classification" in each.get("parameters", {})]
    except KeyError:
        return []  # it names no outputs
    except (ValueError, RecursionError, TypeError, AttributeError):
        return None


def unambiguous(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key stands twice")
    return found
