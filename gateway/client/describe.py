"""The description of a model for a person: state, inputs, outputs, and a request to paste."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

from gateway.client import tables
from gateway.messages import escape_unprintable

TENSOR_COLUMNS: Final = ("TENSOR", "DATATYPE", "SHAPE", "REMARKS")
ANY_SIZE: Final = "any"


def print_model(model: Mapping[str, Any], curl_header: str) -> None:
    """Print the answer of `/v1/models/NAME`. `curl_header` is appended to the curl command."""
    for name, value in describe_properties(model):
        sys.stdout.write(f"{name:10} {escape_unprintable(value)}\n")
    for title, tensors in (("inputs", model["inputs"]), ("outputs", model["outputs"])):
        sys.stdout.write(f"\n{title}\n")
        sys.stdout.flush()
        tables.print_table(TENSOR_COLUMNS, map(format_tensor_row, tensors))
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
