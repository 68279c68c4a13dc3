"""A parser for header values such as `type; name=value; name="quoted \\" value"` (RFC 9110, section 5.6.6).

The cost is linear in the length for any header.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from gateway.errors import UnsupportedBody

# The media types in use are much shorter.
MAX_CONTENT_TYPE_CHARS: Final = 1024
PARAMETER_NAME: Final = re.compile(r"[^;=]*")
OPTIONAL_WHITESPACE: Final = re.compile(r"[ \t]*")
QUOTED_STRING: Final = re.compile(r'"([^"\\]*(?:\\.[^"\\]*)*)', re.DOTALL)
UNQUOTED_VALUE: Final = re.compile(r"[^;]*")
# A backslash before any other character is literal, because some browsers send Windows paths.
QUOTED_PAIR: Final = re.compile(r'\\(["\\])')


def parse_content_type(content_type: str) -> tuple[str, Mapping[str, str]]:
    """`text/plain; charset=utf-8` → ("text/plain", {"charset": "utf-8"}). Raises `UnsupportedBody`."""
    if len(content_type) > MAX_CONTENT_TYPE_CHARS:
        raise UnsupportedBody(
            content_type, (f"a Content-Type of at most {MAX_CONTENT_TYPE_CHARS} bytes",)
        )
    return parse_header_parameters(content_type)


def parse_header_parameters(header: str) -> tuple[str, dict[str, str]]:
    """Return the value before the first `;` in lower case, and the parameters by name in lower case.

    Invalid parameters are ignored, an unterminated quoted string extends to the end of the header, and the
    last of several parameters with the same name is used.
    """
    position = header.find(";")
    if position < 0:
        return header.strip().lower(), {}
    value = header[:position].strip().lower()
    parameters: dict[str, str] = {}
    while position < len(header):
        name, content, position = parse_header_parameter(header, position + 1)
        if name:
            parameters[name] = content
    return value, parameters


def parse_header_parameter(header: str, start: int) -> tuple[str, str, int]:
    """Return the name and value of the parameter at `start`, and the position of the next `;` or the end."""
    position = find_match_end(PARAMETER_NAME, header, start)
    name = header[start:position].strip().lower()
    if header[position : position + 1] != "=":
        return name, "", position
    begin = find_match_end(OPTIONAL_WHITESPACE, header, position + 1)
    quoted = QUOTED_STRING.match(header, begin)
    if quoted is None:
        end = find_match_end(UNQUOTED_VALUE, header, begin)
        return name, header[begin:end].strip(), end
    end = find_match_end(UNQUOTED_VALUE, header, quoted.end())
    return name, QUOTED_PAIR.sub(r"\1", quoted[1]), end


def find_match_end(pattern: re.Pattern[str], text: str, start: int) -> int:
    match = pattern.match(text, start)
    return start if match is None else match.end()


def decode_header_text(text: str) -> str:
    """Return the text of a header value that is UTF-8, as browsers send it."""
    try:
        return text.encode("latin-1").decode()
    except UnicodeError:
        return text
