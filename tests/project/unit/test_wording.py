"""Names and sentences of the code stay standard: one name per thing, and plain English in messages."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from gateway.commands.errors import COMMAND_HINTS
from tests.support.servers import ROOT
from tests.support.source import package_trees

DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
DOCUMENTED = (ast.Module, *DEFINITIONS)
# Python and Triton look for these names.
ENTRY_POINTS = {"main", "TritonPythonModel"}
# How a docstring does not begin: with a verb in the third person or a noun phrase it says what a thing is.
OPENERS = re.compile(
    r"(what|whom?|whether|how|which|where|why|whose|who(ever)?|of|as|for|with|by|until|in|after|on|from|that|those)\b",
    re.IGNORECASE,
)
# Phrases that read as riddles in a message, each with the usual words for it.
PHRASES = {
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
LINTER_EXCEPTION = re.compile(r"# (noqa|type: ignore)")
EXPLAINED_EXCEPTION = re.compile(r"# noqa: [A-Z]+\d+ - \w|# type: ignore\[[\w-]+\]  # \w")


def list_sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def test_linter_exception_has_a_reason() -> None:
    for path in list_sources("gateway", "benchmarks", "models"):
        for line in path.read_text().splitlines():
            if LINTER_EXCEPTION.search(line):
                assert EXPLAINED_EXCEPTION.search(line), f"{path}: {line.strip()}"


# Names of the Python client that are those of the same things in the server.
CLIENT_NAMES = {"GatewayError", "InferResult"}


def test_public_name_is_defined_once() -> None:
    places = defaultdict(list)
    for path, tree in package_trees().items():
        for node in tree.body:
            if isinstance(node, DEFINITIONS) and not node.name.startswith("_"):
                places[node.name].append(path)
    assert {
        n: p for n, p in places.items() if len(p) > 1 and n not in ENTRY_POINTS | CLIENT_NAMES
    } == {}


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    openers = [
        f"{path}: {doc.splitlines()[0]}"
        for path, tree in package_trees().items()
        for node in ast.walk(tree)
        if isinstance(node, DOCUMENTED) and (doc := ast.get_docstring(node)) and OPENERS.match(doc)
    ]
    assert not openers


def messages(tree: ast.Module) -> Iterator[str]:
    """Yield every string of a module but docstrings."""
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, DOCUMENTED) and node.body and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and id(node) not in docstrings:
            yield str(node.value)


def test_messages_use_the_usual_words() -> None:
    any_phrase = re.compile("|".join(PHRASES))
    riddles = [
        f"{path}: {text!r}; better: {usual}"
        for path, tree in package_trees().items()
        for text in filter(any_phrase.search, messages(tree))
        for phrase, usual in PHRASES.items()
        if re.search(phrase, text)
    ]
    assert not riddles


def test_advice_that_commands_translate_is_given_by_the_gateway() -> None:
    texts = [
        node.value
        for module, tree in package_trees().items()
        if not module.startswith("gateway.commands.")
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    for hint in COMMAND_HINTS:
        assert any(hint in text for text in texts), hint
