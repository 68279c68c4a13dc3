"""The type of a body whose Content-Type says nothing: its bytes decide.

Clients that were written for other servers send no type, or the one of their library.
"""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Final

import orjson

from gateway.errors import CURL_DEFAULT_TYPE, GatewayError, MalformedRequest, UnsupportedBody
from gateway.media_types import JSON, NPZ, OCTET_STREAM
from gateway.tensors.codecs import BYTE_ORDER_MARKS, CODECS_BY_TYPE, parse_body_type, to_utf8_json
from gateway.tensors.images import is_image
from gateway.tensors.npy import NPY_MAGIC
from gateway.tensors.signature import Signature

GENERIC_TYPES: Final = frozenset(
    ("", OCTET_STREAM, "binary/octet-stream", "application/binary", "*/*", CURL_DEFAULT_TYPE)
)
ZIP_SIGNATURE: Final = b"PK\x03\x04"
JSON_BEGINNINGS: Final = (b"{", b"[")
# A longer document is not parsed here: its beginning decides.
MAX_PARSED_BYTES: Final = 16 << 10
MAX_BEGINNING_BYTES: Final = 64 << 10
INPUTS_KEY: Final = re.compile(rb'"inputs"\s*:')
FORM_FIELD: Final = re.compile(rb"[\w.\[\]-]+=")


class FormNotSupported(GatewayError):
    status = UnsupportedBody.status
    code = UnsupportedBody.code
    message = (
        "the body is the fields of a form, as curl -d sends them; send each field with -F NAME=VALUE, or a "
        "text with -H 'Content-Type: text/plain'"
    )


def recognize_body(body: bytes, content_type: str, signature: Signature) -> str:
    """Return the type of a complete body that was sent with a generic one.

    A body for the only BYTES input is its value, unless it is a JSON request.
    Raises `UnsupportedBody` if neither the bytes nor the model say what it is.
    """
    if not body and not content_type:
        raise UnsupportedBody("", CODECS_BY_TYPE)
    if signature.takes_bytes_alone:
        if is_json_request(body):
            return JSON
        check_for_form(body, content_type)
        return OCTET_STREAM
    if body.startswith(ZIP_SIGNATURE):
        return NPZ
    if is_image(body) or body.startswith(NPY_MAGIC):
        return OCTET_STREAM  # such a file is decoded by its first bytes
    if begins_as_json(body):
        return JSON
    check_for_form(body, content_type)
    if (
        signature.accepts_images
        or signature.takes_any_file
        or parse_body_type(content_type).media_type == OCTET_STREAM
    ):
        return OCTET_STREAM
    raise UnsupportedBody(content_type, CODECS_BY_TYPE)


def begins_as_json(body: bytes) -> bool:
    return read_json_beginning(body)[:1] in JSON_BEGINNINGS


def is_json_request(body: bytes) -> bool:
    """Return whether the body is an object with the key `inputs`, or means to be one."""
    beginning = read_json_beginning(body)
    if not beginning.startswith(b"{"):
        return False
    if len(body) <= MAX_PARSED_BYTES:
        try:
            return "inputs" in orjson.loads(beginning)
        except orjson.JSONDecodeError:
            pass  # the error of a request says what is wrong with it
    return INPUTS_KEY.search(beginning) is not None


def read_json_beginning(body: bytes) -> bytes:
    """Return the beginning of what may be JSON, as UTF-8."""
    beginning = body[:MAX_BEGINNING_BYTES]
    if beginning.startswith(BYTE_ORDER_MARKS):
        with suppress(MalformedRequest):  # a text, which is no JSON
            beginning = to_utf8_json(beginning, {})
    return beginning.lstrip()


def check_for_form(body: bytes, content_type: str) -> None:
    """Check that some piece of a body of curl's type is not NAME=VALUE. Raises `FormNotSupported`."""
    if not content_type.startswith(CURL_DEFAULT_TYPE):
        return
    pieces = body[:MAX_BEGINNING_BYTES].split(b"&")
    if len(body) > MAX_BEGINNING_BYTES and len(pieces) > 1:
        pieces.pop()
    if all(map(FORM_FIELD.match, pieces)):
        raise FormNotSupported
