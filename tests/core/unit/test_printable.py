"""Texts of clients and models are printed without line ends, terminal escapes and changes of direction."""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.commands import tables
from gateway.commands.inference.records import Record, encode_json_record
from gateway.embedded.log_filter import LogFilter
from gateway.messages import escape_unprintable, escape_unprintable_json, print_message
from gateway.telemetry.logs import ConsoleFormatter
from gateway.telemetry.logs import JsonFormatter as LogJsonLines

EVIL = "a\x1b[2J\x1b]0;title\x07\r\x08\x7f\x9b31m\u202eback\u2066\u2028\u200b\U000e0001b"
SHOWN = r"a\x1b[2J\x1b]0;title\x07\r\x08\x7f\x9b31m\u202eback\u2066\u2028\u200b\U000e0001b"
HARMLESS = "plain text, Größe, 日本語, ½ · «…» 🙂"


def assert_harmless(text: str) -> None:
    assert [line for line in text.split("\n") if not line.isprintable()] == []


def test_unprintable_characters_are_escaped_and_others_kept() -> None:
    assert escape_unprintable(EVIL) == SHOWN
    assert escape_unprintable(HARMLESS) == HARMLESS


@given(st.text())
def test_drawn_text_becomes_printable_and_json_keeps_its_meaning(text: str) -> None:
    assert escape_unprintable(text).isprintable()
    raw = orjson.dumps({"text": text, text: [text]}).decode()
    assert_harmless(escape_unprintable_json(raw))
    assert orjson.loads(escape_unprintable_json(raw)) == orjson.loads(raw)


@pytest.mark.parametrize(
    "value",
    [1 << 70, "\ud800", json.loads("[" * 300 + "]" * 300)],
    ids=("large", "surrogate", "deep"),
)
def test_json_that_orjson_cannot_write_is_printed(
    value: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    written = encode_json_record(Record("a", {"Y": value}))
    assert json.loads(written) == {"input": "a", "outputs": {"Y": value}}
    tables.print_json(value)
    assert json.loads(capsys.readouterr().out) == value


def record(message: str, **extra: str) -> logging.LogRecord:
    made = logging.makeLogRecord({"msg": "%s", "args": (message,), **extra})
    try:
        raise ValueError(f"{message}\n00:00:00 info    forged")
    except ValueError:
        made.exc_info = sys.exc_info()
    return made


@pytest.mark.fault("terminal control sequences in the output of a model, a Triton or a gateway")
def test_log_line_is_one_line_and_traceback_is_indented() -> None:
    written = ConsoleFormatter().format(record(EVIL, model=EVIL))
    assert_harmless(written)
    first, *more = written.split("\n")
    assert SHOWN in first
    assert all(line.startswith("  ") for line in more)  # so that none passes for another line
    line = LogJsonLines().format(record(EVIL, model=EVIL))
    assert_harmless(line)
    assert "\n" not in line
    assert orjson.loads(line)["model"] == EVIL


@pytest.mark.fault("terminal control sequences in the output of a model, a Triton or a gateway")
def test_messages_of_triton_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [
        f"I0101 12:00:00.000000 1 model.cc:1] {EVIL}",
        f"E0101 12:00:00.000000 1 model.cc:1] failed to load 'm' version 1: {EVIL}",
        EVIL,
    ]
    for log_filter in (LogFilter(verbose=True), LogFilter()):
        for line in lines:
            if (shown := log_filter.filter_line(line)) is not None:
                print_message(shown)
        print_message(str(log_filter.failures))
    assert_harmless(capsys.readouterr().err)


def test_tables_and_json_of_commands_are_escaped(
    capsysbinary: pytest.CaptureFixture[bytes],
) -> None:
    tables.print_table(("MODEL", "WHY"), [(EVIL, EVIL)])
    tables.print_json([{"model": EVIL}])
    written = capsysbinary.readouterr().out.decode()
    assert_harmless(written)
    assert SHOWN in written
    items = written.partition("[\n")[2]
    assert orjson.loads(f"[{items}") == [{"model": EVIL}]


def test_records_are_escaped() -> None:
    found = Record(EVIL, {"OUT": EVIL})
    line = encode_json_record(found)
    assert_harmless(line.decode())
    assert orjson.loads(line) == {"input": EVIL, "outputs": {"OUT": EVIL}}
    short = encode_json_record(Record("a", {"OUT": [1.5]}))
    assert short == b'{"input":"a","outputs":{"OUT":[1.5]}}\n'
