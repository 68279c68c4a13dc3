"""Tables and JSON on standard output."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import orjson
from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from gateway.messages import escape_unprintable, escape_unprintable_json

# Piped output is not truncated.
NON_TERMINAL_WIDTH = 1000
STATE_COLOURS = {
    **dict.fromkeys(("READY", "HEALTHY", "UP", "yes"), "green"),
    "LOADING": "yellow",
    "ON_DEMAND": "cyan",
    **dict.fromkeys(("EJECTED", "DOWN", "UNAVAILABLE", "no"), "red"),
}


def build_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD if sys.stdout.isatty() else None, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        cells = (Text(escape_unprintable(cell), STATE_COLOURS.get(cell, "")) for cell in row)
        table.add_row(*cells)
    return table


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    print_renderable(build_table(columns, rows))


def print_renderable(renderable: RenderableType) -> None:
    console = Console() if sys.stdout.isatty() else Console(width=NON_TERMINAL_WIDTH)
    if console.is_terminal:
        console.print(renderable)
        return
    with console.capture() as captured:
        console.print(renderable)
    for line in captured.get().splitlines():
        sys.stdout.write(f"{line.rstrip()}\n")  # rich pads every line


def print_json(value: Any) -> None:
    text = orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE).decode()
    sys.stdout.buffer.write(escape_unprintable_json(text).encode())


REASON_TEXTS: Final = {"declared": "declared", "on_demand": "on demand"}
MODEL_COLUMNS = ("MODEL", "READY", "VERSIONS", "REPLICAS", "REASON")


def format_model_row(model: Mapping[str, Any]) -> tuple[str, ...]:
    versions = ", ".join(
        f"{version.get('version', '')} {version.get('state', '')}".strip()
        for version in model["versions"]
    )
    versions = versions or model.get("state", "")
    reasons = [REASON_TEXTS[field] for field in REASON_TEXTS if field in model]
    if "last_error" in model:
        reasons.append(model["last_error"])
    if "wished" in model:
        missing = model["wished"] == "loaded" and not model["ready"]
        reasons.insert(0, f"{'to be ' * missing}{model['wished']} by the API")
    if "behind" in model:
        reasons.append(f"outdated load on {', '.join(model['behind'])}")
    ready = "yes" if model["ready"] else "no"
    replicas = format_state_counts(model.get("replicas", {}).values())
    return model["name"], ready, versions, replicas, "; ".join(reasons)


REPLICA_COLUMNS = ("REPLICA", "STATE", "OUTSTANDING", "SLOWNESS", "MODELS", "REASON")


def format_replica_row(replica: Mapping[str, Any]) -> tuple[str, ...]:
    reason = replica.get("reason", "")
    if "ejected_for_s" in replica:
        reason = f"ejected for {replica['ejected_for_s']:g} s; {reason}"
    cordon = ", CORDONED" if replica.get("cordoned") else ""
    return (
        replica["address"],
        f"{replica['state']}{cordon}",
        str(replica["outstanding"]),
        f"{replica['slowness']:g}",
        format_state_counts(replica["models"].values()),
        reason,
    )


RESOURCE_TABLES: Final[Mapping[str, tuple[Sequence[str], Callable[[Any], Sequence[str]]]]] = {
    "models": (MODEL_COLUMNS, format_model_row),
    "replicas": (REPLICA_COLUMNS, format_replica_row),
}
REPORT_COLUMNS = ("MODEL", "REPLICA", "STATE", "REASON")


def format_report_rows(report: Mapping[str, Any]) -> list[tuple[str, ...]]:
    model, replicas = report["model"], report["replicas"].items()
    return [(model, at, replica["state"], replica.get("reason", "")) for at, replica in replicas]


def format_state_counts(states: Iterable[str]) -> str:
    # such as "3 READY, 1 LOADING"
    return ", ".join(f"{count} {state}" for state, count in Counter(states).most_common())
