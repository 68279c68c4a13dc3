"""Tables, JSON and the description of a model on standard output."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar

import orjson
from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from gateway.commands.target import Target
from gateway.messages import escape_unprintable, escape_unprintable_json

T = TypeVar("T")
# Piped output is not truncated.
NON_TERMINAL_WIDTH = 1000
# JSON has the raw states.
STATE_WORDS: Final = {
    "READY": "ready",
    "UP": "ready",
    "ON_DEMAND": "on demand",
    "UNAVAILABLE": "not loaded",
    "DOWN": "unreachable",
}
FAILED: Final = "failed"
STATE_COLOURS: Final = {
    "ready": "green",
    "loading": "yellow",
    "on demand": "cyan",
    **dict.fromkeys(("ejected", "unreachable", FAILED), "red"),
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


def print_entries(
    entries: Sequence[T],
    columns: Sequence[str],
    format_row: Callable[[T], Sequence[str]],
    *,
    json: bool,
) -> None:
    if json:
        print_json(entries)
    else:
        print_table(columns, map(format_row, entries))


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
    try:
        text = orjson.dumps(value, option=orjson.OPT_INDENT_2).decode()
    except orjson.JSONEncodeError:  # as in `encode_any_json`
        text = json.dumps(value, indent=2)
    sys.stdout.buffer.write(f"{escape_unprintable_json(text)}\n".encode())


REASON_TEXTS: Final = {"declared": "declared", "on_demand": "on demand"}
MODEL_COLUMNS = ("MODEL", "STATE", "VERSIONS", "REPLICAS", "REASON")


def format_state(state: str) -> str:
    return STATE_WORDS.get(state, state.lower())


def describe_model_state(model: Mapping[str, Any]) -> str:
    states = list(model.get("replicas", {}).values())
    states += [version.get("state", "") for version in model["versions"]]
    if model["ready"]:
        count = len(model.get("replicas", {}))
        ready = states.count("READY")
        return f"ready on {ready} of {count}" if ready < count else "ready"
    if "last_error" in model:
        return FAILED
    return format_state("LOADING" if "LOADING" in states else "".join(states[:1]) or "UNAVAILABLE")


def format_version(version: Mapping[str, Any], model_state: str) -> str:
    """Return the number of a version, with its state if this differs from the model's."""
    state = format_state(version.get("state", ""))
    return f"{version.get('version', '')} {'' if state == model_state else state}".strip()


def format_model_row(model: Mapping[str, Any]) -> tuple[str, ...]:
    state = describe_model_state(model)
    versions = ", ".join(format_version(version, state) for version in model["versions"])
    reasons = [REASON_TEXTS[field] for field in REASON_TEXTS if field in model]
    if "last_error" in model:
        reasons.append(model["last_error"])
    if "wished" in model:
        missing = model["wished"] == "loaded" and not model["ready"]
        reasons.insert(0, f"{'to be ' * missing}{model['wished']} by the API")
    if "behind" in model:
        reasons.append(f"outdated load on {', '.join(model['behind'])}")
    replicas = format_state_counts(model.get("replicas", {}).values())
    return model["name"], state, versions, replicas, "; ".join(reasons)


REPLICA_COLUMNS = ("REPLICA", "STATE", "OUTSTANDING", "MODELS", "REASON")


def format_replica_row(replica: Mapping[str, Any]) -> tuple[str, ...]:
    reason = replica.get("reason", "")
    if "ejected_for_s" in replica:
        reason = f"ejected for {replica['ejected_for_s']:g} s; {reason}"
    if "failing_models" in replica:
        reason = f"fails requests of {', '.join(replica['failing_models'])}; {reason}".rstrip("; ")
    cordon = ", cordoned" if replica.get("cordoned") else ""
    return (
        replica["address"],
        f"{format_state(replica['state'])}{cordon}",
        str(replica["outstanding"]),
        format_state_counts(replica["models"].values()),
        reason,
    )


RESOURCE_TABLES: Final[Mapping[str, tuple[Sequence[str], Callable[[Any], Sequence[str]]]]] = {
    "models": (MODEL_COLUMNS, format_model_row),
    "replicas": (REPLICA_COLUMNS, format_replica_row),
}
REPORT_COLUMNS = ("MODEL", "REPLICA", "STATE", "REASON")


def format_report_rows(report: Mapping[str, Any]) -> list[tuple[str, ...]]:
    model = report["model"]
    return [
        (model, at, format_state(replica["state"]), replica.get("reason", ""))
        for at, replica in report["replicas"].items()
    ]


def format_state_counts(states: Iterable[str]) -> str:
    # such as "3 ready, 1 loading"
    return ", ".join(
        f"{count} {format_state(state)}" for state, count in Counter(states).most_common()
    )


def print_resource_list(
    resource: str,
    target: Target,
    *,
    json: bool,
    is_wanted: Callable[[Mapping[str, Any]], bool] = lambda _: True,
) -> None:
    with target.connect() as client:
        entries = list(filter(is_wanted, client.request("GET", f"/v1/{resource}")[resource]))
    print_entries(entries, *RESOURCE_TABLES[resource], json=json)


TENSOR_COLUMNS: Final = ("TENSOR", "DATATYPE", "SHAPE", "REMARKS")
ANY_SIZE: Final = "any"


def print_model(model: Mapping[str, Any], curl_header: str) -> None:
    for name, value in describe_properties(model):
        sys.stdout.write(f"{name:10} {escape_unprintable(value)}\n")
    for title, tensors in (("inputs", model["inputs"]), ("outputs", model["outputs"])):
        sys.stdout.write(f"\n{title}\n")
        sys.stdout.flush()
        print_table(TENSOR_COLUMNS, map(format_tensor_row, tensors))
    sys.stdout.write(f"\ntry it\n{escape_unprintable(model['curl'])}{curl_header}\n")


def describe_properties(model: Mapping[str, Any]) -> list[tuple[str, str]]:
    batch = model["max_batch_size"]
    return [
        ("model", model["name"]),
        ("state", "ready" if model["ready"] else "not ready"),
        ("versions", ", ".join(map(str, model["versions"])) or "unknown"),
        ("platform", model["platform"] or "unknown"),
        ("batch", f"up to {batch} items per request" if batch else "one item per request"),
        ("responses", "a stream" if model["decoupled"] else "one per request"),
    ]


def format_tensor_row(tensor: Mapping[str, Any]) -> tuple[str, ...]:
    remarks = []
    if tensor.get("optional"):
        remarks.append("optional")
    if image := tensor.get("image"):
        remarks.append(f"image {image['width']} x {image['height']} {image['mode']}")
    if tensor.get("content_type"):
        remarks.append(tensor["content_type"])
    if tensor.get("labels"):
        remarks.append("labels")
    return tensor["name"], tensor["datatype"], format_sizes(tensor["shape"]), ", ".join(remarks)


def format_sizes(shape: Sequence[int]) -> str:
    sizes = [ANY_SIZE if size < 0 else str(size) for size in shape]
    return " x ".join(sizes) or "scalar"
