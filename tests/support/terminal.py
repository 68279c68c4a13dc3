"""Commands in a terminal."""

from __future__ import annotations

import os
import pty
import threading
from collections.abc import Mapping
from contextlib import suppress

from tests.support.gateway_forks import fork_gateway
from tests.support.servers import ROOT


def call_in_terminal(*arguments: str, environment: Mapping[str, str] = os.environ) -> str:
    """Return what a command shows in a terminal without colours. It has no keyboard."""
    mine, its = pty.openpty()
    plain = {**environment, "TERM": "dumb", "NO_COLOR": "1", "COLUMNS": "500"}
    shown: list[bytes] = []

    def read() -> None:
        with suppress(OSError):  # the other end is closed
            while data := os.read(mine, 65536):
                shown.append(data)

    reader = threading.Thread(target=read)
    reader.start()
    stdin = os.open(os.devnull, os.O_RDONLY)
    try:
        process = fork_gateway(arguments, plain, ROOT, (stdin, its, its))
        with process.stdin:
            process.wait(60)
    finally:
        os.close(stdin)
        os.close(its)
        reader.join()
        os.close(mine)
    return b"".join(shown).decode()
