"""Filtering, validation and parsing of the headers of pass-through requests and responses. Does no I/O."""

from __future__ import annotations

import re
from collections.abc import Set
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Final

from starlette.types import Scope

from gateway.access.auth import KEY_HEADERS
from gateway.capacity.body_chunks import ZLIB_WBITS
from gateway.errors import GatewayError, HeaderTooLarge, MalformedRequest, UnsupportedEncoding
from gateway.http_client.response import Headers
from gateway.messages import quote_text
from gateway.triton.sequence import SequenceStep, parse_sequence_headers

# RFC 9110, section 7.6.1.
HOP_BY_HOP: Final = frozenset(
    b"connection keep-alive proxy-connection proxy-authenticate proxy-authorization te trailer "
    b"upgrade".split()
)
# Headers for the gateway itself.
GATEWAY_HEADERS: Final = KEY_HEADERS | frozenset(
    b"host expect x-request-timeout x-sequence-id x-sequence".split()
)
# Names of Triton's own parameters. If Triton converts headers to parameters (--http-header-forward-pattern),
# versions up to 2.68 interpret these headers, and later ones reject the request. Browsers send "priority".
RESERVED_PARAMETERS: Final = frozenset(
    b"sequence_id sequence_start sequence_end priority timeout headers binary_data_output "
    b"triton_enable_empty_final_response".split()
)
NOT_FORWARDED: Final = HOP_BY_HOP | GATEWAY_HEADERS | RESERVED_PARAMETERS
SEQUENCE_HEADERS: Final = (b"x-sequence-id", b"x-sequence")
CONTROL_HEADERS: Final = frozenset(
    (b"connection", b"expect", b"x-request-timeout", *SEQUENCE_HEADERS)
)
JSON_LENGTH_HEADER: Final = b"inference-header-content-length"
BODY_HEADERS: Final = frozenset((b"content-encoding", JSON_LENGTH_HEADER))
# Triton reads these headers, and crashes on some values.
CHECKED_HEADERS: Final = BODY_HEADERS | {b"content-type", b"accept-encoding"}
# `Connection` must not remove these: Triton would read another body than the gateway does.
PROTECTED_HEADERS: Final = frozenset((b"content-length", b"transfer-encoding")) | BODY_HEADERS

# Headers that the gateway sets itself, and those that affect its whole origin in a browser.
NOT_RELAYED: Final = HOP_BY_HOP | frozenset(
    b"transfer-encoding x-request-id x-content-type-options set-cookie set-cookie2 location refresh "
    b"clear-site-data strict-transport-security alt-svc nel report-to reporting-endpoints "
    b"service-worker-allowed access-control-allow-origin access-control-allow-credentials "
    b"access-control-allow-headers access-control-allow-methods access-control-allow-private-network "
    b"access-control-expose-headers access-control-max-age".split()
)

# Triton closes the connection of a request with a longer name or value, which looks like its own fault.
MAX_FIELD_BYTES: Final = 8191
KEEP_ALIVE_TOKENS: Final = [b"keep-alive"]
NO_HEADERS: Final[Headers] = []
MAX_BODY_SIZE_DIGITS: Final = 10
QVALUE: Final = re.compile(rb"0(?:\.[0-9]{0,3})?|1(?:\.0{0,3})?")  # RFC 9110, section 12.4.2
RESPONSE_ENCODINGS: Final = frozenset((b"gzip", b"deflate", b"identity"))  # supported by Triton


@dataclass(frozen=True, slots=True)
class RequestHeaders:
    """The headers for Triton, and the values of the headers that concern the gateway."""

    forwarded: Headers
    content_length: int | None
    requested_timeout: str | None = None
    content_encoding: str = ""
    json_bytes: int | None = None  # size of the JSON before binary data; None if all of it is JSON
    step: SequenceStep | None = None
    expects_continue: bool = False  # the client has not sent the body yet


class FieldTooLarge(GatewayError):
    status = HeaderTooLarge.status
    code = HeaderTooLarge.code
    message = (
        f"a header has more than {MAX_FIELD_BYTES} bytes, and Triton accepts no more; send a shorter one, or "
        "leave it out"
    )


def prepare_headers(not_forwarded: Set[bytes], scope: Scope) -> RequestHeaders:
    """Filter and check the headers. Raises `MalformedRequest`, `FieldTooLarge` or `UnsupportedEncoding`."""
    forwarded: Headers = []
    special: Headers = NO_HEADERS
    length: int | None = None
    for header in scope["headers"]:
        name = header[0]
        if name == b"content-length":
            length = int(header[1])
        elif name in not_forwarded:
            if name in CONTROL_HEADERS:
                special = [*special, header]
            continue
        elif name in CHECKED_HEADERS:
            if name in BODY_HEADERS:
                special = [*special, header]
            elif (value := sanitize_header(name, header[1])) != header[1]:
                if value:
                    forwarded.append((name, value))
                continue
        forwarded.append(header)
    check_field_sizes(forwarded)
    if not special:
        return RequestHeaders(forwarded, length)
    return parse_control_headers(drop_connection_headers(forwarded, special), special, length)


