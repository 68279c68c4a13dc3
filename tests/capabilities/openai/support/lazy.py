"""Modules that only few tests use, and that every worker would import for a second when it collects."""

from __future__ import annotations

from importlib import import_module
from typing import Any


class LazyModule:
    """A module that is imported when one of its attributes is used."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # pytest asks every object of a test module for some
            raise AttributeError(name)
        return getattr(import_module(self._name), name)
