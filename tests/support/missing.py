"""What tests need and a machine may lack: they are skipped, and the end of the run says what to install."""

from __future__ import annotations

import re
import shutil
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import Final

import pytest

APT: Final = "apt-get install "
REASON: Final = re.compile(r"(.+) is missing: (.+)")


def format_reason(name: str, remedy: str) -> str:
    return f"{name} is missing: {remedy}"


def find_program(name: str, packages: str = "") -> str:
    """Return the path of a program. Skip the test if it is missing."""
    path = shutil.which(name) or shutil.which(name, path="/usr/sbin")
    if path is None:
        pytest.skip(format_reason(name, f"{APT}{packages or name}"))
    return path


def summarize_skips(reasons: Iterable[str]) -> Iterator[str]:
    """Yield a line for each remedy, with what is missing, and for each other reason."""
    others: Counter[str] = Counter()
    skipped: Counter[str] = Counter()
    names: dict[str, set[str]] = defaultdict(set)
    packages: set[str] = set()
    for reason in reasons:
        match = REASON.fullmatch(reason)
        if match is None:
            others[reason] += 1
            continue
        name, remedy = match.groups()
        if remedy.startswith(APT):
            packages |= set(remedy.removeprefix(APT).split())
            remedy = APT
        skipped[remedy] += 1
        names[remedy].add(name)
    for remedy, count in skipped.most_common():
        command = f"{APT}{' '.join(sorted(packages))}" if remedy == APT else remedy
        yield f"{count} without {', '.join(sorted(names[remedy]))}: {command}"
    for reason, count in others.most_common():
        yield f"{count}: {reason}"
