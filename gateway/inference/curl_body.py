"""Bodies with the Content-Type that `curl -d` sends by default, `application/x-www-form-urlencoded`.

Hardly anybody means a form by it: such a body is JSON if it begins as JSON does, and otherwise a text, for a
model that takes one.
"""

from __future__ import annotations

import re
from typing import Final

from gateway.errors import CURL_DEFAULT_TYPE, GatewayError, UnsupportedBody
from gateway.inference.body import RequestBody
from gateway.media_types import JSON, OCTET_STREAM
from gateway.tensors.codecs import CODECS_BY_TYPE
from gateway.tensors.payload import Payload

UNCOMPRESSED: Final = (b"", b"identity")
JSON_BEGINNINGS: Final = (b"{", b"[")
FORM_FIELD: Final = re.compile(rb"[\w.\[\]-]+=")
# A longer body is a form if its beginning is one.
MAX_FORM_CHECK_BYTES: Final = 64 << 10


class FormNotSupported(GatewayError):
    status = UnsupportedBody.status
    code = UnsupportedBody.code
    message = (
        "the body is the fields of a form, as curl -d sends them; send each field with -F NAME=VALUE, or a "
        "text with -H 'Content-Type: text/plain'"
    )


def has_curl_default_type(content_type: str) -> bool:
    return content_type.startswith(CURL_DEFAULT_TYPE)


def begins_as_json(beginning: bytes) -> bool:
    return beginning.lstrip()[:1] in JSON_BEGINNINGS


async def recognize_curl_body(body: RequestBody, *, takes_text: bool) -> None:
    """Give the body the type that it is of. Raises `UnsupportedBody` if the model takes no text."""
    if body.headers.get(b"content-encoding", b"") in UNCOMPRESSED:
        if begins_as_json(await body.peek()):
            body.content_type = JSON
            return
        if takes_text:
            body.content_type = OCTET_STREAM
            return
    raise UnsupportedBody(CURL_DEFAULT_TYPE, CODECS_BY_TYPE)


def check_for_form(text: Payload) -> None:
    """Check that some piece of the text is not NAME=VALUE. Raises `FormNotSupported`."""
    for (part,) in text.parts.values():
        pieces = part.value[:MAX_FORM_CHECK_BYTES].split(b"&")
        if len(part.value) > MAX_FORM_CHECK_BYTES and len(pieces) > 1:
            pieces.pop()
        if all(map(FORM_FIELD.match, pieces)):
            raise FormNotSupported
