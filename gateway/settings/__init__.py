"""The gateway's settings: read once from the environment (prefix `GATEWAY_`), described once, and frozen.

The string below a field is its description in the documentation. pydantic does not read it: to parse the
source would take 20 ms of every start.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from gateway.messages import CommandError, suggest_name
from gateway.settings.access import AccessSettings
from gateway.settings.fleet import FleetSettings
from gateway.settings.limits import LimitSettings
from gateway.settings.server import ObservabilitySettings, ServerSettings, describe_os_errors

T = TypeVar("T", bound="CapabilitySettings")
ENV_PREFIX: Final = "GATEWAY_"
# Kubernetes adds these variables to every pod beside a Service whose name begins with "gateway".
KUBERNETES_VARIABLE: Final = re.compile(
    r"GATEWAY_(\w+_)?(SERVICE_(HOST|PORT(_\w+)?)|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)"
)
# A name and a password in an address; matches too much rather than a part of a password.
CREDENTIALS: Final = re.compile(r".*@", re.DOTALL)


class SecretFiles(EnvSettingsSource):
    """The secrets in the files that `GATEWAY_…_FILE` name. Raises `CommandError`."""

    def __call__(self) -> dict[str, str]:
        found = {}
        for name in find_secrets(self.settings_cls):
            setting = f"{ENV_PREFIX}{name}".upper()
            if path := self.env_vars.get(f"{setting}_FILE".lower()):
                if self.env_vars.get(setting.lower()):
                    raise CommandError(f"{setting} and {setting}_FILE are both set; unset one")
                found[name] = read_secret(f"{setting}_FILE", Path(path))
        return found


def read_secret(setting: str, path: Path) -> str:
    """Return the file's text without the end of its last line. Raises `CommandError`."""
    with describe_os_errors(CommandError, f"{setting} cannot be {str(path)!r}"):
        secret = path.read_text("utf-8", "surrogateescape").rstrip("\r\n")
    if not secret or not secret.isprintable():
        raise CommandError(f"{setting} cannot be {str(path)!r}: the file is empty or not one line")
    return secret


class EnvironmentSettings(BaseSettings):
    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings, SecretFiles(settings_cls)


class CapabilitySettings(EnvironmentSettings):
    """The settings of one capability, which `Settings.read` returns."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, frozen=True, extra="ignore")


class Settings(
    # Validated from the last to the first, and an error of the last one is reported first.
    ObservabilitySettings,
    ServerSettings,
    LimitSettings,
    AccessSettings,
    FleetSettings,
    EnvironmentSettings,
):
    """The settings of the core. A test compares all settings with `docs/reference/settings.md`."""

    # Values that are none of these fields are kept for the capabilities.
    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, frozen=True, extra="allow")

    def read(self, kind: type[T]) -> T:
        """Return a capability's settings from the environment and from this object's arguments."""
        return kind(**(self.model_extra or {}))


def read_settings(*kinds: type[CapabilitySettings], **overrides: Any) -> Settings:
    """Return the settings of the environment, after a check of the capabilities' settings.

    Raises `CommandError`.
    """
    try:
        settings = Settings(**overrides)
        for kind in kinds:
            settings.read(kind)
    except ValidationError as exc:
        error = exc.errors()[0]
        name = ENV_PREFIX + "_".join(map(str, error["loc"])).upper()
        # The context has the message without pydantic's prefix.
        reason = error.get("ctx", {}).get("error", error["msg"])
        if error["loc"][0] in find_secrets(Settings, *kinds):
            raise CommandError(f"{name} is invalid: {reason}") from None
        value = format_setting(error["input"])
        raise CommandError(f"{name} cannot be {value}: {reason}") from None
    return settings


def find_secrets(*kinds: type[BaseModel]) -> set[str]:
    """Return the names of the settings whose values are never shown."""
    return {
        name
        for kind in kinds
        for name, field in kind.model_fields.items()
        if "SecretStr" in str(field.annotation)
    }


def format_setting(value: Any) -> str:
    """Return the value as it was written, without a password in it."""
    written = ",".join(value) if isinstance(value, tuple) else "" if value is None else str(value)
    return repr(CREDENTIALS.sub("…@", written)) if written else "empty"


def list_setting_names(*kinds: type[BaseSettings]) -> list[str]:
    return [*Settings.model_fields, *(name for kind in kinds for name in kind.model_fields)]


def describe_unknown_settings(names: Iterable[str], *kinds: type[CapabilitySettings]) -> list[str]:
    known = [name.upper() for name in list_setting_names(*kinds)]
    known += [f"{name.upper()}_FILE" for name in find_secrets(Settings, *kinds)]
    warnings = []
    for name in sorted({name.upper() for name in names if name.upper().startswith(ENV_PREFIX)}):
        setting = name.removeprefix(ENV_PREFIX)
        if setting not in known and not KUBERNETES_VARIABLE.fullmatch(name):
            hint = suggest_name(name, [f"{ENV_PREFIX}{each}" for each in known], cutoff=0.8)
            warnings.append(f"unknown setting {name}{hint}")
    return warnings
