"""Output records as readable text or JSON lines: writing them, and reading them to resume a file."""

from __future__ import annotations

import base64
import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from math import prod
from pathlib import Path
from typing import Any, Final

import orjson

from gateway.commands.errors import UsageError
from gateway.messages import escape_unprintable, escape_unprintable_json

DELETE = b"\x7f"
BAR_CHARS: Final = 20
MAX_SHOWN_ARRAY_VALUES: Final = 6


@dataclass(frozen=True)
class Record:
    """The result of an input: its outputs by name, or an error."""

    name: str
    outputs: dict[str, Any] | None = None
    error: str = ""
    code: str = ""


class OutputFormat(str, Enum):
    text = "text"
    jsonl = "jsonl"


def encode_json_record(record: Record) -> bytes:
    document: dict[str, Any] = {"input": record.name}
    if record.outputs is not None:
        document["outputs"] = record.outputs
    else:
        document |= {"error": record.error, "code": record.code}
    raw = encode_any_json(document) + b"\n"
    if raw.isascii() and DELETE not in raw:
        return raw  # orjson escapes the other control characters
    return escape_unprintable_json(raw.decode()).encode()


def encode_text_record(record: Record) -> bytes:
    """Return each output for people: labels with bars, texts, and the first values of arrays."""
    lines = [record.name if record.outputs is not None else f"{record.name}: {record.error}"]
    for name, value in (record.outputs or {}).items():
        first, *others = describe_value(value)
        lines.append(f"  {name}  {first}")
        lines += [f"  {'':{len(name)}}  {other}" for other in others]
    return "".join(f"{escape_unprintable(line)}\n" for line in lines).encode("utf-8", "replace")


RECORD_ENCODERS: Final[Mapping[OutputFormat, Callable[[Record], bytes]]] = {
    OutputFormat.text: encode_text_record,
    OutputFormat.jsonl: encode_json_record,
}


def describe_value(value: Any) -> list[str]:
    """Return the lines, at least one, that show the value of an output."""
    if scores := find_scores(value):
        width = max(len(label) for label, _ in scores)
        bars = ((label, share, "█" * round(BAR_CHARS * share)) for label, share in scores)
        return [f"{label:{width}} {share:7.1%}  {bar}".rstrip() for label, share, bar in bars]
    if isinstance(value, str):
        return value.splitlines() or [""]
    if isinstance(value, dict) and "b64" not in value:
        lines: list[str] = []
        for key, part in value.items():
            described = describe_value(part)
            lines += [f"{key}: {described[0]}"] if len(described) == 1 else described
        return lines or ["nothing"]
    if not isinstance(value, list):
        return [format_cell(value)]
    shape = [len(value)]
    while value and isinstance(value[0], list):
        value = value[0]
        shape.append(len(value))
    shown = [
        f"{v:.5g}" if isinstance(v, float) else format_cell(v)
        for v in value[:MAX_SHOWN_ARRAY_VALUES]
    ]
    more = ", …" if prod(shape) > len(shown) else ""
    return [f"[{' x '.join(map(str, shape))}] {', '.join(shown)}{more}"]


def find_scores(value: Any) -> list[tuple[str, float]]:
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        return []
    scores = []
    for item in value:
        shares = [part for part in item.values() if isinstance(part, float) and 0 <= part <= 1]
        labels = [part for part in item.values() if isinstance(part, str)]
        if len(shares) != 1:
            return []
        scores.append((labels[0] if labels else str(item.get("index", "")), shares[0]))
    return scores


def format_cell(value: Any) -> str:
    return value if isinstance(value, str) else encode_any_json(value).decode()


def encode_any_json(value: Any) -> bytes:
    try:
        return orjson.dumps(value, default=encode_bytes)
    except orjson.JSONEncodeError:
        # It has an integer of more than 64 bits, half of a surrogate pair, or many levels.
        return json.dumps(value, default=encode_bytes).encode()


def encode_bytes(value: Any) -> dict[str, str]:
    """Return `bytes` as the gateway writes them in JSON. Raises `TypeError` for another value."""
    if not isinstance(value, bytes):
        raise TypeError(f"{type(value).__name__} has no JSON")
    return {"b64": base64.b64encode(value).decode()}


def resume_output(path: Path) -> Counter[str]:
    """Remove failed and truncated records from a file; return the names of the inputs that succeeded.

    The file is replaced atomically. Raises `UsageError`.
    """
    done_counts: Counter[str] = Counter()
    kept_bytes = 0
    temporary = path.with_name(f".{path.name}.resumed")
    try:
        with path.open("rb") as file, temporary.open("wb") as copy:
            for line in file:
                document = parse_record(line)
                if "outputs" in document:
                    done_counts[document["input"]] += 1
                    kept_bytes += copy.write(line)
        if kept_bytes != path.stat().st_size:
            temporary.chmod(path.stat().st_mode)
            temporary.replace(path.resolve())
    except UsageError as exc:
        raise UsageError(f"cannot resume {path}: {exc}") from None
    except OSError as exc:
        raise UsageError(f"cannot resume {path}: {exc.strerror}") from None
    finally:
        temporary.unlink(missing_ok=True)
    return done_counts


def parse_record(line: bytes) -> dict[str, Any]:
    """Return the record of a line, which is empty if the line is truncated. Raises `UsageError`."""
    if not line.endswith(b"\n"):
        return {}
    try:
        document = orjson.loads(line)
    except orjson.JSONDecodeError:
        raise UsageError("it contains a line that is not JSON") from None
    if not isinstance(document, dict) or not isinstance(document.get("input"), str):
        raise UsageError("it contains a line that is not a record of this command")
    return document
