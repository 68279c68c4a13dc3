"""The public names, one per line: settings, paths, statuses with their codes, metrics, log fields, commands
with their flags, variables and exit statuses, values of the chart and the Python client.

Settings, codes, metrics, log fields, exit statuses and values are read from the documentation, which other
tests compare with the code.
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
from gateway.routes.passthrough.rules import ROUTE_RULES, Refusal
from gateway.telemetry.audit import OPTIONAL_FIELDS
from tests.interface import openapi
from tests.support.servers import ROOT

NAMES_FILE = ROOT / "docs" / "interface.txt"
HEADER = "# Public names, recorded by `make interface`; docs/reference/stability.md says what is promised.\n"


def read(document: str) -> str:
    return (ROOT / "docs" / document).read_text()


def list_settings() -> Iterator[str]:
    # The rows, and the files with secrets, which have none.
    settings = read("reference/settings.md") + read("reference/settings-advanced.md")
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


# Fields that a line has only if they have a value.
OPTIONAL_LOG_FIELDS = {
    "gateway.access": ("subject", "span_id"),
    "gateway.audit": OPTIONAL_FIELDS,
    "gateway.refusals": ("route",),
}


def list_log_fields() -> Iterator[str]:
    refusals = re.findall(r"^[\d:]+ warning refused .*$", read("operate/metrics.md"), re.M)
    documented = {
        "gateway.access": read_log_fields("gateway.access"),
        "gateway.audit": read_log_fields("gateway.audit"),
        "gateway.refusals": set(re.findall(r" (\w+)=", " ".join(refusals))),
    }
    for logger, fields in documented.items():
        for field in fields.union(OPTIONAL_LOG_FIELDS[logger]):
            yield f"field {logger} {field}"


def list_paths(document: dict[str, Any]) -> Iterator[str]:
    for path, operations in document["paths"].items():
        for method in operations:
            yield f"path {method.upper()} {path}"


def list_pages() -> Iterator[str]:
    """The paths for browsers, which the OpenAPI document leaves out."""
    for route in openapi.build_framework().routes:
        if not getattr(route, "include_in_schema", True) and "{" not in route.path:
            yield f"path GET {route.path}"


def list_forwarded_paths() -> Iterator[str]:
    """The paths of Triton that are forwarded or answered; what is in brackets may be left out."""
    for rule in ROUTE_RULES:
        if not isinstance(rule.action, Refusal):
            path = re.sub(r"\(\?P<(\w+)>\[\^/\]\+\)", r"{\1}", rule.pattern.pattern)
            path = re.sub(r"\((?:\?:)?(/[^()]*)\)\?", r"[\1]", path)
            for method in rule.methods - {"HEAD"}:
                yield f"path {method} {path.replace('(?:', '(')}"


def list_exit_statuses() -> Iterator[str]:
    section = read("use/cli.md").partition("\n## Exit statuses\n")[2]
    for status in re.findall(r"^\| (\d+) \|", section, re.M):
        yield f"exit {status}"


def list_commands(command: Any = None, words: tuple[str, ...] = ()) -> Iterator[str]:
    command = typer.main.get_command(root_cli) if command is None else command
    name = " ".join(("triton-gateway", *words))
    yield f"command {name}"
    for parameter in command.params:
        for flag in (*parameter.opts, *parameter.secondary_opts):
            if flag.startswith("-"):
                yield f"flag {name} {flag}"
        variables = parameter.envvar or []
        for variable in [variables] if isinstance(variables, str) else variables:
            yield f"variable {variable}"
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
        *list_pages(),
        *list_forwarded_paths(),
        *list_commands(),
        *list_exit_statuses(),
        *list_values(),
        *list_client(),
    }


def format_names(names: set[str]) -> str:
    return HEADER + "".join(f"{name}\n" for name in sorted(names))


def read_recorded_names() -> set[str]:
    lines = NAMES_FILE.read_text().splitlines()
    return {line for line in lines if line and not line.startswith("#")}
