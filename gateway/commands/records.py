"""Records of `infer`: written as JSON lines or readable text, and read to resume a file."""

from __future__ import annotations

import base64
import json
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

import orjson

from gateway.client import GatewayError
from gateway.client.many import InferOutcome
from gateway.commands.errors import UsageError, translate_hints
from gateway.commands.flags import OutputFormat
from gateway.messages import escape_unprintable, escape_unprintable_json

DELETE: Final = b"\x7f"
MAX_SHOWN_CHARS: Final = 200
# The name of an input, with its outputs, or with an error and its code.
Record: TypeAlias = "dict[str, Any]"


def make_record(name: str, outcome: InferOutcome) -> Record:
    if isinstance(outcome, GatewayError):
        return {"input": name, "error": translate_hints(str(outcome)), "code": outcome.code}
    return {"input": name, "outputs": dict(outcome)}


def encode_json_record(record: Record) -> bytes:
    raw = encode_any_json(record) + b"\n"
    if raw.isascii() and DELETE not in raw:
        return raw  # orjson escapes the other control characters
    return escape_unprintable_json(raw.decode()).encode()


def encode_text_record(record: Record) -> bytes:
    """Return each output for people: a text, or the beginning of its JSON."""
    name = record["input"]
    lines = [f"{name}: {record['error']}" if "error" in record else name]
    for output, value in record.get("outputs", {}).items():
        text = value if isinstance(value, str) else shorten(encode_any_json(value).decode())
        first, *others = text.splitlines() or [""]
        lines.append(f"  {output}  {first}")
        lines += [f"  {'':{len(output)}}  {other}" for other in others]
    return "".join(f"{escape_unprintable(line)}\n" for line in lines).encode("utf-8", "replace")


def shorten(text: str) -> str:
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]} …"


RECORD_ENCODERS: Final[Mapping[OutputFormat, Callable[[Record], bytes]]] = {
    OutputFormat.text: encode_text_record,
    OutputFormat.jsonl: encode_json_record,
}


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
    temporary = path.with_name(f".{path.name}.resumed")
    try:
        with path.open("rb") as file, temporary.open("wb") as kept:
            for line in file:
                if name := find_succeeded_input(line):
                    done_counts[name] += 1
                    kept.write(line)
        temporary.chmod(path.stat().st_mode)
        temporary.replace(path.resolve())
    except (OSError, ValueError, LookupError, TypeError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "a line is not a record of infer"
        raise UsageError(f"cannot resume {path}: {reason}") from None
    finally:
        temporary.unlink(missing_ok=True)
    return done_counts


def find_succeeded_input(line: bytes) -> str:
    """Return the name of the input of a record; empty if it failed or is truncated."""
    record = orjson.loads(line) if line.endswith(b"\n") else {"input": ""}
    name = record["input"]
    return str(name) if "outputs" in record else ""
