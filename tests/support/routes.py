"""A row of the table of routes: for whom each is. Tests of capabilities have the rows of their routes."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module

from tests.support.servers import ROOT


@dataclass(frozen=True)
class Row:
    """A route, for whom it is, and the status for who may call it."""

    method: str
    path: str
    whose: str
    status: int = 200
    body: bytes = b""
    content_type: str = "text/plain"


def capability_rows() -> tuple[Row, ...]:
    """Return `ROWS` of `support/routes.py` of the capabilities that have one."""
    rows: list[Row] = []
    for file in sorted((ROOT / "tests/capabilities").glob("*/support/routes.py")):
        module = import_module(f"tests.capabilities.{file.parts[-3]}.support.routes")
        rows += module.ROWS
    return tuple(rows)
