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
from gateway.commands.records import encode_json_record
from gateway.embedded.log_filter import LogFilter
from gateway.messages import escape_unprintable, escape_unprintable_json, print_message
from gateway.telemetry.logs import ACCESS_LOGGER, ConsoleFormatter, TerminalFormatter
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
    written = encode_json_record({"input": "a", "outputs": {"Y": value}})
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


# What a client sends, and how the value of a field reads on the console, in a short line and in JSON.
VALUES = [
    ("resnet", "resnet", "resnet", '"resnet"'),
    ("a key=admin", "'a key=admin'", "'a key=admin'", '"a key=admin"'),
    ("m 200 5 ms", "'m 200 5 ms'", "'m 200 5 ms'", '"m 200 5 ms"'),
    ("'a' b", "\"'a' b\"", "\"'a' b\"", "\"'a' b\""),
    ("'a'", "\"'a'\"", "\"'a'\"", "\"'a'\""),
    ('"a"', "'\"a\"'", "'\"a\"'", r'"\"a\""'),
    ("a=b", "a=b", "a=b", '"a=b"'),
    ("a\nb", r"a\nb", r"a\nb", r'"a\nb"'),
    ("a\n12:00:00 info b", r"'a\n12:00:00 info b'", r"'a\n12:00:00 info b'", r'"a\n12:00:00 info b"'),
    ("a\x1b[2J", r"a\x1b[2J", r"a\x1b[2J", r'"a\u001b[2J"'),
    ("a\x9b31m b", r"'a\x9b31m b'", r"'a\x9b31m b'", r'"a\u009b31m b"'),
    ("a\u202eb", r"a\u202eb", r"a\u202eb", r'"a\u202eb"'),
    ("a\u3000key=b", r"a\u3000key=b", r"a\u3000key=b", r'"a\u3000key=b"'),
    ("a\xa0key=b", r"a\xa0key=b", r"a\xa0key=b", r'"a\u00a0key=b"'),
    ("a\\", "a\\", "a\\", r'"a\\"'),
]  # fmt: skip


@pytest.mark.fault("terminal control sequences in the output of a model, a Triton or a gateway")
@pytest.mark.parametrize(("value", "console", "short", "in_json"), VALUES)
def test_value_of_a_client_is_one_word_of_a_line(
    value: str, console: str, short: str, in_json: str
) -> None:
    fields = {"request_id": value, "logger": ACCESS_LOGGER, "model": value, "duration_ms": 1.0}
    lines = [
        formatter.format_line(0, "info", "POST /x 404", fields)
        for formatter in (ConsoleFormatter(), TerminalFormatter(), LogJsonLines())
    ]
    assert [line.split(" ", 1)[1] for line in lines[:2]] == [
        f"info    POST /x 404 request_id={console} model={console} duration_ms=1.0",
        f"POST {short} 404 1 ms request_id={short}",
    ]
    assert f'"model":{in_json},' in lines[2]
    assert orjson.loads(lines[2])["request_id"] == value


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
    line = encode_json_record({"input": EVIL, "outputs": {"OUT": EVIL}})
    assert_harmless(line.decode())
    assert orjson.loads(line) == {"input": EVIL, "outputs": {"OUT": EVIL}}
    short = encode_json_record({"input": "a", "outputs": {"OUT": [1.5]}})
    assert short == b'{"input":"a","outputs":{"OUT":[1.5]}}\n'
