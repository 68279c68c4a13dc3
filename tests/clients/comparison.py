"""Run client programs, and compare the outcomes of their calls with those on a real Triton."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.clients.programs.outcomes import Target
from tests.support.servers import ROOT

PROGRAMS: Final = Path(__file__).parent / "programs"
OWN: Final = sys.executable
OLDEST: Final = str(ROOT / ".venv-oldest-client" / "bin" / "python")
OTHERS: Final = str(ROOT / ".venv-clients" / "bin" / "python")


@dataclass(frozen=True)
class Client:
    """A program, and the interpreter that has its client."""

    name: str
    interpreter: str
    program: str
    sends_key: bool = True  # with every call
    is_known_to_triton: bool = True

    @property
    def is_installed(self) -> bool:
        return shutil.which(self.interpreter) is not None

    def command(self) -> list[str]:
        path = PROGRAMS / self.program
        if path.suffix == ".py":
            return [self.interpreter, "-m", f"tests.clients.programs.{path.stem}"]
        return [self.interpreter, str(path)]


CLIENTS: Final = (
    Client("tritonclient", OWN, "tritonclient_calls.py"),
    Client("oldest tritonclient", OLDEST, "tritonclient_calls.py"),
    Client("grpcio", OWN, "grpc_stubs.py"),
    Client("fetch", "node", "fetch_calls.mjs"),
    Client("openai", OWN, "openai_calls.py", is_known_to_triton=False),
    Client("KServe", OTHERS, "kserve_calls.py"),
    Client("PyTriton", OTHERS, "pytriton_calls.py", sends_key=False),
)


@dataclass(frozen=True)
class AllowedDifference:
    """A row of docs/use/clients.md. `…` is any text, and TEXT the same text in both outcomes.

    An outcome may begin with any of the statuses of its cell; some versions of a client report none.
    """

    triton: str
    gateway: str
    reason: str

    def allows(self, triton: str, gateway: str) -> bool:
        found = re.fullmatch(to_pattern(self.triton), triton, re.DOTALL)
        if found is None:
            return False
        text = found.groupdict().get("TEXT", "")
        pattern = to_pattern(self.gateway).replace("(?P<TEXT>.*)", re.escape(text))
        return re.fullmatch(pattern, gateway, re.DOTALL) is not None


def to_pattern(cell: str) -> str:
    statuses, separator, message = cell.partition(": ")
    if separator and re.fullmatch(r"[A-Z0-9_ a-z]+", statuses):
        alternatives = "|".join([*statuses.split(), "None"])
        return f"(?:{alternatives}): {to_pattern_of_text(message)}"
    return to_pattern_of_text(cell)


def to_pattern_of_text(text: str) -> str:
    return re.escape(text).replace("…", ".*").replace("TEXT", "(?P<TEXT>.*)")


def read_allowed_differences() -> list[AllowedDifference]:
    text = (ROOT / "docs/use/clients.md").read_text()
    section = text.partition("\n## Differences that are left\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(.*?)` \| `(.*?)` \| (.*) \|$", section, re.MULTILINE)
    return [AllowedDifference(*row) for row in rows]


@dataclass(frozen=True)
class Difference:
    call: str
    reference: Sequence[str]
    server: str
    seen: Sequence[str]

    def __str__(self) -> str:
        lines = [self.call, *(f"    expected  {each}" for each in self.reference)]
        return "\n".join([*lines, *(f"    {self.server}  {each}" for each in self.seen)])


Outcomes = dict[str, list[str]]  # by call
NO_OUTCOME: Final = "the call was not made"


def run_client(client: Client, targets: Sequence[Target], calls: str = "") -> list[Outcomes]:
    """Return the outcomes at each target, of all calls or of those that begin with this pattern."""
    words = [word for target in targets for word in (target.http, target.grpc, target.key)]
    environment = {"PATH": os.environ["PATH"], "HOME": os.environ["HOME"], "CALLS": calls}
    run = subprocess.run(
        [*client.command(), *words],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert run.returncode == 0, run.stderr
    outcomes: list[Outcomes] = [{} for _ in targets]
    for line in run.stdout.splitlines():
        entry = json.loads(line)
        outcomes[entry["target"]][entry["call"]] = entry["outcomes"]
    return outcomes


def find_differences(
    reference: Outcomes, seen: Outcomes, server: str, allowed: Sequence[AllowedDifference]
) -> Iterator[Difference]:
    for call in {**reference, **seen}:
        expected = reference.get(call, [NO_OUTCOME])
        found = seen.get(call, [NO_OUTCOME])
        are_alike = len(expected) == len(found) and all(
            one == other or any(row.allows(one, other) for row in allowed)
            for one, other in zip(expected, found, strict=True)
        )
        if not are_alike:
            yield Difference(call, expected, server, found)


def find_used_rows(
    reference: Outcomes, seen: Outcomes, allowed: Sequence[AllowedDifference]
) -> set[AllowedDifference]:
    return {
        row
        for call, expected in reference.items()
        for one, other in zip(expected, seen.get(call, []), strict=False)
        for row in allowed
        if one != other and row.allows(one, other)
    }
