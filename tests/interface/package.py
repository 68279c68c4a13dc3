"""The public names by the code alone, for a copy without documents: `python -m tests.interface.package`."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pkgutil import walk_packages
from typing import TypeVar

from pydantic import BaseModel

import gateway
from gateway.config.settings import (
    ENV_PREFIX,
    CapabilitySettings,
    Settings,
    find_secrets,
    list_variable_fields,
)
from gateway.errors import GatewayError
from tests.interface import names, openapi

# They run in Triton's processes.
MODULES_OF_MODELS = ("gateway.embedded.backends",)

ClassT = TypeVar("ClassT")


def import_all() -> None:
    """Import every module: each room and capability defines its errors and settings."""
    for module in walk_packages(gateway.__path__, "gateway."):
        if not module.name.startswith(MODULES_OF_MODELS):
            import_module(module.name)


def find_subclasses(base: type[ClassT]) -> Iterator[type[ClassT]]:
    """Yield the class and all that derive from it, of the modules that are imported."""
    yield base
    for special in base.__subclasses__():
        yield from find_subclasses(special)


def list_settings() -> Iterator[str]:
    models: list[type[BaseModel]] = [Settings, *find_subclasses(CapabilitySettings)]
    for model in models:
        files = (f"{secret}_file" for secret in find_secrets(model))
        for name in (*list_variable_fields(model), *files):
            yield f"setting {ENV_PREFIX}{name.upper()}"


def list_codes() -> Iterator[str]:
    for error in find_subclasses(GatewayError):
        if error.status >= 400:  # others do not reach a client
            yield f"code {error.status} {error.code}"


def list_names() -> set[str]:
    import_all()
    return {
        *list_settings(),
        *list_codes(),
        *names.list_paths(openapi.build_document()),
        *names.list_pages(),
        *names.list_forwarded_paths(),
        *names.list_commands(),
    }


if __name__ == "__main__":
    print(*sorted(list_names()), sep="\n")
