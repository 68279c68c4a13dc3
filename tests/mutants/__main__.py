"""`make mutants`: apply each seeded fault to a copy, and find the first lane of tests that notices it.

The faults are in faults.yaml, the outcome in results.yaml: the lane and the test that failed first. A run
goes on where the last one ended; ARGS="--again" starts anew, ARGS="NAME …" runs single faults. The test
that noticed a fault last time is tried first, then the unit tests of the module, `make test`, and
`make test-long`. Takes about 2.5 hours on two cores, so it is run by hand before tests are deleted.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import yaml

ROOT: Final = Path(__file__).parents[2]
TABLE: Final = Path(__file__).with_name("faults.yaml")
RESULTS: Final = Path(__file__).with_name("results.yaml")
SURVIVED: Final = "survived"
LANES: Final = {
    "make test": ("-m", "not long and not soak and not containers"),
    "make test-long": ("-m", "long and not soak and not containers", "--hypothesis-profile=long"),
}
PARALLEL: Final = ("-n", "4", "--dist", "loadgroup")
# Built files that tests need and git ignores.
BUILT: Final = (
    "triton_repo/text_core/1",
    "triton_repo/text_preprocessing/1/tokenizer.json",
    "triton_repo_examples/own_env/python_env",
)


@dataclass(frozen=True)
class Fault:
    """A change of one place in gateway/, and what a user would suffer from it."""

    name: str
    area: str
    breaks: str
    old: str
    new: str


@dataclass(frozen=True)
class Outcome:
    """The lane that noticed a fault, or `SURVIVED`, and the test that failed first."""

    lane: str
    test: str


def read_faults() -> list[Fault]:
    return [Fault(**row) for row in yaml.safe_load(TABLE.read_text())]


def find_file(fault: Fault, root: Path = ROOT) -> Path:
    """Return the one file below gateway/ with the fault's old text. Raises ValueError."""
    found = [
        path
        for path in sorted((root / "gateway").rglob("*"))
        if path.suffix in {".py", ".js", ".html", ".css"}
        for _ in range(path.read_text().count(fault.old))
    ]
    if len(found) != 1:
        raise ValueError(f"the old text of {fault.name} occurs {len(found)} times in gateway/")
    return found[0]


@contextmanager
def copy_of_project() -> Iterator[Path]:
    """A clone with the environment and the built files of this checkout."""
    with tempfile.TemporaryDirectory(prefix="triton-gateway-mutants-") as folder:
        copy = Path(folder) / "project"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(copy)], check=True)
        for name in (".venv", *BUILT):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            if (copy / name).is_dir():
                shutil.rmtree(copy / name)
            (copy / name).symlink_to(ROOT / name)
        yield copy


def run_tests(copy: Path, *arguments: str) -> str:
    """Return the first test that failed; empty if all passed."""
    command = [str(copy / ".venv/bin/python"), "-m", "pytest", "-x", "-q", *arguments]
    command += ["--ignore", "tests/project/unit/test_mutants.py"]  # it fails at any seeded fault
    environment = {**os.environ, "PYTHONPATH": str(copy)}
    result = subprocess.run(
        command, cwd=copy, env=environment, capture_output=True, text=True, check=False
    )
    failed = re.search(r"^(?:FAILED|ERROR) (\S+?)(?:\[.*)?(?:@| - |$)", result.stdout, re.M)
    if failed is None and result.returncode not in (0, 5):  # 5: no test was selected
        raise RuntimeError(f"pytest ended with {result.returncode}:\n{result.stdout[-3000:]}")
    return failed[1] if failed else ""


def find_unit_tests(copy: Path, mutated: Path) -> list[str]:
    """Return the files of unit tests that import the module."""
    module = ".".join(mutated.relative_to(copy).with_suffix("").parts)
    importing = re.compile(rf"\b{re.escape(module)}\b")
    files = (copy / "tests").glob("**/unit/test_*.py")
    return sorted(
        str(path.relative_to(copy)) for path in files if importing.search(path.read_text())
    )


def try_fault(copy: Path, fault: Fault, known_test: str) -> Outcome:
    path = find_file(fault, copy)
    text = path.read_text()
    path.write_text(text.replace(fault.old, fault.new))
    try:
        if (copy / known_test.partition("::")[0]).is_file() and run_tests(copy, "-n0", known_test):
            lane = "unit" if "/unit/" in known_test else find_lane(copy, known_test)
            return Outcome(lane, known_test)
        unit_tests = find_unit_tests(copy, path)
        if unit_tests and (test := run_tests(copy, "-n0", *LANES["make test"], *unit_tests)):
            return Outcome("unit", test)
        for lane, selection in LANES.items():
            unrelated: list[str] = []  # tests that fail because of the load, and not alone
            while test := run_tests(copy, *PARALLEL, *selection, *unrelated):
                if run_tests(copy, "-n0", *selection, test):
                    return Outcome(lane, test)
                unrelated.append(f"--deselect={test}")
        return Outcome(SURVIVED, "")
    finally:
        path.write_text(text)


def find_lane(copy: Path, test: str) -> str:
    """Return the lane of a test that fails."""
    failed = run_tests(copy, "-n0", *LANES["make test"], test)
    return "make test" if failed else "make test-long"


def main(arguments: Sequence[str]) -> int:
    """Return 0 if every fault was noticed."""
    parser = argparse.ArgumentParser(prog="make mutants", description="Seed faults.")
    parser.add_argument("names", nargs="*", help="the faults; all without names")
    parser.add_argument("--again", action="store_true", help="also those that have a result")
    options = parser.parse_args(arguments)
    results: dict[str, dict[str, str]] = yaml.safe_load(RESULTS.read_text()) or {}
    faults = [each for each in read_faults() if not options.names or each.name in options.names]
    with copy_of_project() as copy:
        for number, fault in enumerate(faults, 1):
            known = results.get(fault.name, {})
            if known.get("lane") and not (options.again or options.names):
                continue
            outcome = try_fault(copy, fault, known.get("test", ""))
            results[fault.name] = {"lane": outcome.lane, "test": outcome.test}
            RESULTS.write_text(yaml.safe_dump(dict(sorted(results.items()))))
            print(f"{number}/{len(faults)} {fault.name}: {outcome.lane} {outcome.test}", flush=True)
    survivors = [name for name, each in results.items() if each["lane"] == SURVIVED]
    print(
        f"{len(results) - len(survivors)} noticed, {len(survivors)} survived", *survivors, sep="\n"
    )
    return int(bool(survivors))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
