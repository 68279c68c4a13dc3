"""Metrics pages of several servers become one valid page: merged by family, as text. Pure.

Pages one after the other are no exposition: a family may have one HELP and one TYPE, and its samples
stand together. Parsing and printing them anew would rename counters, so lines stay as they are, but
for the `replica` label.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

SUFFIXES = ("_bucket", "_sum", "_count", "_total", "_created", "_info")


@dataclass
class Family:
    """A metric family: its HELP and TYPE lines once, and every page's samples."""

    metadata: dict[str, str] = field(default_factory=dict)
    samples: list[str] = field(default_factory=list)


def merge(own: str, pages: Mapping[str, str]) -> str:
    """The gateway's own page, then every family of the replicas' pages with a `replica` label."""
    families: dict[str, Family] = {}
    for replica, page in pages.items():
        add(families, page, f'replica="{escaped(replica)}"')
    lines = [own.rstrip("\n")] if own else []
    for family in families.values():
        lines += family.metadata.values()
        lines += family.samples
    return "\n".join(lines) + "\n"


def add(families: dict[str, Family], page: str, label: str) -> None:
    current = ""
    for line in page.splitlines():
        if line.startswith("#"):
            keyword, name = [*line.split(" ", 3), "", ""][1:3]
            if keyword in ("HELP", "TYPE") and name:
                current = name
                families.setdefault(name, Family()).metadata.setdefault(keyword, line)
        elif line.strip():
            family = current if belongs(name_of(line), current) else name_of(line)
            families.setdefault(family, Family()).samples.append(labelled(line, label))


def name_of(line: str) -> str:
    brace, space = line.find("{"), line.find(" ")
    ends = [position for position in (brace, space) if position > 0]
    return line[: min(ends)] if ends else line


def belongs(name: str, family: str) -> bool:
    return name == family or (name.startswith(family) and name[len(family) :] in SUFFIXES)


def labelled(line: str, label: str) -> str:
    name = name_of(line)
    rest = line[len(name) :]
    if not rest.startswith("{"):
        return f"{name}{{{label}}}{rest}"
    return f"{name}{{{label}{'' if rest[1:].lstrip().startswith('}') else ','}{rest[1:]}"


def escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
