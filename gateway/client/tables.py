"""What the gateway says, as a table for a person or as JSON for a script, on standard output."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import orjson
from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from gateway.messages import escape_unprintable, escape_unprintable_json

# Of what is piped into a file or a program nothing is cut.
NON_TERMINAL_WIDTH = 1000
STATE_COLOURS = {
    "READY": "green",
    "HEALTHY": "green",
    "UP": "green",
    "yes": "green",
    "LOADING": "yellow",
    "EJECTED": "red",
    "DOWN": "red",
    "UNAVAILABLE": "red",
    "no": "red",
}


def create_console() -> Console:
    return Console() if sys.stdout.isatty() else Console(width=NON_TERMINAL_WIDTH)


def build_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    made = Table(box=box.SIMPLE_HEAD if sys.stdout.isatty() else None, pad_edge=False)
    for column in columns:
        made.add_column(column, overflow="fold")
    for row in rows:
        made.add_row(*(Text(escape_unprintable(cell), STATE_COLOURS.get(cell, "")) for cell in row))
    return made


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    print_renderable(build_table(columns, rows))


def print_renderable(renderable: RenderableType) -> None:
    """On standard output; without blanks at the ends of lines where it is no terminal."""
    made = create_console()
    if made.is_terminal:
        made.print(renderable)
        return
    with made.capture() as captured:
        made.print(renderable)
    for line in captured.get().splitlines():
        sys.stdout.write(f"{line.rstrip()}\n")


def print_json(value: Any) -> None:
    text = orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE).decode()
    sys.stdout.buffer.write(escape_unprintable_json(text).encode())


MODEL_COLUMNS = ("MODEL", "READY", "VERSIONS", "REPLICAS", "WHY")


def format_model_row(model: Mapping[str, Any]) -> tuple[str, ...]:
    versions = ", ".join(
        f"{version.get('version', '')} {version.get('state', '')}".strip()
        for version in model["versions"]
    )
    why = [word for word in ("declared", "last_error") if word in model]
    told = [model["last_error"] if word == "last_error" else word for word in why]
    if "wished" in model:
        missing = model["wished"] == "loaded" and not model["ready"]
        told.insert(0, f"{'to be ' * missing}{model['wished']} by the API")
    if "behind" in model:
        told.append(f"an older load on {', '.join(model['behind'])}")
    replicas = format_state_counts(model.get("replicas", {}).values())
    return (model["name"], "yes" if model["ready"] else "no", versions, replicas, "; ".join(told))


REPLICA_COLUMNS = ("REPLICA", "STATE", "OUTSTANDING", "SLOWNESS", "MODELS", "WHY")


def format_replica_row(replica: Mapping[str, Any]) -> tuple[str, ...]:
    why = replica.get("reason", "")
    if "ejected_for_s" in replica:
        why = f"left alone for {replica['ejected_for_s']:g} s; {why}"
    return (
        replica["address"],
        replica["state"],
        str(replica["outstanding"]),
        f"{replica['slowness']:g}",
        format_state_counts(replica["models"].values()),
        why,
    )


REPORT_COLUMNS = ("MODEL", "REPLICA", "STATE", "WHY")


def format_report_rows(report: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Of a load or an unload: a line for each replica."""
    return [
        (report["model"], address, found["state"], found.get("reason", ""))
        for address, found in report["replicas"].items()
    ]


def format_state_counts(states: Iterable[str]) -> str:
    """«3 READY, 1 LOADING»."""
    return ", ".join(f"{count} {state}" for state, count in Counter(states).most_common())
