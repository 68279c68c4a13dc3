"""Output records as readable text, JSON lines or CSV: writing them, and reading them to resume a file."""

from __future__ import annotations

import base64
import csv
import io
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from math import prod
from pathlib import Path
from typing import Any, Final, Protocol

import orjson

from gateway.client.results import find_scores
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
    csv = "csv"


@dataclass(frozen=True)
class StoredRecord:
    """A record that was read from a file."""

    raw: str
    name: str
    is_success: bool


class RecordWriter(Protocol):
    header: bytes

    def encode_record(self, record: Record) -> bytes: ...

    def read_records(self, lines: Iterable[str]) -> Iterator[StoredRecord]:
        """Yield the complete records of a file, without a truncated last one. Raises `UsageError`."""


class JsonLinesWriter:
    header = b""

    def encode_record(self, record: Record) -> bytes:
        document: dict[str, Any] = {"input": record.name}
        if record.outputs is not None:
            document["outputs"] = record.outputs
        else:
            document |= {"error": record.error, "code": record.code}
        raw = encode_any_json(document) + b"\n"
        if raw.isascii() and DELETE not in raw:
            return raw  # orjson escapes the other control characters
        return escape_unprintable_json(raw.decode()).encode()

    def read_records(self, lines: Iterable[str]) -> Iterator[StoredRecord]:
        for raw in lines:
            try:
                document = orjson.loads(raw)
            except orjson.JSONDecodeError:
                if raw.endswith("\n"):
                    raise UsageError("it contains a line that is not JSON") from None
                return
            if not isinstance(document, dict) or not isinstance(document.get("input"), str):
                raise UsageError("it contains a line that is not a record of this command")
            if raw.endswith("\n"):
                yield StoredRecord(raw, document["input"], "outputs" in document)


class CsvWriter:
    """Writes a column per output, JSON for values other than text; escapes control characters."""

    def __init__(self, outputs: Sequence[str], *, to_terminal: bool = False) -> None:
        self._outputs = outputs
        self._to_terminal = to_terminal
        self._columns = ["input", *outputs, "error"]
        self.header = encode_csv_row(self._columns)

    def encode_record(self, record: Record) -> bytes:
        outputs = record.outputs or {}
        cells = [format_cell(outputs[name]) if name in outputs else "" for name in self._outputs]
        row = [record.name, *cells, record.error]
        return encode_csv_row(map(escape_unprintable, row) if self._to_terminal else row)

    def read_records(self, lines: Iterable[str]) -> Iterator[StoredRecord]:
        raw: list[str] = []

        def collect_raw_lines() -> Iterator[str]:
            for line in lines:
                raw.append(line)
                yield line

        for number, cells in enumerate(csv.reader(collect_raw_lines())):
            text = "".join(raw)
            raw[:] = []
            if number == 0 and cells != self._columns:
                raise UsageError(f"its columns are not {', '.join(self._columns)}")
            if number and len(cells) == len(self._columns) and text.endswith("\n"):
                yield StoredRecord(text, cells[0], not cells[-1])


class TextWriter:
    """Writes each output for people: labels with bars, texts, and the first values of arrays."""

    header = b""

    def encode_record(self, record: Record) -> bytes:
        lines = [record.name if record.outputs is not None else f"{record.name}: {record.error}"]
        for name, value in (record.outputs or {}).items():
            first, *others = describe_value(value)
            lines.append(f"  {name}  {first}")
            lines += [f"  {'':{len(name)}}  {other}" for other in others]
        return "".join(f"{escape_unprintable(line)}\n" for line in lines).encode("utf-8", "replace")

    def read_records(self, lines: Iterable[str]) -> Iterator[StoredRecord]:
        raise UsageError("text for people cannot be read again")


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


def encode_csv_row(cells: Iterable[str]) -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue().encode("utf-8", "replace")


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


def resume_output(path: Path, writer: RecordWriter) -> Counter[str]:
    """Remove failed and truncated records from a file; return the names of the inputs that succeeded.

    The file is replaced atomically. Raises `UsageError`.
    """
    done_counts: Counter[str] = Counter()
    kept_bytes = len(writer.header)
    temporary = path.with_name(f".{path.name}.resumed")
    try:
        with path.open(newline="", encoding="utf-8") as file, temporary.open("wb") as copy:
            copy.write(writer.header)
            for row in writer.read_records(file):
                if row.is_success:
                    done_counts[row.name] += 1
                    kept_bytes += copy.write(row.raw.encode())
        if kept_bytes != path.stat().st_size:
            temporary.chmod(path.stat().st_mode)
            temporary.replace(path.resolve())
    except UnicodeDecodeError:
        raise UsageError(f"cannot resume {path}: it is not UTF-8") from None
    except (UsageError, csv.Error) as exc:
        raise UsageError(f"cannot resume {path}: {exc}") from None
    except OSError as exc:
        raise UsageError(f"cannot resume {path}: {exc.strerror}") from None
    finally:
        temporary.unlink(missing_ok=True)
    return done_counts
