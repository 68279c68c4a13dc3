"""A strict YAML loader, and files that are reloaded when they change."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import yaml

from gateway.messages import CommandError, describe_difference

log = logging.getLogger(__name__)

T = TypeVar("T")

# PyYAML does not wrap what its constructors raise, such as for `!!int x` or the date 2020-13-45.
YAML_ERRORS: Final = (
    yaml.YAMLError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError,
)  # fmt: skip


class StrictYamlLoader(yaml.SafeLoader):
    """A safe loader that rejects aliases, with which a short text expands without bound, and duplicate
    keys, of which PyYAML keeps the last."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise ValueError("aliases (*NAME) are not supported")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        if duplicates := [key for key, count in keys.items() if count > 1]:
            raise ValueError(f"duplicate key {duplicates[0]!r}")
        return super().construct_mapping(node, deep)


def parse_yaml(text: str) -> Any:
    """Raises one of `YAML_ERRORS`."""
    return yaml.load(text, StrictYamlLoader)  # noqa: S506 - a subclass of SafeLoader


class WatchedFile(Generic[T]):
    """A file that is parsed again when it or one of its `companions` changes.

    `parse` raises a `CommandError` that names the file if it is invalid. The constructor passes that on;
    after a later change, `value` stays the last valid one and `is_valid` becomes false.
    """

    def __init__(self, path: Path, parse: Callable[[Path], T], *companions: Path) -> None:
        self.path = path
        self.is_valid = True
        self._parse = parse
        self._companions = companions
        self._stamp = self._read_stamp()
        self.value = parse(path)

    def reload_if_changed(self) -> bool:
        """Return whether there is a new value."""
        stamp = self._read_stamp()
        if stamp == self._stamp:
            return False
        self._stamp = stamp  # An invalid file is logged once, not at every check.
        previous = self.value
        try:
            self.value = self._parse(self.path)
        except CommandError as exc:
            self.is_valid = False
            log.error("%s; the last valid version stays in use", exc)
            return False
        self.is_valid = True
        difference = describe_difference(self.name_entries(previous), self.name_entries(self.value))
        log.warning("%s changed and was reloaded: %s", self.path, difference)
        return self.value != previous

    def name_entries(self, value: T) -> Mapping[str, object]:
        """Return the entries of a value by the names that the log gets."""
        return value if isinstance(value, Mapping) else {}

    def _read_stamp(self) -> list[tuple[int, ...]]:
        return [read_file_stamp(path) for path in (self.path, *self._companions)]


def read_file_stamp(path: Path) -> tuple[int, ...]:
    # Kubernetes replaces a link above the file, so the inode counts as well.
    try:
        status = path.stat()
    except OSError:
        return ()
    return (status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino)
