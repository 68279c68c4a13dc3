"""Descriptions of models and their tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn

# A model in these states is ready, or about to be.
AWAITED_STATES: Final = ("LOADING", "READY")


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
class ListedModel:
    """A model of a list, which does not describe it. `document` has every field of the gateway."""

    name: str
    is_ready: bool
    versions: tuple[str, ...]
    document: Mapping[str, Any] = field(repr=False)

    def __getattr__(self, name: str) -> NoReturn:
        if name in ModelInfo.__annotations__:
            raise AttributeError(
                f"a list does not describe models: model({self.name!r}).{name} does"
            )
        raise AttributeError(name)


@dataclass(frozen=True)
class ModelInfo(ListedModel):
    """A model with its inputs and outputs."""

    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    is_decoupled: bool
    max_batch_size: int

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


def parse_models(document: Mapping[str, Any]) -> list[ListedModel]:
    return [
        ListedModel(
            each["name"],
            each["ready"],
            tuple(version.get("version", "") for version in each["versions"]),
            each,
        )
        for each in document["models"]
    ]


def parse_model(document: Mapping[str, Any]) -> ModelInfo:
    return ModelInfo(
        document["name"],
        document["ready"],
        tuple(map(str, document["versions"])),
        document,
        parse_tensors(document.get("inputs", ())),
        parse_tensors(document.get("outputs", ())),
        document.get("decoupled", False),
        document.get("max_batch_size", 0),
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


def is_model_awaited(document: Mapping[str, Any], name: str, version: str) -> bool:
    """Return whether a model of a list is ready or will be without anybody's doing."""
    for model in document["models"]:
        if model["name"] == name:
            wish = model.get("wished", "loaded" if model.get("declared") else "")
            versions = (each for each in model["versions"] if version in ("", each.get("version")))
            return wish == "loaded" or any(each.get("state") in AWAITED_STATES for each in versions)
    return False
