"""Imports go one way: from a layer to a lower one, or within a package (design: gateway/__init__)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.support.servers import ROOT

LAYERS = {
    "gateway.messages": 0,
    "gateway.names": 0,
    "gateway.errors": 1,
    "gateway.settings": 1,
    "gateway.request_info": 1,
    "gateway.config_files": 1,
    "gateway.linewriter": 1,
    "gateway.tensors": 2,
    "gateway.exposition": 2,
    "gateway.inflate": 2,
    "gateway.sse": 1,
    "gateway.http_client": 2,
    "gateway.tracing": 2,
    "gateway.audit": 2,
    "gateway.logs": 3,
    "gateway.metrics": 2,
    "gateway.keys": 2,
    "gateway.peers": 2,
    "gateway.state": 2,
    "gateway.triton": 3,
    "gateway.auth": 3,
    "gateway.process_exit": 4,
    "gateway.admission": 3,
    "gateway.decoding": 4,
    "gateway.memory": 3,
    "gateway.client": 4,
    "gateway.embedded": 4,
    "gateway.rate_limit": 4,
    "gateway.fleet": 4,
    "gateway.openapi": 5,
    "gateway.protocol": 5,
    "gateway.draining": 5,
    "gateway.routes": 6,
    "gateway.app": 7,
    "gateway.server": 7,
    "gateway.launch": 8,
    "gateway.cli": 9,
    "gateway.__main__": 10,
}
# Bytes in, values out: the code of these does no I/O, and so nothing asynchronous.
PURE = (
    "gateway/tensors",
    "gateway/exposition",
    "gateway/openapi",
    "gateway/sse.py",
    "gateway/settings.py",
)


def part_of(module: str) -> str:
    return ".".join(module.split(".")[:2])


def modules() -> Iterator[tuple[str, Path]]:
    for path in sorted((ROOT / "gateway").rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        if name != "gateway":
            yield name, path


def executed(node: ast.AST) -> Iterator[ast.AST]:
    """All of it but what is there for the type checker alone."""
    yield node
    children = ast.iter_child_nodes(node)
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        children = iter(node.orelse)
    for child in children:
        yield from executed(child)


def imports(path: Path) -> Iterator[str]:
    for node in executed(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("gateway"):
            if node.module == "gateway":
                yield from (f"gateway.{a.name}" for a in node.names if a.name != "__version__")
            else:
                yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("gateway"))


def test_every_module_has_a_layer() -> None:
    assert {part_of(name) for name, _ in modules()} == set(LAYERS)


def test_imports_go_to_lower_layers_only() -> None:
    upward = [
        f"{name} imports {imported}"
        for name, path in modules()
        for imported in imports(path)
        if part_of(imported) != part_of(name) and LAYERS[part_of(imported)] >= LAYERS[part_of(name)]
    ]
    assert not upward


def test_what_is_pure_has_no_async_in_it() -> None:
    kinds = (ast.AsyncFunctionDef, ast.AsyncFor, ast.AsyncWith, ast.Await)
    for place in PURE:
        found = ROOT / place
        for path in [found] if found.is_file() else sorted(found.rglob("*.py")):
            asynchronous = [
                node.lineno
                for node in ast.walk(ast.parse(path.read_text()))
                if isinstance(node, kinds)
            ]
            assert not asynchronous, f"{path.relative_to(ROOT)}: {asynchronous}"
