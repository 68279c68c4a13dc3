"""Tables, JSON and the description of a model on standard output."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from gateway.messages import escape_unprintable, escape_unprintable_json

# Piped output is not truncated.
NON_TERMINAL_WIDTH: Final = 1000
COLOURS: Final = {
    "ready": "green",
    "loading": "yellow",
    "on demand": "cyan",
    **dict.fromkeys(("ejected", "unreachable", "failed"), "red"),
}
TENSOR_COLUMNS: Final = ("TENSOR", "DATATYPE", "SHAPE", "REMARKS")


def build_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD if sys.stdout.isatty() else None, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        cells = (Text(escape_unprintable(cell), COLOURS.get(cell, "")) for cell in row)
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
    text = json.dumps(value, indent=2, ensure_ascii=False)
    sys.stdout.buffer.write(f"{escape_unprintable_json(text)}\n".encode())


def print_model(model: Mapping[str, Any], curl_header: str) -> None:
    batch = model["max_batch_size"]
    properties = {
        "model": model["name"],
        "state": "ready" if model["ready"] else "not ready",
        "versions": ", ".join(map(str, model["versions"])) or "unknown",
        "platform": model["platform"] or "unknown",
        "batch": f"up to {batch} items per request" if batch else "one item per request",
        "responses": "a stream" if model["decoupled"] else "one per request",
    }
    for name, value in properties.items():
        sys.stdout.write(f"{name:10} {escape_unprintable(value)}\n")
    for title in ("inputs", "outputs"):
        sys.stdout.write(f"\n{title}\n")
        sys.stdout.flush()
        print_table(TENSOR_COLUMNS, map(format_tensor_row, model[title]))
    sys.stdout.write(f"\ntry it\n{escape_unprintable(model['curl'])}{curl_header}\n")


def format_tensor_row(tensor: Mapping[str, Any]) -> tuple[str, ...]:
    remarks = ["optional"] if tensor.get("optional") else []
    if image := tensor.get("image"):
        remarks.append(f"image {image['width']} x {image['height']} {image['mode']}")
    if tensor.get("content_type"):
        remarks.append(tensor["content_type"])
    if tensor.get("labels"):
        remarks.append("labels")
    sizes = ["any" if size < 0 else str(size) for size in tensor["shape"]]
    return tensor["name"], tensor["datatype"], " x ".join(sizes) or "scalar", ", ".join(remarks)
