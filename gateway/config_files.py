"""The YAML files that an operator writes: read strictly, and read again when they change."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import yaml

# PyYAML lets through whatever its constructors raise, such as for `!!int x` or the date 2020-13-45.
YAML_ERRORS: Final = (
    yaml.YAMLError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)


class StrictYamlLoader(yaml.SafeLoader):
    """Without aliases, with which a short text stands for an endless one, and without keys that stand
    twice, of which PyYAML takes the last."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise ValueError("it has an alias (*NAME), which is not taken here")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        if twice := [key for key, count in keys.items() if count > 1]:
            raise ValueError(f"{twice[0]!r} stands twice in one object")
        return super().construct_mapping(node, deep)


def config_file_stamp(path: Path) -> tuple[int, ...]:
    """Another one when the file is another, or none. Kubernetes replaces a link above the file."""
    with suppress(OSError):
        found = path.stat()
        return (found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino)
    return (0,)
