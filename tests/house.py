"""`make house`: the size of each room of the gateway, and the limits that a test compares them with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

PACKAGE: Final = Path(__file__).parents[1] / "gateway"
# Rooms that are not the core: what can be deleted, and what only uses or starts a gateway.
OUTSIDE: Final = ("capabilities", "client", "commands", "doctor", "embedded")


@dataclass(frozen=True)
class Limits:
    """What a newcomer must be able to survey. Whoever lowers a size lowers its limit."""

    folders: int = 17
    modules: int = 11  # at the top
    files_in_folder: int = 15
    core_files: int = 140
    core_lines: int = 30_775
    capability_lines: int = 4_619
    lines: int = 59_556


@dataclass(frozen=True)
class House:
    """Files and lines of Python by room: a folder at the top, or of a capability."""

    files: Mapping[str, int]
    lines: Mapping[str, int]
    modules: int
    largest_folder: tuple[int, str]

    @property
    def folders(self) -> int:
        return len({room.partition("/")[0] for room in self.files if room})

    def count_core(self, counts: Mapping[str, int]) -> int:
        return sum(count for room, count in counts.items() if not room.startswith(OUTSIDE))

    @property
    def largest_capability(self) -> tuple[int, str]:
        return max(
            (count, room) for room, count in self.lines.items() if room.startswith("capabilities/")
        )


def find_room(path: Path) -> str:
    """Return the room of a module; empty for one at the top."""
    *folders, _ = path.relative_to(PACKAGE).parts
    return "/".join(folders[:2] if folders[:1] == ["capabilities"] else folders[:1])


def measure_house() -> House:
    files: Counter[str] = Counter()
    lines: Counter[str] = Counter()
    folders: Counter[str] = Counter()
    for path in PACKAGE.rglob("*.py"):
        room = find_room(path)
        files[room] += 1
        lines[room] += len(path.read_text().splitlines())
        if path.name != "__init__.py":
            folders[str(path.parent.relative_to(PACKAGE))] += 1
    modules = folders.pop(".")
    return House(files, lines, modules, max((count, name) for name, count in folders.items()))


def main() -> None:
    house = measure_house()
    for room, count in sorted(house.lines.items(), key=lambda item: -item[1]):
        print(f"{room or '(top)':<28} {house.files[room]:>4} files {count:>7} lines")
    core = house.count_core(house.files), house.count_core(house.lines)
    print(f"{'core':<28} {core[0]:>4} files {core[1]:>7} lines")
    print(f"{'all':<28} {sum(house.files.values()):>4} files {sum(house.lines.values()):>7} lines")


if __name__ == "__main__":
    main()
