"""The models file. Readiness requires the models that it declares, and the API cannot unload them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

import orjson
import yaml

from gateway.config_files import YAML_ERRORS, StrictYamlLoader, WatchedFile
from gateway.messages import CommandError
from gateway.version_labels import InvalidLabel, ModelLabels, check_label_name, parse_label

DECLARED_VERSION: Final = re.compile("[0-9]{1,19}")


class BadModelsFile(CommandError):
    """An invalid or unreadable models file."""


@dataclass(frozen=True)
class DeclaredModel:
    """A model that must be served; without `versions`, any version is sufficient."""

    name: str
    versions: tuple[str, ...] = ()
    config: Mapping[str, Any] | str | None = None
    labels: ModelLabels = field(default_factory=dict)

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
        document = yaml.load(text, StrictYamlLoader)  # noqa: S506 - a SafeLoader
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
    if unknown := set(entry) - {"name", "versions", "config", "labels"}:
        raise BadModelsFile(
            f"model {entry['name']!r} has an unknown key {min(map(str, unknown))!r}; "
            "valid keys are name, versions, config and labels"
        )
    versions = entry.get("versions") or []
    if not isinstance(versions, list) or not all(
        DECLARED_VERSION.fullmatch(str(version)) for version in versions
    ):
        raise BadModelsFile(f"versions of model {entry['name']!r} must be a list of numbers")
    config = entry.get("config")
    if config is not None and not isinstance(config, (dict, str)):
        raise BadModelsFile(f"config of model {entry['name']!r} must be an object")
    labels = parse_declared_labels(entry["name"], entry.get("labels") or {})
    return DeclaredModel(entry["name"], tuple(str(version) for version in versions), config, labels)


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


def read_models_file(path: Path) -> Mapping[str, DeclaredModel]:
    """Return the declared models by name. Raises `BadModelsFile`, which names the file."""
    try:
        return parse_models_file(path.read_text())
    except OSError as exc:
        raise BadModelsFile(f"the models file {path}: {exc.strerror}") from None
    except (UnicodeDecodeError, BadModelsFile) as exc:
        raise BadModelsFile(f"the models file {path}: {exc}") from None


class ModelsFile:
    """The declared models; none without a file."""

    def __init__(self, path: Path | None) -> None:
        self.file = None if path is None else WatchedFile(path, read_models_file)

    @property
    def models(self) -> Mapping[str, DeclaredModel]:
        return {} if self.file is None else self.file.value

    def reload_if_changed(self) -> bool:
        """Return whether the declared models changed."""
        return self.file is not None and self.file.reload_if_changed()
