"""The source of the package, parsed once for the tests that read it."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

from tests.support.servers import ROOT


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@cache
def package_trees() -> dict[str, ast.Module]:
    """Return the tree of each module by its name."""
    paths = sorted((ROOT / "gateway").rglob("*.py"))
    return {module_name(path): ast.parse(path.read_text()) for path in paths}
