"""Imports follow the table in docs/contribute/architecture.md: down, or within a row, never in a circle."""

from __future__ import annotations

import ast
import re
from functools import cache
from graphlib import TopologicalSorter

import pytest

from tests.support.servers import ROOT
from tests.support.source import package_trees

LAYOUT = (
    (ROOT / "docs/contribute/architecture.md")
    .read_text()
    .partition("## Layout")[2]
    .partition("\n## ")[0]
)
# The rows of the table, from the lowest to the highest.
ROWS = [re.findall(r"`(\w+)(?:/|\.py)`", row) for row in re.findall(r"^\| (`.*?) \|", LAYOUT, re.M)]
LAYERS = {f"gateway.{name}": layer for layer, row in enumerate(reversed(ROWS)) for name in row}
# The commands and the Python client are users of the API: they depend on nothing of the server.
CLIENT_DEPENDENCIES = {
    "gateway.client": ("client", "media_types"),
    "gateway.commands": (
        "client",
        "commands",
        "http_client",
        "errors",
        "media_types",
        "messages",
        "webhooks",
    ),
}
# What Windows or macOS lack: modules, and functions of modules that they have.
MODULES_OF_LINUX = {
    "fcntl", "grp", "posix", "pty", "pwd", "resource", "signal", "syslog", "termios", "uvloop",
}  # fmt: skip
FUNCTIONS_OF_LINUX = re.compile(
    r"os\.(fork\w*|register_at_fork|kill\w*|get\w*uid|sched_\w+|posix_\w+|sendfile|memfd_create)"
    r"|.*\.add_signal_handler"
)
PAGE_PARSER = "gateway.telemetry.exposition"
# Bytes in, values out: these modules do no I/O, and so contain nothing asynchronous.
PURE = (
    "gateway.tensors",
    "gateway.telemetry.exposition",
    "gateway.routes.examples",
    "gateway.routes.model_openapi",
    "gateway.routes.openapi",
    "gateway.headers",
    "gateway.routes.passthrough.sse",
    "gateway.repository.plan",
    "gateway.repository.placement",
    "gateway.config.settings",
    "gateway.server.protocol.parser",
    "gateway.http_client.response",
)
CAPABILITIES = "gateway.capabilities."
INSTALLED = f"{CAPABILITIES}installed"
# The values with which a capability describes itself.
DESCRIPTION = f"{CAPABILITIES}capability"
# Imports that no test of the core and no common helper has.
BEYOND_THE_CORE = (
    r"^ *(?:from|import) (?:gateway|tests)(?:\.| import )"
    r"(?:capabilities(?!\.capability )|attacks|chaos|project)\b.*"
)
COMPOSERS = (
    "gateway.app",
    "gateway.cli",
    "gateway.doctor.checks",
    "gateway.server.launch",
)  # they use every capability of the list
DESCRIBED = (
    *COMPOSERS,
    "gateway.doctor.gpu",
    "gateway.server.welcome",
)  # they use what capabilities say of themselves
ASYNC_NODES = (ast.AsyncFunctionDef, ast.AsyncFor, ast.AsyncWith, ast.Await)
# Private names of libraries that a module may use until it needs them no longer.
PRIVATE_NAMES = {
    "gateway.capabilities.versions.mirror": {"_pool"},  # of a class of the gateway
}
# Documented, in spite of their names.
PUBLIC_UNDERSCORES = {"_replace", "_exit"}


def find_imports(module: str) -> set[str]:
    """Return the modules of the gateway that a module imports anywhere, for type checking included."""
    imported = set()
    modules = package_trees().keys()
    for node in ast.walk(package_trees()[module]):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            imported |= {name if name in modules else node.module for name in names}
        elif isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
    return imported & modules - {"gateway", module}


@cache
def package_imports() -> dict[str, set[str]]:
    return {module: find_imports(module) for module in package_trees()}


def package_of(module: str) -> str:
    return ".".join(module.split(".")[:2])


def test_table_of_the_layout_has_every_package() -> None:
    assert {package_of(module) for module in package_trees()} - {"gateway"} == LAYERS.keys()


def test_imports_go_down_the_table() -> None:
    upward = [
        f"{module} imports {imported}"
        for module, imports in package_imports().items()
        for imported in imports
        if LAYERS[package_of(imported)] > LAYERS[package_of(module)]
    ]
    assert not upward


def test_imports_have_no_cycle() -> None:
    TopologicalSorter(package_imports()).prepare()  # raises CycleError, which shows the cycle


def room_imports() -> dict[str, set[str]]:
    rooms: dict[str, set[str]] = {}
    for module, imports in package_imports().items():
        used = rooms.setdefault(package_of(module), set())
        used |= {package_of(imported) for imported in imports} - {package_of(module)}
    return rooms


