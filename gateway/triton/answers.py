"""Triton's answers over HTTP, read to the end; the connection is given back however that goes."""

from __future__ import annotations

from typing import Final

from gateway.errors import GatewayError
from gateway.triton.complaints import Asked, complaint
from gateway.triton.http import MOST_ANSWER_BYTES, Answer, Reply

MAX_ERROR_BYTES: Final = 1 << 20


async def whole(answer: Answer, most_bytes: int = MOST_ANSWER_BYTES) -> Reply:
    """Raises `AnswerTooLarge`."""
    try:
        return Reply(answer.status, answer.headers, await answer.read(most_bytes))
    finally:
        answer.close()


async def complained(answer: Answer, asked: Asked) -> GatewayError:
    """A complaint as an error of ours."""
    body = bytearray()
    try:
        while len(body) < MAX_ERROR_BYTES and (chunk := await answer.next_chunk()):
            body += chunk
    finally:
        answer.close()
    error = complaint(answer.status, bytes(body), asked)
    error.is_event = answer.is_event_stream
    return error
