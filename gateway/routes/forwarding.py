"""The headers of what passes: those of a request for Triton and what they say, those of an answer. Pure."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from gateway.errors import Malformed, UnsupportedEncoding
from gateway.routes.bodies import WINDOWS
from gateway.tensors.sequence import Step, from_headers
from gateway.triton.wire import Headers
from gateway.words import quoted

# RFC 9110, section 7.6.1.
HOP_BY_HOP: Final = frozenset(
    b"connection keep-alive proxy-connection proxy-authenticate proxy-authorization te trailer "
    b"upgrade".split()
)
# The gateway's own business.
OWN: Final = frozenset(
    b"host expect authorization x-api-key x-request-timeout x-sequence-id x-sequence".split()
)
# Parameters of Triton's own. Where it makes parameters of headers (--http-header-forward-pattern), Triton
# up to 2.68 takes such a header for its own, and later ones refuse the request; browsers send "priority".
RESERVED_PARAMETERS: Final = frozenset(
    b"sequence_id sequence_start sequence_end priority timeout headers binary_data_output "
    b"triton_enable_empty_final_response".split()
)
NOT_SENT_ON: Final = HOP_BY_HOP | OWN | RESERVED_PARAMETERS
OF_A_SEQUENCE: Final = (b"x-sequence-id", b"x-sequence")
SAYING: Final = frozenset((b"connection", b"x-request-timeout", *OF_A_SEQUENCE))
OF_THE_BODY: Final = frozenset((b"content-encoding", b"inference-header-content-length"))
# What Triton reads, and dies of some values of.
CHECKED: Final = OF_THE_BODY | {b"content-type", b"accept-encoding"}
# A `Connection` that names these would cut the body loose, or have Triton read another one than we do.
FRAMING: Final = frozenset((b"content-length", b"transfer-encoding")) | OF_THE_BODY

# What the gateway adds itself, and what would change the gateway's whole origin in a browser.
NOT_RELAYED: Final = HOP_BY_HOP | frozenset(
    b"transfer-encoding x-request-id x-content-type-options set-cookie set-cookie2 location refresh "
    b"clear-site-data strict-transport-security alt-svc nel report-to reporting-endpoints "
    b"service-worker-allowed access-control-allow-origin access-control-allow-credentials "
    b"access-control-allow-headers access-control-allow-methods access-control-allow-private-network "
    b"access-control-expose-headers access-control-max-age".split()
)
NO_GUESSING: Final = (b"x-content-type-options", b"nosniff")

KEPT_ALIVE: Final = [b"keep-alive"]
NOTHING: Final[Headers] = []
NO_SEQUENCE: Final[dict[bytes, str]] = {}
MOST_DIGITS: Final = 10  # of a number of bytes
WEIGHT: Final = re.compile(rb"0(?:\.[0-9]{0,3})?|1(?:\.0{0,3})?")  # RFC 9110, section 12.4.2
COMPRESSIONS: Final = frozenset(
    (b"gzip", b"deflate", b"identity")
)  # that Triton has for its answers


class Wishes(NamedTuple):
    """What the headers of a request say."""

    timeout: str | None  # that the client asks for
    length: int | None  # of the body
    encoding: str = ""  # of the body
    json_bytes: int | None = (
        None  # of the body, before what is binary; None where all of it is JSON
    )
    step: Step | None = None  # of a sequence


def sent_on(headers: Headers) -> tuple[Headers, Wishes]:
    """The headers for Triton, and what they say. Raises `Malformed` or `UnsupportedEncoding`."""
    kept: Headers = []
    special: Headers = NOTHING
    length: int | None = None
    for header in headers:
        name = header[0]
        if name == b"content-length":
            length = int(header[1])
        elif name in NOT_SENT_ON:
            if name in SAYING:
                special = [*special, header]
            continue
        elif name in CHECKED:
            if name in OF_THE_BODY:
                special = [*special, header]
            elif (value := harmless(name, header[1])) != header[1]:
                if value:
                    kept.append((name, value))
                continue
        kept.append(header)
    if not special:
        return kept, Wishes(None, length)
    return without_connection(kept, special), wishes_in(special, length)


def without_connection(kept: Headers, special: Headers) -> Headers:
    """The headers but those that a `Connection` names."""
    named = [
        token.strip().lower()
        for name, value in special
        if name == b"connection"
        for token in value.split(b",")
    ]
    if not named or named == KEPT_ALIVE:
        return kept
    dropped = set(named) - FRAMING
    return [header for header in kept if header[0] not in dropped]


def wishes_in(special: Headers, length: int | None) -> Wishes:
    timeout: str | None = None
    sequence: dict[bytes, str] = NO_SEQUENCE
    described: Headers = NOTHING
    for name, value in special:
        if name == b"x-request-timeout":
            timeout = value.decode("latin-1")
        elif name in OF_A_SEQUENCE:
            sequence = {**sequence, name: value.decode("latin-1")}
        elif name in OF_THE_BODY:
            described = [*described, (name, value)]
    step = from_headers(*map(sequence.get, OF_A_SEQUENCE)) if sequence else None
    encoding, json_bytes = described_by(described) if described else ("", None)
    return Wishes(timeout, length, encoding, json_bytes, step)


def described_by(headers: Headers) -> tuple[str, int | None]:
    """How the body is compressed, and how much of it is JSON. Raises `Malformed` or `UnsupportedEncoding`."""
    found = dict(headers)
    if len(found) < len(headers):
        raise Malformed(f"the request has more than one {headers[-1][0].decode().title()}")
    encoding = found.get(b"content-encoding", b"").decode("latin-1").strip().lower()
    if encoding not in ("", "identity", *WINDOWS):
        raise UnsupportedEncoding(encoding)
    json_bytes = found.get(b"inference-header-content-length")
    if json_bytes is None:
        return encoding, None
    value = json_bytes.decode("latin-1")
    if not json_bytes.isdigit():
        raise header_length_error(value, "only digits are allowed")
    if len(json_bytes) > MOST_DIGITS:
        raise header_length_error(value, "it is larger than any body")
    return encoding, int(json_bytes)


def header_length_error(value: str, why: str) -> Malformed:
    """The error for a length of the JSON that Triton up to 2.69 reads as another one ("100abc"), and that
    2.70 and 2.71 die of (above 2³¹)."""
    return Malformed(
        f"Inference-Header-Content-Length {quoted(value)} is not a valid inference header size: {why}"
    )


def harmless(name: bytes, value: bytes) -> bytes:
    """A header's value such as no Triton dies of; empty where nothing of it is left.

    A form's type (`application/x-www-form-urlencoded`, curl's default) ends Triton on its stack when the
    body has some 4 MB, and a weight of Accept-Encoding that is too large for C++ (1e999) ends 2.51.
    """
    if name == b"content-type":
        return b"" if b"urlencoded" in value.lower() else value
    return value if b";" not in value else plainly_weighted(value)


def plainly_weighted(accept_encoding: bytes) -> bytes:
    """The compressions that Triton knows among these, with weights as RFC 9110 writes them."""
    members = []
    for member in accept_encoding.split(b","):
        name, *parameters = (part.strip(b" \t").lower() for part in member.split(b";"))
        weights = [part[2:] for part in parameters if part.startswith(b"q=")] or [b"1"]
        if name in COMPRESSIONS and WEIGHT.fullmatch(weights[0]):
            members.append(b"%b;q=%b" % (name, weights[0]))
    return b",".join(members)


def relayed_headers(headers: Headers) -> Headers:
    """An answer's headers, without what concerns the replica's connection, or a browser's view of us."""
    kept = [header for header in headers if header[0] not in NOT_RELAYED]
    if len(kept) < len(headers):
        kept = without_connection(kept, headers)
    kept.append(NO_GUESSING)
    return kept
