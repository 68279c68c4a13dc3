"""The models file. Readiness waits for the models that it declares, and the API cannot unload them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

import orjson

from gateway.config.files import YAML_ERRORS, Entries, WatchedFile, parse_yaml, read_config_file
from gateway.messages import VERSION_NUMBER, CommandError, join_names

# Events show the values of capabilities' keys up to this length.
MAX_SHOWN_CHARS: Final = 500
MODEL_KEYS: Final = ("name", "versions", "config", "required")
# Returns the value of a key that a capability adds, from the entry of a model. Raises `BadModelsFile`.
KeyParser = Callable[[Mapping[str, Any]], Any]
KeyParsers = Mapping[str, KeyParser]
NO_KEYS: Final[KeyParsers] = {}


class BadModelsFile(CommandError):
    """An invalid or unreadable models file."""


class LoadRules:
    """The value of a capability's key for a model that the capability loads."""


@dataclass(frozen=True)
class DeclaredModel:
    """A model that must be served; without `versions`, any version is sufficient.

    A gateway that cannot serve a model that `is_always_required` is not ready.
    """

    name: str
    versions: tuple[str, ...] = ()
    config: Mapping[str, Any] | str | None = None
    is_always_required: bool = False
    capability_values: Mapping[str, Any] = field(default_factory=dict)  # key → parsed value

    @property
    def load_parameters(self) -> dict[str, Any]:
        return {} if self.config is None else {"config": self.config}

    @property
    def is_loaded_by_capability(self) -> bool:
        return any(isinstance(value, LoadRules) for value in self.capability_values.values())

    def to_dict(self) -> dict[str, Any]:
        """Return the entry, as events show it: the config by its digest."""
        document = {
            "versions": list(self.versions),
            "config": self.config_digest,
            "required": "always" if self.is_always_required else "",
            **{key: str(value)[:MAX_SHOWN_CHARS] for key, value in self.capability_values.items()},
        }
        return {key: value for key, value in document.items() if value}

    @cached_property
    def config_digest(self) -> str:
        """Return a digest that changes with the config; empty without a config."""
        if self.config is None:
            return ""
        document = orjson.dumps(self.config, option=orjson.OPT_SORT_KEYS)
        return blake2b(document, digest_size=8).hexdigest()


def parse_models_file(text: str, capability_keys: KeyParsers = NO_KEYS) -> dict[str, DeclaredModel]:
    """Return the models in a models file by name. Raises `BadModelsFile`."""
    try:
        document = parse_yaml(text)
    except YAML_ERRORS as exc:
        raise BadModelsFile(f"cannot be parsed: {' '.join(str(exc).split())}") from None
    if document is None:
        return {}
    if not isinstance(document, dict) or set(document) != {"models"}:
        raise BadModelsFile("the only key must be 'models', as in models: [NAME, …]")
    entries = [] if document["models"] is None else document["models"]
    if not isinstance(entries, list):
        raise BadModelsFile("'models' must be a list")
    declared = [parse_declared_model(entry, capability_keys) for entry in entries]
    models = {model.name: model for model in declared}
    if len(models) < len(declared):
        raise BadModelsFile("a model is listed twice")
    return models


def parse_declared_model(entry: Any, capability_keys: KeyParsers) -> DeclaredModel:
    if isinstance(entry, str) and entry:
        entry = {"name": entry}
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str) or not entry["name"]:
        raise BadModelsFile(
            f"{repr(entry)[:80]} is not a valid model; write NAME or {{name: NAME}}"
        )
    valid_keys = (*MODEL_KEYS, *capability_keys)
    if unknown := set(entry) - set(valid_keys):
        raise BadModelsFile(
            f"model {entry['name']!r} has an unknown key {min(map(str, unknown))!r}; "
            f"valid keys are {join_names(valid_keys)}"
        )
    versions = entry.get("versions") or []
    if not isinstance(versions, list) or not all(
        VERSION_NUMBER.fullmatch(str(version)) for version in versions
    ):
        raise BadModelsFile(f"versions of model {entry['name']!r} must be a list of numbers")
    config = entry.get("config")
    if config is not None and not isinstance(config, (dict, str)):
        raise BadModelsFile(f"config of model {entry['name']!r} must be an object")
    try:
        orjson.dumps((entry["name"], config))
    except TypeError as exc:
        raise BadModelsFile(f"cannot be parsed: {exc}") from None
    capability_values = {
        key: parse(entry) for key, parse in capability_keys.items() if key in entry
    }
    versions = tuple(str(version) for version in versions)
    is_required = parse_required(entry)
    return DeclaredModel(
        entry["name"],
        versions,
        config,
        is_always_required=is_required,
        capability_values=capability_values,
    )


def parse_required(entry: Mapping[str, Any]) -> bool:
    if "required" not in entry:
        return False
    if entry["required"] != "always":
        raise BadModelsFile(f"required of model {entry['name']!r} must be always, or be left out")
    return True


def read_models_file(path: Path, capability_keys: KeyParsers) -> Mapping[str, DeclaredModel]:
    """Return the declared models by name. Raises `BadModelsFile`, which names the file."""
    try:
        return parse_models_file(read_config_file(path), capability_keys)
    except OSError as exc:
        raise BadModelsFile(f"the models file {path}: {exc.strerror}") from None
    except (UnicodeDecodeError, BadModelsFile) as exc:
        raise BadModelsFile(f"the models file {path}: {exc}") from None


class DeclaredModelsFile(WatchedFile[Mapping[str, DeclaredModel]]):
    def describe_entries(self, value: Mapping[str, DeclaredModel]) -> Entries:
        return {name: model.to_dict() for name, model in value.items()}


class ModelsFile:
    """The declared models, and the models that capabilities load; none without a file."""

    def __init__(self, path: Path | None, capability_keys: KeyParsers = NO_KEYS) -> None:
        read = partial(read_models_file, capability_keys=capability_keys)
        self.file = None if path is None else DeclaredModelsFile(path, read, label="models")
        self.models: Mapping[str, DeclaredModel] = {}
        self.capability_models: Mapping[str, DeclaredModel] = {}
        self._split_models()

    async def reload_if_changed(self) -> bool:
        is_changed = self.file is not None and await self.file.reload_in_background()
        if is_changed:
            self._split_models()
        return is_changed

    def _split_models(self) -> None:
        models = {} if self.file is None else self.file.value
        self.capability_models = {
            name: model for name, model in models.items() if model.is_loaded_by_capability
        }
        self.models = {
            name: model for name, model in models.items() if name not in self.capability_models
        }
