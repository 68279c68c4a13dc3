"""The request body types: how each is decoded. A new type is a row of `CODECS`. Pure."""

from __future__ import annotations

import codecs
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from encodings import normalize_encoding
from encodings.aliases import aliases
from functools import lru_cache
from typing import Any, Final

from gateway.errors import MalformedRequest, UnsupportedBody
from gateway.headers import parse_content_type
from gateway.media_types import ANY_IMAGE, JSON, MULTIPART, NPY, NPZ, OCTET_STREAM, TEXT
from gateway.messages import quote_text
from gateway.tensors.json_body import decode_b64_objects, parse_json_body, read_json_payload
from gateway.tensors.npy import read_npy, read_npz
from gateway.tensors.payload import Part, Payload, PayloadLimits

# The charsets in use, by their Python names. Python's other codecs include binary transforms, produce invalid
# Unicode, or cache every unknown name.
SUPPORTED_CODECS: Final = frozenset((
    "ascii", "big5", "cp1250", "cp1251", "cp1252", "euc_jp", "euc_kr", "gb18030", "gbk", "iso8859_15",
    "koi8_r", "latin_1", "shift_jis", "utf_16", "utf_16_be", "utf_16_le", "utf_8", "utf_8_sig",
))  # fmt: skip

# A document that begins with one of these is not plain UTF-8.
BYTE_ORDER_MARKS: Final = (codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
JSON_TYPES: Final = frozenset(("text/json", "text/x-json", "application/x-json"))
JSON_SUFFIX: Final = re.compile(r"application/[^/]+\+json")

ValueReader = Callable[[bytes, Mapping[str, str]], Any]
PayloadReader = Callable[[bytes, PayloadLimits], Payload]


@dataclass(frozen=True)
class Codec:
    """A request body type.

    A body of up to `max_inline_bytes` is decoded on the event loop, up to `max_thread_bytes` in a thread, and
    a larger one in a process that can be killed.
    """

    media_type: str
    read_value: ValueReader | None = None  # reads a body or form field that is one value
    read_payload: PayloadReader | None = None  # reads a body with several named values
    memory_factor: int = 3  # bytes of memory per byte: the body, its tensors, the request to Triton
    max_inline_bytes: float = 16 << 10
    max_thread_bytes: float = math.inf


def read_bytes(body: bytes, parameters: Mapping[str, str]) -> bytes:
    return body


def decode_text(body: bytes, parameters: Mapping[str, str]) -> str:
    charset = parameters.get("charset", "utf-8")
    codec = find_text_codec(charset)
    try:
        return body.decode(codec)
    except UnicodeDecodeError as exc:
        raise MalformedRequest(f"the text is not valid {charset} at byte {exc.start}") from None


@lru_cache(256)
def find_text_codec(charset: str) -> str:
    """Return Python's name for a charset. Raises `MalformedRequest`."""
    codec = normalize_encoding(charset.lower())
    codec = aliases.get(codec, codec)
    if codec not in SUPPORTED_CODECS:
        raise MalformedRequest(f"unknown charset {quote_text(charset)}; send UTF-8")
    return codec


def to_utf8_json(body: bytes, parameters: Mapping[str, str]) -> bytes:
    """Return JSON as UTF-8 without a byte order mark. Raises `MalformedRequest`.

    Programs on Windows write a mark, and a type may have a charset, although JSON is UTF-8 (RFC 8259).
    """
    if body.startswith(BYTE_ORDER_MARKS):
        codec = str(json.detect_encoding(body))
    elif "charset" in parameters:
        codec = find_text_codec(parameters["charset"])
    else:
        return body
    if codec == "utf_8":
        return body
    try:
        return body.decode(codec).encode()
    except UnicodeDecodeError as exc:
        raise MalformedRequest(f"the JSON is not valid {codec} at byte {exc.start}") from None


def read_json_value(body: bytes, parameters: Mapping[str, str]) -> Any:
    return decode_b64_objects(parse_json_body(to_utf8_json(body, parameters)))


def read_npz_payload(body: bytes, limits: PayloadLimits) -> Payload:
    # The inflated size has the same limit as a body.
    arrays = read_npz(body, limits.max_bytes, limits.max_parts)
    return Payload({name: [Part(array, NPY)] for name, array in arrays.items()})


# The decoders of texts and JSON hold the GIL, numbers can be shorter in JSON than as tensors, and archives
# are compressed.
CODECS: Final = (
    Codec(ANY_IMAGE, read_bytes, max_inline_bytes=math.inf),
    Codec(OCTET_STREAM, read_bytes, max_inline_bytes=math.inf),
    Codec(TEXT, decode_text, max_thread_bytes=256 << 10),
    Codec(MULTIPART),  # fed in chunks: see `gateway.tensors.multipart`
    Codec(JSON, read_json_value, read_json_payload, 6, max_thread_bytes=256 << 10),
    # A view of the body.
    Codec(NPY, lambda body, _: read_npy(body), max_inline_bytes=1 << 20),
    Codec(NPZ, None, read_npz_payload, max_inline_bytes=-1, max_thread_bytes=16 << 10),
)
CODECS_BY_TYPE: Final = {codec.media_type: codec for codec in CODECS}
JSON_CODEC: Final = CODECS_BY_TYPE[JSON]
NPY_CODEC: Final = CODECS_BY_TYPE[NPY]
DEFAULT_CODEC: Final = CODECS_BY_TYPE[OCTET_STREAM]


@dataclass(frozen=True)
class BodyType:
    """A parsed content type with its codec, which is None for a type that is not supported."""

    content_type: str
    media_type: str
    parameters: Mapping[str, str]
    codec: Codec | None

    def read_value(self, body: bytes) -> Any:
        """Return the value of a body that is one value. Raises `UnsupportedBody` for other types."""
        codec = self.codec
        if codec is None or codec.read_value is None:
            raise UnsupportedBody(self.content_type, CODECS_BY_TYPE)
        return codec.read_value(body, self.parameters)


@lru_cache(256)
def parse_body_type(content_type: str) -> BodyType:
    """Parse a content type, once for all bodies that have it. Raises `UnsupportedBody` for a long one."""
    media_type, parameters = parse_content_type(content_type)
    codec = CODECS_BY_TYPE.get(media_type)
    if media_type in JSON_TYPES or JSON_SUFFIX.fullmatch(media_type):
        media_type, codec = JSON, JSON_CODEC
    elif codec is None and media_type.startswith("image/"):
        codec = CODECS_BY_TYPE[ANY_IMAGE]
    return BodyType(content_type, media_type, parameters, codec)
