"""The public names, one per line: settings, paths, codes, metrics, log fields, commands, flags, values and
the Python client.

Settings, codes, metrics, log fields and values of the chart are read from the documentation, which
other tests compare with the code.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator
from typing import Any

import typer.main

import gateway.client
from gateway.cli import root_cli
from tests.support.servers import ROOT

NAMES_FILE = ROOT / "docs" / "interface.txt"
HEADER = "# Public names, recorded by `make interface`; docs/reference/stability.md says what is promised.\n"


def read(document: str) -> str:
    return (ROOT / "docs" / document).read_text()


def list_settings() -> Iterator[str]:
    # The rows, and the files with secrets, which have none.
    settings = read("reference/settings.md")
    rows = re.findall(r"^\| `(GATEWAY_\w+)`", settings, re.M)
    for name in (*rows, *re.findall(r"`(GATEWAY_\w+_FILE)`", settings)):
        yield f"setting {name}"


def list_codes() -> Iterator[str]:
    for status, code in re.findall(r"^\| (\d{3}) \| `(\w+)` \|", read("reference/errors.md"), re.M):
        yield f"code {status} {code}"


def list_metrics() -> Iterator[str]:
    rows = re.findall(
        r"^\| `(gateway_\w+)` \| (\w+) \| ([^|]*) \|", read("operate/metrics.md"), re.M
    )
    for name, kind, labels in rows:
        yield f"metric {kind} {name}{{{labels.strip()}}}"


def read_log_fields(logger: str) -> set[str]:
    """Return the fields of the documented line of a logger."""
    lines = map(json.loads, re.findall(r'^\{"time":.*\}$', read("operate/metrics.md"), re.M))
    (fields,) = (set(line) for line in lines if line["logger"] == logger)
    return fields


def list_log_fields() -> Iterator[str]:
    for logger in ("gateway.access", "gateway.audit"):
        for field in read_log_fields(logger):
            yield f"field {logger} {field}"


def list_paths(document: dict[str, Any]) -> Iterator[str]:
    for path, operations in document["paths"].items():
        for method in operations:
            yield f"path {method.upper()} {path}"


def list_commands(command: Any = None, words: tuple[str, ...] = ()) -> Iterator[str]:
    command = typer.main.get_command(root_cli) if command is None else command
    name = " ".join(("triton-gateway", *words))
    yield f"command {name}"
    for parameter in command.params:
        for flag in (*parameter.opts, *parameter.secondary_opts):
            if flag.startswith("-"):
                yield f"flag {name} {flag}"
    for word, child in getattr(command, "commands", {}).items():
        yield from list_commands(child, (*words, word))


def list_values() -> Iterator[str]:
    for name in re.findall(
        r"^\| `([\w.]+)` \|", read("../deploy/helm/triton-gateway/README.md"), re.M
    ):
        yield f"value {name}"


def list_client() -> Iterator[str]:
    """The classes of the Python client, their methods and properties, and the parameters of these."""
    for kind in gateway.client.__all__:
        for name, member in getattr(getattr(gateway.client, kind), "__dict__", {}).items():
            if isinstance(member, property):
                yield f"python {kind}.{name}"
            elif inspect.isfunction(member) and (name == "__init__" or not name.startswith("_")):
                for parameter in list(inspect.signature(member).parameters)[1:] or [""]:
                    yield f"python {kind}.{name} {parameter}".rstrip()


def list_names(document: dict[str, Any]) -> set[str]:
    return {
        *list_settings(),
        *list_codes(),
        *list_metrics(),
        *list_log_fields(),
        *list_paths(document),
        *list_commands(),
        *list_values(),
        *list_client(),
    }


def format_names(names: set[str]) -> str:
    return HEADER + "".join(f"{name}\n" for name in sorted(names))


def read_recorded_names() -> set[str]:
    lines = NAMES_FILE.read_text().splitlines()
    return {line for line in lines if line and not line.startswith("#")}
