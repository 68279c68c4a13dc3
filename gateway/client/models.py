"""Descriptions of models and their tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class TensorInfo:
    """An input or output. `shape` is without the batch dimension; -1 is any size.

    `document` has every field of the gateway.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    is_optional: bool = False
    content_type: str = ""
    document: Mapping[str, Any] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class ModelInfo:
    """A model. A list of models has no inputs and outputs. `document` has every field of the gateway."""

    name: str
    is_ready: bool
    versions: tuple[str, ...]
    inputs: tuple[TensorInfo, ...] = ()
    outputs: tuple[TensorInfo, ...] = ()
    is_decoupled: bool = False
    max_batch_size: int = 0
    document: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def has_only_numbers(self) -> bool:
        return all(tensor.datatype != "BYTES" for tensor in self.outputs)

    @property
    def datatypes(self) -> dict[str, str]:
        return {tensor.name: tensor.datatype for tensor in self.outputs}

    def find_input_for(self, named: Mapping[str, Any]) -> str:
        """Return the only required input that is not in `named`. Raises `TypeError` if there is not one."""
        free = [tensor.name for tensor in self.inputs if tensor.name not in named]
        required = [tensor.name for tensor in self.inputs if not tensor.is_optional]
        candidates = [name for name in free if name in required] or free
        if len(candidates) != 1:
            names = ", ".join(candidates) or "no input"
            raise TypeError(f"a value without a name could be {names}: pass it by name")
        return candidates[0]


def parse_model(document: Mapping[str, Any]) -> ModelInfo:
    """Return a model of a list or a description. Raises `LookupError` or `TypeError` for another document."""
    versions = document["versions"]
    return ModelInfo(
        document["name"],
        document["ready"],
        tuple(each if isinstance(each, str) else each.get("version", "") for each in versions),
        parse_tensors(document.get("inputs", ())),
        parse_tensors(document.get("outputs", ())),
        is_decoupled=document.get("decoupled", False),
        max_batch_size=document.get("max_batch_size", 0),
        document=document,
    )


def parse_tensors(documents: Sequence[Mapping[str, Any]]) -> tuple[TensorInfo, ...]:
    return tuple(
        TensorInfo(
            each["name"],
            each["datatype"],
            tuple(each["shape"]),
            is_optional=each.get("optional", False),
            content_type=each.get("content_type", ""),
            document=each,
        )
        for each in documents
    )
