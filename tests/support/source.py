"""The source of the package, parsed once for the tests that read it."""

from __future__ import annotations

import ast
import re
from functools import cache
from itertools import pairwise
from pathlib import Path

from tests.support.servers import ROOT


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@cache
def package_trees() -> dict[str, ast.Module]:
    """Return the tree of each module by its name."""
    paths = sorted((ROOT / "gateway").rglob("*.py"))
    return {module_name(path): ast.parse(path.read_text()) for path in paths}


def setting_descriptions() -> dict[str, str]:
    """Return the string below each setting, by its name. A fixed field has none."""
    places = re.compile(
        r"gateway\.config\.settings|gateway\.capabilities\.\w+\.(settings|capability)"
    )
    trees = [tree for name, tree in package_trees().items() if places.fullmatch(name)]
    bodies = [node.body for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)]
    return {
        ast.unparse(field.target): text.value.value
        for body in bodies
        for field, text in pairwise(body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }
