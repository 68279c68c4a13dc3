"""Terminal escapes of a model or Triton: `up` prints them escaped, as the commands those of a gateway."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.up import Up, write_model

EVIL = "\x1b[2J\x1b]0;owned\x07\r\x9b31m\u202eback"
MARKS = ("\x1b", "\x07", "\r", "\x9b", "\u202e")

# Written by Triton's process itself, not through Triton's log.
WRITES = f"""
        for number in (1, 2):
            os.write(number, ({EVIL!r} + " on descriptor " + str(number) + chr(10)).encode())
"""


def assert_harmless(text: str) -> None:
    assert [mark for mark in MARKS if mark in text] == []


@pytest.mark.fault("terminal control sequences in the output of a model, a Triton or a gateway")
def test_terminal_escapes_in_the_output_of_models_and_triton_are_escaped(tmp_path: Path) -> None:
    write_model(tmp_path, WRITES.strip())
    with Up(tmp_path, "--log-verbose", "1") as up:
        up.wait_for("ready after")
        assert r"\x1b[2J" in up.wait_for("on descriptor 1")
        assert r"\u202eback" in up.wait_for("on descriptor 2")
    assert_harmless(up.output)


@pytest.mark.fault("terminal control sequences in the output of a model, a Triton or a gateway")
@pytest.mark.parametrize("flag", ["--exit-on-error", "--no-exit-on-error"])
def test_terminal_escapes_in_the_reason_of_a_failed_load_are_escaped(
    tmp_path: Path, flag: str
) -> None:
    write_model(tmp_path, f"raise ValueError({EVIL!r} + ' in the reason')")
    with Up(tmp_path, flag) as up:
        up.wait_for("in the reason")
        if flag == "--exit-on-error":
            assert up.end() == 1
    assert_harmless(up.output)
