"""What is written: a record for each input, as a line of JSON or of CSV; and what a file holds already."""

from __future__ import annotations

import csv
import io
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

import orjson

from gateway.client.errors import UsageError
from gateway.messages import escape_unprintable, escape_unprintable_json

DELETE = b"\x7f"


@dataclass(frozen=True)
class Record:
    """What came of one input: the outputs by name, or why there are none."""

    name: str
    outputs: dict[str, Any] | None = None
    error: str = ""
    code: str = ""


class OutputFormat(str, Enum):
    jsonl = "jsonl"
    csv = "csv"


@dataclass(frozen=True)
class StoredRecord:
    """A record in a file."""

    raw: str
    name: str
    is_success: bool


class RecordWriter(Protocol):
    header: bytes

    def encode_record(self, record: Record) -> bytes: ...

    def read_records(self, lines: Iterable[str]) -> Iterator[StoredRecord]:
        """The whole records of a file; one that was cut off is none. Raises `Misused`."""


class JsonLinesWriter:
    header = b""

    def encode_record(self, record: Record) -> bytes:
        told: dict[str, Any] = {"input": record.name}
        if record.outputs is not None:
            told["outputs"] = record.outputs
        else:
            told |= {"error": record.error, "code": record.code}
        raw = orjson.dumps(told, option=orjson.OPT_APPEND_NEWLINE)
        if raw.isascii() and DELETE not in raw:
            return raw  # orjson escapes the other ones
        return escape_unprintable_json(raw.decode()).encode()

    def read_records(self, lines: Iterable[str]) -> Iterator[StoredRecord]:
        for raw in lines:
            try:
                told = orjson.loads(raw)
            except orjson.JSONDecodeError:
                if raw.endswith("\n"):
                    raise UsageError("it holds a line that is no JSON") from None
                return
            if not isinstance(told, dict) or not isinstance(told.get("input"), str):
                raise UsageError("it holds a line that is no record of ours")
            if raw.endswith("\n"):
                yield StoredRecord(raw, told["input"], "outputs" in told)


class CsvWriter:
    """A column per output. What is not one value is JSON. A terminal is spoken to by nobody's output."""

    def __init__(self, outputs: Sequence[str], *, to_terminal: bool = False) -> None:
        self._outputs = outputs
        self._to_terminal = to_terminal
        self._columns = ["input", *outputs, "error"]
        self.header = encode_csv_row(self._columns)

    def encode_record(self, record: Record) -> bytes:
        outputs = record.outputs or {}
        cells = [
            format_csv_cell(outputs[name]) if name in outputs else "" for name in self._outputs
        ]
        row = [record.name, *cells, record.error]
        return encode_csv_row(map(escape_unprintable, row) if self._to_terminal else row)

    def read_records(self, lines: Iterable[str]) -> Iterator[StoredRecord]:
        raw: list[str] = []

        def record_lines() -> Iterator[str]:
            for line in lines:
                raw.append(line)
                yield line

        for number, cells in enumerate(csv.reader(record_lines())):
            whole, raw[:] = "".join(raw), []
            if number == 0 and cells != self._columns:
                raise UsageError(f"its columns are not {', '.join(self._columns)}")
            if number and len(cells) == len(self._columns) and whole.endswith("\n"):
                yield StoredRecord(whole, cells[0], not cells[-1])


def encode_csv_row(cells: Iterable[str]) -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue().encode("utf-8", "replace")


def format_csv_cell(value: Any) -> str:
    return value if isinstance(value, str) else orjson.dumps(value).decode()


def create_record_writer(
    format_: OutputFormat, outputs: Sequence[str], *, to_terminal: bool = False
) -> RecordWriter:
    if format_ is OutputFormat.csv:
        return CsvWriter(outputs, to_terminal=to_terminal)
    return JsonLinesWriter()


def resume_output(path: Path, writer: RecordWriter) -> Counter[str]:
    """The inputs that the file answers already. What failed, or was cut off, leaves it, to be asked again.

    The file is either as it was or as it should be, whenever this is interrupted. Raises `Misused`.
    """
    done: Counter[str] = Counter()
    kept_bytes = len(writer.header)
    kept = path.with_name(f".{path.name}.resumed")
    try:
        with path.open(newline="", encoding="utf-8") as file, kept.open("wb") as copy:
            copy.write(writer.header)
            for row in writer.read_records(file):
                if row.is_success:
                    done[row.name] += 1
                    kept_bytes += copy.write(row.raw.encode())
        if kept_bytes != path.stat().st_size:
            kept.chmod(path.stat().st_mode)
            os.replace(kept, path.resolve())  # noqa: PTH105
    except UnicodeDecodeError:
        raise UsageError(f"{path} cannot be gone on with: it is not UTF-8") from None
    except (UsageError, csv.Error) as exc:
        raise UsageError(f"{path} cannot be gone on with: {exc}") from None
    except OSError as exc:
        raise UsageError(f"{path} cannot be gone on with: {exc.strerror}") from None
    finally:
        kept.unlink(missing_ok=True)
    return done