def check_field_sizes(headers: Headers) -> None:
    if max(map(len, chain.from_iterable(headers)), default=0) > MAX_FIELD_BYTES:
        raise FieldTooLarge


# Triton reads the size of the JSON only where binary tensors can follow it. Its Python client writes this
# header of an inference into the caller's dictionary, and sends it with all that uses the dictionary later.
prepare_infer_headers: Final = partial(prepare_headers, NOT_FORWARDED)
prepare_request_headers: Final = partial(prepare_headers, NOT_FORWARDED | {JSON_LENGTH_HEADER})


def drop_connection_headers(headers: Headers, control_headers: Headers) -> Headers:
    named = [
        token.strip().lower()
        for name, value in control_headers
        if name == b"connection"
        for token in value.split(b",")
    ]
    if not named or named == KEEP_ALIVE_TOKENS:
        return headers
    dropped = set(named) - PROTECTED_HEADERS
    return [header for header in headers if header[0] not in dropped]


def parse_control_headers(
    forwarded: Headers, control_headers: Headers, content_length: int | None
) -> RequestHeaders:
    values = {name: value.decode("latin-1") for name, value in control_headers}
    step = None
    if not values.keys().isdisjoint(SEQUENCE_HEADERS):
        step = parse_sequence_headers(*map(values.get, SEQUENCE_HEADERS))
    body_headers = [name for name, _ in control_headers if name in BODY_HEADERS]
    if len(set(body_headers)) < len(body_headers):
        raise MalformedRequest(f"the request has more than one {body_headers[-1].decode().title()}")
    encoding = parse_content_encoding(values.get(b"content-encoding", ""))
    if not encoding and b"content-encoding" in values:  # empty or identity, which Triton lacks
        forwarded = [header for header in forwarded if header[0] != b"content-encoding"]
    return RequestHeaders(
        forwarded,
        content_length,
        requested_timeout=values.get(b"x-request-timeout"),
        content_encoding=encoding,
        json_bytes=parse_json_length(values.get(JSON_LENGTH_HEADER)),
        step=step,
        expects_continue=b"expect" in values,
    )


def parse_content_encoding(value: str) -> str:
    """Return the compression of the body, or "". Raises `UnsupportedEncoding`."""
    encoding = value.strip().lower()
    if encoding in ("", "identity"):
        return ""
    if encoding not in ZLIB_WBITS:
        raise UnsupportedEncoding(encoding)
    return encoding


def parse_json_length(value: str | None) -> int | None:
    if value is None:
        return None
    if not (value.isascii() and value.isdigit()):
        raise header_length_error(value, "only digits are allowed")
    if len(value) > MAX_BODY_SIZE_DIGITS:
        raise header_length_error(value, "the number is too large")
    return int(value)


def header_length_error(value: str, reason: str) -> MalformedRequest:
    # Triton up to 2.69 accepts "100abc" as 100; 2.70 and 2.71 crash on values above 2³¹.
    return MalformedRequest(
        f"Inference-Header-Content-Length {quote_text(value)} is not a valid inference header size: {reason}"
    )


def sanitize_header(name: bytes, value: bytes) -> bytes:
    """Return a value that does not crash Triton, or an empty one if the header must be removed.

    With the type `application/x-www-form-urlencoded` (curl's default), a body of about 4 MB overflows
    Triton's stack. A weight in Accept-Encoding that is too large for a C++ double (1e999) crashes 2.51.
    """
    if name == b"content-type":
        return b"" if b"urlencoded" in value.lower() else value
    return value if b";" not in value else normalize_accept_encoding(value)


def normalize_accept_encoding(accept_encoding: bytes) -> bytes:
    members = []
    for member in accept_encoding.split(b","):
        name, *parameters = (part.strip(b" \t").lower() for part in member.split(b";"))
        weights = [part[2:] for part in parameters if part.startswith(b"q=")] or [b"1"]
        if name in RESPONSE_ENCODINGS and QVALUE.fullmatch(weights[0]):
            members.append(b"%b;q=%b" % (name, weights[0]))
    return b",".join(members)


def filter_response_headers(headers: Headers) -> Headers:
    relayed = [header for header in headers if header[0] not in NOT_RELAYED]
    if len(relayed) < len(headers):
        relayed = drop_connection_headers(relayed, headers)
    return relayed
