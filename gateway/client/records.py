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

from gateway.client.errors import Misused
from gateway.words import printable, printable_json

DELETE = b"\x7f"


@dataclass(frozen=True)
class Record:
    """What came of one input: the outputs by name, or why there are none."""

    name: str
    outputs: dict[str, Any] | None = None
    error: str = ""
    code: str = ""


class Format(str, Enum):
    jsonl = "jsonl"
    csv = "csv"


@dataclass(frozen=True)
class Row:
    """A record in a file."""

    raw: str
    name: str
    succeeded: bool


class Writer(Protocol):
    header: bytes

    def line(self, record: Record) -> bytes: ...

    def rows(self, lines: Iterable[str]) -> Iterator[Row]:
        """The whole records of a file; one that was cut off is none. Raises `Misused`."""


class JsonLines:
    header = b""

    def line(self, record: Record) -> bytes:
        told: dict[str, Any] = {"input": record.name}
        if record.outputs is not None:
            told["outputs"] = record.outputs
        else:
            told |= {"error": record.error, "code": record.code}
        raw = orjson.dumps(told, option=orjson.OPT_APPEND_NEWLINE)
        if raw.isascii() and DELETE not in raw:
            return raw  # orjson escapes the other ones
        return printable_json(raw.decode()).encode()

    def rows(self, lines: Iterable[str]) -> Iterator[Row]:
        for raw in lines:
            try:
                told = orjson.loads(raw)
            except orjson.JSONDecodeError:
                if raw.endswith("\n"):
                    raise Misused("it holds a line that is no JSON") from None
                return
            if not isinstance(told, dict) or not isinstance(told.get("input"), str):
                raise Misused("it holds a line that is no record of ours")
            if raw.endswith("\n"):
                yield Row(raw, told["input"], "outputs" in told)


class Csv:
    """A column per output. What is not one value is JSON. A terminal is spoken to by nobody's output."""

    def __init__(self, outputs: Sequence[str], *, to_terminal: bool = False) -> None:
        self._outputs = outputs
        self._to_terminal = to_terminal
        self._columns = ["input", *outputs, "error"]
        self.header = row_of(self._columns)

    def line(self, record: Record) -> bytes:
        outputs = record.outputs or {}
        cells = [cell_of(outputs[name]) if name in outputs else "" for name in self._outputs]
        row = [record.name, *cells, record.error]
        return row_of(map(printable, row) if self._to_terminal else row)

    def rows(self, lines: Iterable[str]) -> Iterator[Row]:
        raw: list[str] = []

        def noted() -> Iterator[str]:
            for line in lines:
                raw.append(line)
                yield line

        for number, cells in enumerate(csv.reader(noted())):
            whole, raw[:] = "".join(raw), []
            if number == 0 and cells != self._columns:
                raise Misused(f"its columns are not {', '.join(self._columns)}")
            if number and len(cells) == len(self._columns) and whole.endswith("\n"):
                yield Row(whole, cells[0], not cells[-1])


def row_of(cells: Iterable[str]) -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue().encode("utf-8", "replace")


def cell_of(value: Any) -> str:
    return value if isinstance(value, str) else orjson.dumps(value).decode()


def writer(format_: Format, outputs: Sequence[str], *, to_terminal: bool = False) -> Writer:
    if format_ is Format.csv:
        return Csv(outputs, to_terminal=to_terminal)
    return JsonLines()


def resumed(path: Path, form: Writer) -> Counter[str]:
    """The inputs that the file answers already. What failed, or was cut off, leaves it, to be asked again.

    The file is either as it was or as it should be, whenever this is interrupted. Raises `Misused`.
    """
    done: Counter[str] = Counter()
    kept_bytes = len(form.header)
    kept = path.with_name(f".{path.name}.resumed")
    try:
        with path.open(newline="", encoding="utf-8") as file, kept.open("wb") as copy:
            copy.write(form.header)
            for row in form.rows(file):
                if row.succeeded:
                    done[row.name] += 1
                    kept_bytes += copy.write(row.raw.encode())
        if kept_bytes != path.stat().st_size:
            kept.chmod(path.stat().st_mode)
            os.replace(kept, path.resolve())  # noqa: PTH105
    except UnicodeDecodeError:
        raise Misused(f"{path} cannot be gone on with: it is not UTF-8") from None
    except (Misused, csv.Error) as exc:
        raise Misused(f"{path} cannot be gone on with: {exc}") from None
    except OSError as exc:
        raise Misused(f"{path} cannot be gone on with: {exc.strerror}") from None
    finally:
        kept.unlink(missing_ok=True)
    return done
