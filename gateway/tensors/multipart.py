"""A parser of multipart/form-data (RFC 7578; RFC 2046, section 5.1) that is fed bytes and returns parts.

Every byte is searched once, at the speed of C. Parts are held in memory, under the limit of the body.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from gateway.errors import Malformed, TooLarge

MAX_BOUNDARY: Final = 256
MAX_HEADER_BYTES: Final = 8 << 10
MAX_HEADER_FIELDS: Final = 16
# Blanks that a delimiter may have after its boundary.
MAX_PADDING: Final = 64
FIELD: Final = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):(.*)", re.DOTALL)
CRLF: Final = b"\r\n"
TAIL: Final = re.compile(b"(?:(--)|[ \t]{0,%d}\r\n)" % MAX_PADDING)


@dataclass(frozen=True)
class RawPart:
    """A part as it came: header values by name in lower case, and the content."""

    headers: Mapping[str, str]
    content: bytearray


class Delimiter(NamedTuple):
    """Where a delimiter begins and ends, and whether it closes the body."""

    start: int
    end: int
    is_last: bool


class MultipartParser:
    """Feed it the body in pieces of any size. `is_complete` tells whether the last delimiter was seen."""

    def __init__(self, boundary: str, max_parts: int) -> None:
        if len(boundary) > MAX_BOUNDARY:
            raise Malformed(
                f"the multipart body's boundary is too long; the limit is {MAX_BOUNDARY} characters"
            )
        dashes = b"\r\n--" + boundary.encode("latin-1")
        self._dashes = dashes
        self._longest_delimiter = len(dashes) + MAX_PADDING + len(CRLF)
        self._max_parts = max_parts
        self._count = 0
        self._unread = bytearray(CRLF)  # the first delimiter needs no line before it
        self._searched = 0  # bytes of `_unread` in which no delimiter begins
        self._headers: Mapping[str, str] | None = None
        self._is_preamble = True
        self.is_complete = False

    def feed(self, data: bytes) -> Iterator[RawPart]:
        """Yield the parts that end within `data`. Raises `Malformed` and `TooLarge`."""
        if self.is_complete:
            return  # the epilogue, which has no meaning
        self._unread += data
        while not self.is_complete:
            if self._headers is None and not self._is_preamble:
                self._headers = self._take_headers()
                if self._headers is None:
                    return
            found = self._find_delimiter()
            if found is None:
                return
            headers, content = self._headers, self._unread
            self._begin_part(content[found.end :], found.is_last)
            if headers is not None:
                del content[found.start :]
                yield RawPart(headers, content)

    def _find_delimiter(self) -> Delimiter | None:
        start = self._unread.find(self._dashes, self._searched)
        if start >= 0:
            tail = TAIL.match(self._unread, start + len(self._dashes))
            if tail is None:
                # Compiled only for content that looks like a delimiter: each body has its own boundary.
                delimiter = re.compile(re.escape(self._dashes) + TAIL.pattern)
                found = delimiter.search(self._unread, start)
                start, tail = (found.start(), found) if found else (-1, None)
            if tail is not None:
                return Delimiter(start, tail.end(), tail[1] is not None)
        self._searched = max(0, len(self._unread) - self._longest_delimiter)
        if self._is_preamble:
            del self._unread[: self._searched]
            self._searched = 0
        return None

    def _begin_part(self, unread: bytearray, is_after_last: bool) -> None:
        self._unread = bytearray() if is_after_last else unread
        self._searched, self._headers, self._is_preamble = 0, None, False
        self.is_complete = is_after_last
        self._count += not is_after_last
        if self._count > self._max_parts:
            raise TooLarge(f"the multipart body has more than {self._max_parts} parts")

    def _take_headers(self) -> Mapping[str, str] | None:
        """The header of the part that begins here, if all of it is there."""
        if self._unread.startswith(CRLF):
            del self._unread[: len(CRLF)]
            return {}
        end = self._unread.find(CRLF + CRLF, 0, MAX_HEADER_BYTES)
        if end < 0:
            if len(self._unread) >= MAX_HEADER_BYTES:
                raise TooLarge(
                    f"a part of the multipart body has a header of more than {MAX_HEADER_BYTES} bytes"
                )
            return None
        lines = bytes(self._unread[:end]).split(CRLF, MAX_HEADER_FIELDS)
        del self._unread[: end + 2 * len(CRLF)]
        if len(lines) > MAX_HEADER_FIELDS:
            raise TooLarge(
                f"a part of the multipart body has more than {MAX_HEADER_FIELDS} header fields"
            )
        return dict(map(read_field, lines))


def read_field(line: bytes) -> tuple[str, str]:
    field = FIELD.fullmatch(line)
    if field is None:
        raise Malformed("a part of the multipart body has a header field that is malformed")
    return field[1].decode("ascii").lower(), field[2].strip(b" \t").decode("latin-1")
