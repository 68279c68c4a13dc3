"""The headers of what passes: those of a request for Triton and what they say, those of an answer. Pure."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from gateway.errors import MalformedRequest, UnsupportedEncoding
from gateway.messages import quote_text
from gateway.routes.request_body import ZLIB_WBITS
from gateway.tensors.sequence import SequenceStep, parse_sequence_headers
from gateway.triton.http.connection import Headers

# RFC 9110, section 7.6.1.
HOP_BY_HOP: Final = frozenset(
    b"connection keep-alive proxy-connection proxy-authenticate proxy-authorization te trailer "
    b"upgrade".split()
)
# The gateway's own business.
GATEWAY_HEADERS: Final = frozenset(
    b"host expect authorization x-api-key x-request-timeout x-sequence-id x-sequence".split()
)
# Parameters of Triton's own. Where it makes parameters of headers (--http-header-forward-pattern), Triton
# up to 2.68 takes such a header for its own, and later ones refuse the request; browsers send "priority".
RESERVED_PARAMETERS: Final = frozenset(
    b"sequence_id sequence_start sequence_end priority timeout headers binary_data_output "
    b"triton_enable_empty_final_response".split()
)
NOT_FORWARDED: Final = HOP_BY_HOP | GATEWAY_HEADERS | RESERVED_PARAMETERS
SEQUENCE_HEADERS: Final = (b"x-sequence-id", b"x-sequence")
CONTROL_HEADERS: Final = frozenset((b"connection", b"x-request-timeout", *SEQUENCE_HEADERS))
BODY_HEADERS: Final = frozenset((b"content-encoding", b"inference-header-content-length"))
# What Triton reads, and dies of some values of.
CHECKED_HEADERS: Final = BODY_HEADERS | {b"content-type", b"accept-encoding"}
# A `Connection` that names these would cut the body loose, or have Triton read another one than we do.
PROTECTED_HEADERS: Final = frozenset((b"content-length", b"transfer-encoding")) | BODY_HEADERS

# What the gateway adds itself, and what would change the gateway's whole origin in a browser.
NOT_RELAYED: Final = HOP_BY_HOP | frozenset(
    b"transfer-encoding x-request-id x-content-type-options set-cookie set-cookie2 location refresh "
    b"clear-site-data strict-transport-security alt-svc nel report-to reporting-endpoints "
    b"service-worker-allowed access-control-allow-origin access-control-allow-credentials "
    b"access-control-allow-headers access-control-allow-methods access-control-allow-private-network "
    b"access-control-expose-headers access-control-max-age".split()
)
NOSNIFF_HEADER: Final = (b"x-content-type-options", b"nosniff")

KEEP_ALIVE_TOKENS: Final = [b"keep-alive"]
NO_HEADERS: Final[Headers] = []
NO_SEQUENCE_HEADERS: Final[dict[bytes, str]] = {}
MAX_BODY_SIZE_DIGITS: Final = 10  # of a number of bytes
QVALUE: Final = re.compile(rb"0(?:\.[0-9]{0,3})?|1(?:\.0{0,3})?")  # RFC 9110, section 12.4.2
RESPONSE_ENCODINGS: Final = frozenset(
    (b"gzip", b"deflate", b"identity")
)  # that Triton has for its answers


class ParsedHeaders(NamedTuple):
    """What the headers of a request say."""

    requested_timeout: str | None  # that the client asks for
    content_length: int | None  # of the body
    content_encoding: str = ""  # of the body
    json_bytes: int | None = (
        None  # of the body, before what is binary; None where all of it is JSON
    )
    step: SequenceStep | None = None  # of a sequence


def prepare_request_headers(headers: Headers) -> tuple[Headers, ParsedHeaders]:
    """The headers for Triton, and what they say. Raises `Malformed` or `UnsupportedEncoding`."""
    kept: Headers = []
    special: Headers = NO_HEADERS
    length: int | None = None
    for header in headers:
        name = header[0]
        if name == b"content-length":
            length = int(header[1])
        elif name in NOT_FORWARDED:
            if name in CONTROL_HEADERS:
                special = [*special, header]
            continue
        elif name in CHECKED_HEADERS:
            if name in BODY_HEADERS:
                special = [*special, header]
            elif (value := sanitize_header(name, header[1])) != header[1]:
                if value:
                    kept.append((name, value))
                continue
        kept.append(header)
    if not special:
        return kept, ParsedHeaders(None, length)
    return drop_connection_headers(kept, special), parse_control_headers(special, length)


def drop_connection_headers(kept: Headers, control_headers: Headers) -> Headers:
    """The headers but those that a `Connection` names."""
    named = [
        token.strip().lower()
        for name, value in control_headers
        if name == b"connection"
        for token in value.split(b",")
    ]
    if not named or named == KEEP_ALIVE_TOKENS:
        return kept
    dropped = set(named) - PROTECTED_HEADERS
    return [header for header in kept if header[0] not in dropped]


def parse_control_headers(control_headers: Headers, content_length: int | None) -> ParsedHeaders:
    timeout: str | None = None
    sequence: dict[bytes, str] = NO_SEQUENCE_HEADERS
    described: Headers = NO_HEADERS
    for name, value in control_headers:
        if name == b"x-request-timeout":
            timeout = value.decode("latin-1")
        elif name in SEQUENCE_HEADERS:
            sequence = {**sequence, name: value.decode("latin-1")}
        elif name in BODY_HEADERS:
            described = [*described, (name, value)]
    step = parse_sequence_headers(*map(sequence.get, SEQUENCE_HEADERS)) if sequence else None
    encoding, json_bytes = parse_body_headers(described) if described else ("", None)
    return ParsedHeaders(timeout, content_length, encoding, json_bytes, step)


def parse_body_headers(headers: Headers) -> tuple[str, int | None]:
    """How the body is compressed, and how much of it is JSON. Raises `Malformed` or `UnsupportedEncoding`."""
    found = dict(headers)
    if len(found) < len(headers):
        raise MalformedRequest(f"the request has more than one {headers[-1][0].decode().title()}")
    encoding = found.get(b"content-encoding", b"").decode("latin-1").strip().lower()
    if encoding not in ("", "identity", *ZLIB_WBITS):
        raise UnsupportedEncoding(encoding)
    json_bytes = found.get(b"inference-header-content-length")
    if json_bytes is None:
        return encoding, None
    value = json_bytes.decode("latin-1")
    if not json_bytes.isdigit():
        raise header_length_error(value, "only digits are allowed")
    if len(json_bytes) > MAX_BODY_SIZE_DIGITS:
        raise header_length_error(value, "it is larger than any body")
    return encoding, int(json_bytes)


def header_length_error(value: str, reason: str) -> MalformedRequest:
    """The error for a length of the JSON that Triton up to 2.69 reads as another one ("100abc"), and that
    2.70 and 2.71 die of (above 2³¹)."""
    return MalformedRequest(
        f"Inference-Header-Content-Length {quote_text(value)} is not a valid inference header size: {reason}"
    )


def sanitize_header(name: bytes, value: bytes) -> bytes:
    """A header's value such as no Triton dies of; empty where nothing of it is left.

    A form's type (`application/x-www-form-urlencoded`, curl's default) ends Triton on its stack when the
    body has some 4 MB, and a weight of Accept-Encoding that is too large for C++ (1e999) ends 2.51.
    """
    if name == b"content-type":
        return b"" if b"urlencoded" in value.lower() else value
    return value if b";" not in value else normalize_accept_encoding(value)


def normalize_accept_encoding(accept_encoding: bytes) -> bytes:
    """The compressions that Triton knows among these, with weights as RFC 9110 writes them."""
    members = []
    for member in accept_encoding.split(b","):
        name, *parameters = (part.strip(b" \t").lower() for part in member.split(b";"))
        weights = [part[2:] for part in parameters if part.startswith(b"q=")] or [b"1"]
        if name in RESPONSE_ENCODINGS and QVALUE.fullmatch(weights[0]):
            members.append(b"%b;q=%b" % (name, weights[0]))
    return b",".join(members)


def filter_response_headers(headers: Headers) -> Headers:
    """An answer's headers, without what concerns the replica's connection, or a browser's view of us."""
    kept = [header for header in headers if header[0] not in NOT_RELAYED]
    if len(kept) < len(headers):
        kept = drop_connection_headers(kept, headers)
    kept.append(NOSNIFF_HEADER)
    return kept
