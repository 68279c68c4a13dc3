"""Header values with parameters, such as `type; name="value"`, and content negotiation (RFC 9110). Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import Final, NamedTuple

from python_multipart.multipart import parse_options_header

from gateway.errors import MalformedRequest, UnsupportedBody

# The media types in use are much shorter.
MAX_CONTENT_TYPE_CHARS: Final = 1024
# Browsers send about 150 characters.
MAX_ACCEPT_CHARS: Final = 2048


def parse_content_type(content_type: str) -> tuple[str, Mapping[str, str]]:
    """`text/plain; charset=utf-8` → ("text/plain", {"charset": "utf-8"}). Raises `UnsupportedBody`."""
    if len(content_type) > MAX_CONTENT_TYPE_CHARS:
        raise UnsupportedBody(
            content_type, (f"a Content-Type of at most {MAX_CONTENT_TYPE_CHARS} bytes",)
        )
    return parse_header_parameters(content_type)


def parse_header_parameters(header: str) -> tuple[str, dict[str, str]]:
    """Return the value before the first `;` in lower case, and the parameters by name in lower case.

    The last of several parameters with the same name is used.
    """
    value, parameters = parse_options_header(header)
    return value.decode("latin-1"), {
        name.decode("latin-1"): content.decode("latin-1")
        for name, content in parameters.items()
        if name
    }


def decode_header_text(text: str) -> str:
    """Return the text of a header value that is UTF-8, as browsers send it."""
    try:
        return text.encode("latin-1").decode()
    except UnicodeError:
        return text


class MediaRange(NamedTuple):
    """An entry of `Accept` or `Accept-Encoding`."""

    quality: float
    position: int  # an entry that is named earlier has a larger one
    name: str


def parse_accept(accept: str) -> list[MediaRange]:
    """Return the ranges in the order of the header, or `*/*` for an empty one. Raises `MalformedRequest`."""
    if len(accept) > MAX_ACCEPT_CHARS:
        raise MalformedRequest(
            f"the Accept header is longer than {MAX_ACCEPT_CHARS} characters; send fewer media types"
        )
    ranges = []
    for position, entry in enumerate(accept.split(",")):
        name, parameters = parse_header_parameters(entry)
        try:
            quality = float(parameters.get("q", "1"))
        except ValueError:
            quality = 1.0
        if name:
            ranges.append(MediaRange(quality, -position, name))
    return ranges or [MediaRange(1.0, 0, "*/*")]


def list_accepted_types(accept: str) -> list[str]:
    """Return the acceptable media ranges of an `Accept` header, best first."""
    acceptable = (each for each in parse_accept(accept) if each.quality > 0)
    return [each.name for each in sorted(acceptable, reverse=True)]


@lru_cache(256)
def choose_media_type(accept: str, offered: tuple[str, ...]) -> str:
    """Return the offered type that `Accept` prefers, the first one on a tie; empty if it accepts none.

    The most specific range that matches a type decides on it (section 12.5.1).
    """
    ranges = parse_accept(accept)
    ranked = [(rank, name) for name in offered if (rank := rank_media_type(name, ranges))]
    return max(ranked, key=itemgetter(0))[1] if ranked else ""


def rank_media_type(media_type: str, ranges: Sequence[MediaRange]) -> tuple[float, int] | None:
    """Return quality and position of the most specific matching range; None if it is not acceptable."""
    matches = [each for each in ranges if is_in_media_range(each.name, media_type)]
    best = max(matches, key=lambda each: (-each.name.count("*"), each.quality), default=None)
    return best[:2] if best is not None and best.quality > 0 else None


def is_in_media_range(media_range: str, media_type: str) -> bool:
    if media_range in ("*/*", media_type):
        return True
    kind, _, subtype = media_range.partition("/")
    form_kind, _, form_subtype = media_type.partition("/")
    return kind == form_kind and "*" in (subtype, form_subtype)
