"""The models file. Readiness requires the models that it declares, and the API cannot unload them."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

import orjson
import yaml

from gateway.config_files import YAML_ERRORS, StrictYamlLoader, config_file_stamp
from gateway.messages import CommandError

log = logging.getLogger(__name__)

DECLARED_VERSION: Final = re.compile("[0-9]{1,19}")


class BadModelsFile(CommandError):
    """An invalid or unreadable models file."""


@dataclass(frozen=True)
class DeclaredModel:
    """A model that must be served; without `versions`, any version is sufficient."""

    name: str
    versions: tuple[str, ...] = ()
    config: Mapping[str, Any] | str | None = None

    @property
    def load_parameters(self) -> dict[str, Any]:
        return {} if self.config is None else {"config": self.config}

    @cached_property
    def config_digest(self) -> str:
        """Return a digest that changes with the config; empty without a config."""
        if self.config is None:
            return ""
        return blake2b(
            orjson.dumps(self.config, option=orjson.OPT_SORT_KEYS), digest_size=8
        ).hexdigest()


def parse_models_file(text: str) -> dict[str, DeclaredModel]:
    """Return the models in a models file by name. Raises `BadModelsFile`."""
    try:
        document = yaml.load(text, StrictYamlLoader)  # noqa: S506 - a SafeLoader
        orjson.dumps(document)  # Triton accepts only JSON
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


def parse_declared_model(entry: Any) -> DeclaredModel:
    if isinstance(entry, str) and entry:
        return DeclaredModel(entry)
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str) or not entry["name"]:
        raise BadModelsFile(
            f"{repr(entry)[:80]} is not a valid model; write NAME or {{name: NAME}}"
        )
    if unknown := set(entry) - {"name", "versions", "config"}:
        raise BadModelsFile(
            f"model {entry['name']!r} has an unknown key {min(map(str, unknown))!r}; "
            "valid keys are name, versions and config"
        )
    versions = entry.get("versions") or []
    if not isinstance(versions, list) or not all(map(is_version, versions)):
        raise BadModelsFile(f"versions of model {entry['name']!r} must be a list of numbers")
    config = entry.get("config")
    if config is not None and not isinstance(config, (dict, str)):
        raise BadModelsFile(f"config of model {entry['name']!r} must be an object")
    return DeclaredModel(entry["name"], tuple(str(version) for version in versions), config)


def is_version(value: Any) -> bool:
    return DECLARED_VERSION.fullmatch(str(value)) is not None


@dataclass
class ModelsFile:
    """The file, read again when it changes. A broken one leaves the last good one in force."""

    path: Path | None
    models: Mapping[str, DeclaredModel] = field(default_factory=dict)
    is_valid: bool = True  # whether `models` is what the file says now
    _stamp: tuple[int, ...] = ()

    def load(self) -> None:
        """The first read. Raises `BadModelsFile`."""
        try:
            self._reload()
        except (OSError, UnicodeDecodeError, BadModelsFile) as exc:
            raise BadModelsFile(f"the models file {self.path}: {exc}") from None

    def reload_if_changed(self) -> bool:
        """Read it again if it changed; whether the models did."""
        before = self.models
        try:
            self._reload()
        except (OSError, UnicodeDecodeError, BadModelsFile) as exc:
            self.is_valid = False
            log.error("the models file %s stays as it was: %s", self.path, exc)
        return self.models != before

    def _reload(self) -> None:
        if self.path is None:
            return
        seen = config_file_stamp(self.path)
        if seen == self._stamp:
            return  # a broken one is complained of once
        self._stamp = seen
        self.models = parse_models_file(self.path.read_text())
        if not self.is_valid:
            log.warning("the models file %s is in force again", self.path)
        self.is_valid = True
