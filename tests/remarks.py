"""Remarks of `make check`, which fail nothing: wording, names, and rows of documents without a test."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests.support.servers import ROOT
from tests.support.source import package_trees

DEFINITIONS: Final = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
DOCUMENTED: Final = (ast.Module, *DEFINITIONS)
# A docstring that begins with a verb in the third person or a noun phrase says what a thing is.
OPENERS: Final = re.compile(
    r"(what|whom?|whether|how|which|where|why|whose|who(ever)?|of|as|for|with|by|until|in|after|on|from|that|those)\b",
    re.IGNORECASE,
)
# Phrases that read as riddles in a message, each with the usual words for it.
PHRASES: Final = {
    r"\bnobody\b": "no response from, connection refused",
    r"\bwhoever\b|\bwho (asks|leaves|comes|goes)\b": "the client, the caller",
    r"\b(is|are) no (?!longer)\w": "is not a, is not a valid",
    r"\bthere (is|are) none\b": "not found, not set",
    r"\b(is|are) gone\b": "was removed, has exited",
    r"\bas (it|they) (was|were)\b": "unchanged",
    r"\bwhat (came|comes|is asked)\b": "got, received, the request",
    r"\bnot any ?more\b": "no longer",
    r"\btakes (no|neither)\b": "does not accept",
    r"\bmeant\?": "did you mean",
    r"\bmay not bring\b": "must not contain",
    r"\bcan(not)? be had\b": "is (not) available",
    r"\bwas asked\b": "was requested",
}
# An exception of ruff or mypy, and the same with its reason; mypy reads one only after another #.
LINTER_EXCEPTION: Final = re.compile(r"# (noqa|type: ignore)")
EXPLAINED_EXCEPTION: Final = re.compile(r"# noqa: [A-Z]+\d+ - \w|# type: ignore\[[\w-]+\]  # \w")
# Python and Triton look for the first two; the others are the client's names of things in the server.
COMMON_NAMES: Final = {"main", "TritonPythonModel", "GatewayError", "InferResult"}
FAULTS: Final = ROOT / "docs/contribute/verification.md"


def list_messages(tree: ast.Module) -> Iterator[str]:
    """Yield every string of a module but docstrings."""
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, DOCUMENTED) and node.body and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and id(node) not in docstrings:
            yield str(node.value)


def remark_wording() -> Iterator[str]:
    for module, tree in package_trees().items():
        for text in list_messages(tree):
            for phrase, usual in PHRASES.items():
                if re.search(phrase, text):
                    yield f"{module}: {text!r}; better: {usual}"
        for node in ast.walk(tree):
            docstring = ast.get_docstring(node) if isinstance(node, DOCUMENTED) else None
            if docstring and OPENERS.match(docstring):
                yield f"{module}: a docstring begins with {docstring.splitlines()[0]!r}"


def remark_names() -> Iterator[str]:
    places = defaultdict(list)
    for module, tree in package_trees().items():
        for node in tree.body:
            if isinstance(node, DEFINITIONS) and not node.name.startswith("_"):
                places[node.name].append(module)
    for name, modules in places.items():
        if len(modules) > 1 and name not in COMMON_NAMES:
            yield f"{name} is defined in {', '.join(modules)}"


def remark_linter_exceptions() -> Iterator[str]:
    for folder in ("gateway", "benchmarks", "models"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for line in path.read_text().splitlines():
                if LINTER_EXCEPTION.search(line) and not EXPLAINED_EXCEPTION.search(line):
                    yield f"{path.relative_to(ROOT)}: no reason for {line.strip()!r}"


def list_fault_marks(file: Path) -> Iterator[str]:
    """Yield the beginnings of the rows that the tests of a file say they show."""
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for each in node.decorator_list:
                if isinstance(each, ast.Call) and ast.unparse(each.func) == "pytest.mark.fault":
                    yield from (ast.literal_eval(value) for value in each.args)


def remark_faults() -> Iterator[str]:
    section = FAULTS.read_text().partition("\n## Faults\n")[2]
    rows = set(re.findall(r"^\| (.+?) \| .+? \|$", section, re.MULTILINE)) - {"fault"}
    files = (ROOT / "tests").rglob("test_*.py")
    marks = {mark for file in files for mark in list_fault_marks(file)}
    for mark in sorted(marks):
        if not any(row.startswith(mark) for row in rows):
            yield f"a test is marked with the fault {mark!r}, which {FAULTS.name} does not list"
    for row in sorted(rows):
        if not any(row.startswith(mark) for mark in marks):
            yield f"no test is marked with the fault {row!r}"


def main() -> None:
    remarks = (remark_wording, remark_names, remark_linter_exceptions, remark_faults)
    for remark in (remark for find in remarks for remark in find()):
        print(f"remark: {remark}")


if __name__ == "__main__":
    main()
