"""The models file. Readiness waits for the models that it declares, and the API cannot unload them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

import orjson

from gateway.config_files import YAML_ERRORS, WatchedFile, parse_yaml, read_config_file
from gateway.messages import CommandError
from gateway.names import VERSION_NUMBER
from gateway.version_labels import InvalidLabel, ModelLabels, check_label_name, parse_label

MODEL_KEYS: Final = frozenset(
    ("name", "versions", "config", "labels", "required", "on_demand", "replicas")
)


class BadModelsFile(CommandError):
    """An invalid or unreadable models file."""


@dataclass(frozen=True)
class CopyLimits:
    """The number of replicas that may hold an on-demand model."""

    minimum: int = 1
    maximum: int = 1


@dataclass(frozen=True)
class DeclaredModel:
    """A model that must be served; without `versions`, any version is sufficient.

    A gateway that cannot serve a model that `is_always_required` is not ready. With `copies`, a model is
    loaded on demand instead.
    """

    name: str
    versions: tuple[str, ...] = ()
    config: Mapping[str, Any] | str | None = None
    labels: ModelLabels = field(default_factory=dict)
    copies: CopyLimits | None = None
    is_always_required: bool = False

    @property
    def load_parameters(self) -> dict[str, Any]:
        return {} if self.config is None else {"config": self.config}

    @cached_property
    def config_digest(self) -> str:
        """Return a digest that changes with the config; empty without a config."""
        if self.config is None:
            return ""
        document = orjson.dumps(self.config, option=orjson.OPT_SORT_KEYS)
        return blake2b(document, digest_size=8).hexdigest()


def parse_models_file(text: str) -> dict[str, DeclaredModel]:
    """Return the models in a models file by name. Raises `BadModelsFile`."""
    try:
        document = parse_yaml(text)
        orjson.dumps(drop_labels(document))  # Triton accepts only JSON
    except YAML_ERRORS as exc:
        raise BadModelsFile(f"cannot be parsed: {' '.join(str(exc).split())}") from None
    if document is None:
        return {}
    if not isinstance(document, dict) or set(document) != {"models"}:
        raise BadModelsFile("the only key must be 'models', as in models: [NAME, …]")
    entries = [] if document["models"] is None else document["models"]
    if not isinstance(entries, list):
        raise BadModelsFile("'models' must be a list")
    declared = [parse_declared_model(entry) for entry in entries]
    models = {model.name: model for model in declared}
    if len(models) < len(declared):
        raise BadModelsFile("a model is listed twice")
    return models


def drop_labels(document: Any) -> Any:
    """Return the document without labels, whose versions may be written as numbers."""
    if isinstance(document, list):
        return list(map(drop_labels, document))
    if isinstance(document, dict):
        kept = {key: value for key, value in document.items() if key != "labels"}
        return {**kept, "models": drop_labels(kept["models"])} if "models" in kept else kept
    return document


def parse_declared_model(entry: Any) -> DeclaredModel:
    if isinstance(entry, str) and entry:
        return DeclaredModel(entry)
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str) or not entry["name"]:
        raise BadModelsFile(
            f"{repr(entry)[:80]} is not a valid model; write NAME or {{name: NAME}}"
        )
    if unknown := set(entry) - MODEL_KEYS:
        raise BadModelsFile(
            f"model {entry['name']!r} has an unknown key {min(map(str, unknown))!r}; "
            "valid keys are name, versions, config, labels, required, on_demand and replicas"
        )
    versions = entry.get("versions") or []
    if not isinstance(versions, list) or not all(
        VERSION_NUMBER.fullmatch(str(version)) for version in versions
    ):
        raise BadModelsFile(f"versions of model {entry['name']!r} must be a list of numbers")
    config = entry.get("config")
    if config is not None and not isinstance(config, (dict, str)):
        raise BadModelsFile(f"config of model {entry['name']!r} must be an object")
    labels = parse_declared_labels(entry["name"], entry.get("labels") or {})
    versions = tuple(str(version) for version in versions)
    copies = parse_copy_limits(entry)
    is_required = parse_required(entry)
    return DeclaredModel(entry["name"], versions, config, labels, copies, is_required)


def parse_declared_labels(model: str, labels: Any) -> ModelLabels:
    """Parse labels by name, each with a version, or with the object that the API accepts."""
    if not isinstance(labels, dict):
        raise BadModelsFile(f"labels of model {model!r} must be an object, such as {{stable: 1}}")
    declared = {}
    for name, value in labels.items():
        try:
            check_label_name(str(name))
            label = parse_label(value if isinstance(value, dict) else {"version": value})
        except InvalidLabel as exc:
            raise BadModelsFile(f"label {str(name)!r} of model {model!r}: {exc}") from None
        declared[str(name)] = label
    return declared


def parse_required(entry: Mapping[str, Any]) -> bool:
    """Return whether a gateway that cannot serve the model is not ready."""
    name = entry["name"]
    if "required" not in entry:
        return False
    if entry["required"] != "always":
        raise BadModelsFile(f"required of model {name!r} must be always, or be left out")
    if entry.get("on_demand"):
        raise BadModelsFile(f"model {name!r} has required, which on_demand: true does not permit")
    return True


def parse_copy_limits(entry: Mapping[str, Any]) -> CopyLimits | None:
    """Return the limits of an on-demand model; None for a model that is always loaded."""
    name, on_demand = entry["name"], entry.get("on_demand", False)
    if not isinstance(on_demand, bool):
        raise BadModelsFile(f"on_demand of model {name!r} must be true or false")
    if not on_demand:
        if "replicas" in entry:
            raise BadModelsFile(
                f"model {name!r} has replicas, which only a model with on_demand: true can have"
            )
        return None
    if entry.get("versions"):
        raise BadModelsFile(f"model {name!r} has versions, which on_demand: true does not permit")
    written = entry.get("replicas", 1)
    limits = written if isinstance(written, dict) else {"min": written, "max": written}
    minimum: Any = limits.get("min", 1)
    maximum: Any = limits.get("max", minimum)
    are_numbers = type(minimum) is int and type(maximum) is int
    if are_numbers and limits.keys() <= {"min", "max"} and 1 <= minimum <= maximum:
        return CopyLimits(minimum, maximum)
    raise BadModelsFile(
        f"replicas of model {name!r} must be a number above 0, or {{min: 1, max: 3}}"
    )


def read_models_file(path: Path) -> Mapping[str, DeclaredModel]:
    """Return the declared models by name. Raises `BadModelsFile`, which names the file."""
    try:
        return parse_models_file(read_config_file(path))
    except OSError as exc:
        raise BadModelsFile(f"the models file {path}: {exc.strerror}") from None
    except (UnicodeDecodeError, BadModelsFile) as exc:
        raise BadModelsFile(f"the models file {path}: {exc}") from None


class ModelsFile:
    """The declared models, and those to load on demand; none without a file."""

    def __init__(self, path: Path | None) -> None:
        self.file = None if path is None else WatchedFile(path, read_models_file, label="models")
        self.models: Mapping[str, DeclaredModel] = {}
        self.on_demand_models: Mapping[str, DeclaredModel] = {}
        self._split_models()

    async def reload_if_changed(self) -> bool:
        is_changed = self.file is not None and await self.file.reload_in_background()
        if is_changed:
            self._split_models()
        return is_changed

    def _split_models(self) -> None:
        models = {} if self.file is None else self.file.value
        self.models = {name: model for name, model in models.items() if model.copies is None}
        self.on_demand_models = {
            name: model for name, model in models.items() if model.copies is not None
        }
