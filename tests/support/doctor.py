"""Calls of `triton-gateway doctor`."""

from __future__ import annotations

import json
import os
from pathlib import Path

from tests.support.gateway_forks import run_gateway


def examine(
    *arguments: str | int, **environment: str | Path
) -> tuple[int, dict[str, dict[str, str]]]:
    """Return its exit status, and the last finding of each check."""
    given = {name: value for name, value in os.environ.items() if not name.startswith("GATEWAY_")}
    given |= {name: str(value) for name, value in environment.items()}
    ended = run_gateway("doctor", "--json", *arguments, environment=given)
    assert not ended.stderr
    return ended.returncode, {each["check"]: each for each in json.loads(ended.stdout)}
