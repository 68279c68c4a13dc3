"""What is printed of others' words: nothing in it ends a line, speaks to a terminal or turns its order."""

from __future__ import annotations

import logging
import sys

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.client import tables
from gateway.client.records import Csv, JsonLines, Record
from gateway.logs import Console
from gateway.logs import JsonLines as LogJsonLines
from gateway.triton.chatter import Chatter
from gateway.words import printable, printable_json, say

EVIL = "a\x1b[2J\x1b]0;title\x07\r\x08\x7f\x9b31m\u202eback\u2066\u2028\u200b\U000e0001b"
SHOWN = r"a\x1b[2J\x1b]0;title\x07\r\x08\x7f\x9b31m\u202eback\u2066\u2028\u200b\U000e0001b"
HARMLESS = "plain text, Größe, 日本語, ½ · «…» 🙂"


def assert_harmless(text: str) -> None:
    assert [line for line in text.split("\n") if not line.isprintable()] == []


def test_what_a_person_can_read_stays_and_all_else_is_escaped() -> None:
    assert printable(EVIL) == SHOWN
    assert printable(HARMLESS) == HARMLESS


@given(st.text())
def test_nothing_is_left_that_is_not_printable_and_json_means_the_same(text: str) -> None:
    assert printable(text).isprintable()
    raw = orjson.dumps({"text": text, text: [text]}).decode()
    assert_harmless(printable_json(raw))
    assert orjson.loads(printable_json(raw)) == orjson.loads(raw)


def record(message: str, **extra: str) -> logging.LogRecord:
    made = logging.makeLogRecord({"msg": "%s", "args": (message,), **extra})
    try:
        raise ValueError(f"{message}\n00:00:00 info    forged")
    except ValueError:
        made.exc_info = sys.exc_info()
    return made


def test_a_line_of_the_log_is_one_line_and_a_traceback_is_none_of_it() -> None:
    written = Console().format(record(EVIL, model=EVIL))
    assert_harmless(written)
    first, *more = written.split("\n")
    assert SHOWN in first
    assert all(line.startswith("  ") for line in more)  # so that none passes for another line
    told = LogJsonLines().format(record(EVIL, model=EVIL))
    assert_harmless(told)
    assert "\n" not in told
    assert orjson.loads(told)["model"] == EVIL


def test_what_triton_says_is_said_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [
        f"I0101 12:00:00.000000 1 model.cc:1] {EVIL}",
        f"E0101 12:00:00.000000 1 model.cc:1] failed to load 'm' version 1: {EVIL}",
        EVIL,
    ]
    for chatter in (Chatter(verbose=True), Chatter()):
        for line in lines:
            if (told := chatter.hear(line)) is not None:
                say(told)
        say(str(chatter.failures))
    assert_harmless(capsys.readouterr().err)


def test_tables_and_json_of_the_command_line_are_harmless(
    capsysbinary: pytest.CaptureFixture[bytes],
) -> None:
    tables.show(("MODEL", "WHY"), [(EVIL, EVIL)])
    tables.show_json([{"model": EVIL}])
    written = capsysbinary.readouterr().out.decode()
    assert_harmless(written)
    assert SHOWN in written
    told = written.partition("[\n")[2]
    assert orjson.loads(f"[{told}") == [{"model": EVIL}]


def test_records_are_harmless_and_in_a_file_unchanged() -> None:
    found = Record(EVIL, {"OUT": EVIL})
    line = JsonLines().line(found)
    assert_harmless(line.decode())
    assert orjson.loads(line) == {"input": EVIL, "outputs": {"OUT": EVIL}}
    assert (
        JsonLines().line(Record("a", {"OUT": [1.5]})) == b'{"input":"a","outputs":{"OUT":[1.5]}}\n'
    )
    assert_harmless(Csv(["OUT"], to_terminal=True).line(found).decode())
    assert EVIL.replace("\r", "") in Csv(["OUT"]).line(found).decode().replace("\r", "")