def test_rooms_import_each_other_without_a_circle() -> None:
    TopologicalSorter(room_imports()).prepare()  # raises CycleError, which shows the circle


def test_drawing_of_the_rooms_is_current() -> None:
    """It has the folders, and no arrow to a room that is reached through another one."""
    rooms = room_imports()
    reached = dict[str, set[str]]()
    for room in TopologicalSorter(rooms).static_order():
        reached[room] = rooms[room].union(*(reached[used] for used in rooms[room]))
    folders = {
        name for name in rooms if (ROOT.joinpath(*name.split("."))).is_dir() and name != "gateway"
    }
    arrows = [
        f"    {room.partition('.')[2]} --> {used.partition('.')[2]}"
        for room in sorted(folders)
        for used in sorted(reached[room] & folders)
        if not any(used in reached[between] for between in reached[room] & folders)
    ]
    drawing = LAYOUT.partition("flowchart TB\n")[2].partition("```")[0]
    assert [line for line in drawing.splitlines() if "-->" in line] == arrows


def capability_of(module: str) -> str:
    """Return the name of the capability that a module belongs to; empty for the core."""
    return module.removeprefix(CAPABILITIES).partition(".")[0] if CAPABILITIES in module else ""


def test_core_imports_no_capability() -> None:
    foreign = [
        f"{module} imports {imported}"
        for module, imports in package_imports().items()
        for imported in imports
        if imported.startswith(CAPABILITIES)
        and capability_of(imported) != capability_of(module)
        and module != INSTALLED
        and (imported != INSTALLED or module not in COMPOSERS)
        and (imported != DESCRIPTION or not (module in DESCRIBED or capability_of(module)))
    ]
    assert not foreign


def test_tests_of_the_core_import_no_capability() -> None:
    """A capability is deleted with its tests, and those of the core and of the others still run."""
    files = [ROOT / "tests/conftest.py"]
    files += [*(ROOT / "tests/core").rglob("*.py"), *(ROOT / "tests/support").rglob("*.py")]
    assert len(files) > 100
    foreign = [
        f"{file.relative_to(ROOT)}: {line}"
        for file in files
        for line in re.findall(BEYOND_THE_CORE, file.read_text(), re.MULTILINE)
    ]
    assert not foreign


@pytest.mark.parametrize("room", CLIENT_DEPENDENCIES)
def test_clients_import_no_module_of_the_server(room: str) -> None:
    foreign = [
        f"{module} imports {name}"
        for module, imports in package_imports().items()
        if package_of(module) == room
        for name in imports
        if package_of(name).removeprefix("gateway.") not in CLIENT_DEPENDENCIES[room]
        and not (room == "gateway.commands" and name == PAGE_PARSER)
    ]
    assert not foreign


def test_client_uses_nothing_of_one_operating_system() -> None:
    names = {
        f"{module}: {name}"
        for module, tree in package_trees().items()
        if package_of(module) in ("gateway.client", "gateway.media_types")
        for node in ast.walk(tree)
        for name in list_imported_names(node)
        if name.split(".")[0] in MODULES_OF_LINUX or FUNCTIONS_OF_LINUX.fullmatch(name)
    }
    assert not names


def list_imported_names(node: ast.AST) -> list[str]:
    """Return the modules that a node imports, or the attribute of a module that it is."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return [ast.unparse(node)] if isinstance(node, ast.Attribute) else []


@pytest.mark.parametrize("name", PURE)
def test_pure_module_has_no_asynchronous_code(name: str) -> None:
    asynchronous = [
        f"{module}:{node.lineno}"
        for module, tree in package_trees().items()
        if name in (module, package_of(module))
        for node in ast.walk(tree)
        if isinstance(node, ASYNC_NODES)
    ]
    assert not asynchronous


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def find_private_names(tree: ast.Module) -> tuple[set[str], set[str]]:
    """Return the private names that a module defines, and those that it uses."""
    defined: set[str] = set()
    used: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name) | ast.AsyncFunctionDef(name) | ast.ClassDef(name):
                defined.add(name)
            case ast.Name(name, ast.Store()) | ast.Attribute(ast.Name("self"), name, ast.Store()):
                defined.add(name)
            case ast.Attribute(_, name):
                used.add(name)
            case ast.ImportFrom(module, names) if not (module or "").startswith("gateway"):
                used.update(alias.name for alias in names)
    return set(filter(is_private, defined)), set(filter(is_private, used))


def test_no_private_name_of_a_library_is_used() -> None:
    for module, tree in package_trees().items():
        defined, used = find_private_names(tree)
        allowed = PUBLIC_UNDERSCORES | PRIVATE_NAMES.get(module, set())
        assert used - defined <= allowed, module
