"""`make mutants`: apply each seeded fault to a copy, and find the first lane of tests that notices it.

The faults are in faults.yaml, the outcomes in results.yaml: the lane, and a test that fails with the fault
and passes without it. A run goes on where the last one ended; ARGS="--again" starts anew, ARGS="NAME …" runs
single faults. The test that noticed a fault last time is tried first, then the unit tests of the module,
`make test`, and `make test-long`. All of this takes about 2.5 hours on two cores.

Who adds a fault and knows which tests should notice it writes an entry with an empty lane and these tests as
candidates into results.yaml. ARGS="--quick" tries only the candidates, or the test of last time, and the unit
tests; a fault that these miss stays without a lane.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypedDict

import yaml

from tests.house import GENERATED
from tests.interface import sync_client

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


class Outcome(TypedDict):
    """The lane that noticed a fault, or `SURVIVED`, and the test that did.

    Without a lane, the tests are the candidates of the next run.
    """

    lane: str
    tests: list[str]


def read_faults() -> list[Fault]:
    return [Fault(**row) for row in yaml.safe_load(TABLE.read_text())]


def read_results() -> dict[str, Outcome]:
    return yaml.safe_load(RESULTS.read_text()) or {}


def read_sources(root: Path = ROOT) -> Iterator[tuple[Path, str]]:
    """Yield the files below gateway/ that faults change, with their texts: none that is generated."""
    for path in sorted((root / "gateway").rglob("*")):
        if path.suffix in {".py", ".js", ".html", ".css"}:
            text = path.read_text()
            if not text.startswith(GENERATED):
                yield path, text


def find_file(fault: Fault, root: Path = ROOT) -> Path:
    """Return the one file below gateway/ with the fault's old text. Raises ValueError."""
    found = [path for path, text in read_sources(root) for _ in range(text.count(fault.old))]
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


@contextmanager
def seed(fault: Fault, copy: Path) -> Iterator[None]:
    path = find_file(fault, copy)
    text = path.read_text()
    path.write_text(text.replace(fault.old, fault.new))
    sync_client.write(path.parent)
    try:
        yield
    finally:
        path.write_text(text)
        sync_client.write(path.parent)


def run_tests(copy: Path, *arguments: str) -> str:
    """Return the first test that failed; empty if all passed."""
    command = [str(copy / ".venv/bin/python"), "-m", "pytest", "-x", "-q", *arguments]
    command += ["--ignore", "tests/project/unit/test_mutants.py"]  # it fails at any seeded fault
    environment = {**os.environ, "PYTHONPATH": str(copy)}
    result = subprocess.run(
        command, cwd=copy, env=environment, capture_output=True, text=True, check=False
    )
    failed = re.search(r"^(?:FAILED|ERROR) (\S+?)(?:\[.*)?(?:@| - |$).*", result.stdout, re.M)
    if failed is None and result.returncode not in (0, 5):  # 5: no test was selected
        raise RuntimeError(f"pytest ended with {result.returncode}:\n{result.stdout[-3000:]}")
    if failed is None:
        return ""
    print("   ", failed[0][:200], flush=True)
    return failed[1]


def find_failing_test(copy: Path, fault: Fault, selection: Sequence[str], *arguments: str) -> str:
    """Return a test that fails with the fault, also alone, and passes without it; empty if none does."""
    unrelated: list[str] = []  # tests that fail because of the load, or also without the fault
    while True:
        with seed(fault, copy):
            test = run_tests(copy, *arguments, *selection, *unrelated)
            is_failing_alone = test and run_tests(copy, "-n0", *selection, test)
        if not test or (is_failing_alone and not run_tests(copy, "-n0", *selection, test)):
            return test
        unrelated.append(f"--deselect={test}")


def find_unit_tests(fault: Fault, copy: Path) -> list[str]:
    """Return the files of unit tests that import the module of the fault."""
    module = ".".join(find_file(fault, copy).relative_to(copy).with_suffix("").parts)
    importing = re.compile(rf"\b{re.escape(module)}\b")
    files = (copy / "tests").glob("**/unit/test_*.py")
    return sorted(
        str(path.relative_to(copy)) for path in files if importing.search(path.read_text())
    )


def has_test(copy: Path, test: str) -> bool:
    """Return whether the file has the function, or the class, which may inherit its tests."""
    path, *names = test.partition("[")[0].split("::")
    return (copy / path).is_file() and all(name in (copy / path).read_text() for name in names[:1])


def try_fault(
    copy: Path, fault: Fault, candidates: Sequence[str], *, is_quick: bool = False
) -> Outcome:
    known = [test for test in candidates if has_test(copy, test)]
    few = [
        (lane, tests) for tests in (known, find_unit_tests(fault, copy)) for lane in LANES if tests
    ]
    attempts = [(lane, ["-n0", *tests]) for lane, tests in few]
    if not is_quick:
        attempts += [(lane, list(PARALLEL)) for lane in LANES]
    for lane, arguments in attempts:
        if test := find_failing_test(copy, fault, LANES[lane], *arguments):
            is_unit = "/unit/" in test and lane == "make test"
            return Outcome(lane="unit" if is_unit else lane, tests=[test])
    if is_quick:
        return Outcome(lane="", tests=list(candidates))
    return Outcome(lane=SURVIVED, tests=[])


def main(arguments: Sequence[str]) -> int:
    """Return 0 if every fault was noticed."""
    parser = argparse.ArgumentParser(prog="make mutants", description="Seed faults.")
    parser.add_argument("names", nargs="*", help="the faults; all without names")
    parser.add_argument("--again", action="store_true", help="also those that have a result")
    parser.add_argument("--quick", action="store_true", help="only candidates and unit tests")
    options = parser.parse_args(arguments)
    faults = read_faults()
    with copy_of_project() as copy:
        for number, fault in enumerate(faults, 1):
            known = read_results().get(fault.name, Outcome(lane="", tests=[]))
            is_done = known["lane"] and not options.again
            if fault.name not in options.names if options.names else is_done:
                continue
            outcome = try_fault(copy, fault, known["tests"], is_quick=options.quick)
            print(f"{number}/{len(faults)} {fault.name}:", *outcome.values(), flush=True)
            results = {**read_results(), fault.name: outcome}
            RESULTS.write_text(yaml.safe_dump(dict(sorted(results.items()))))
    return report(faults, read_results())


def report(faults: Sequence[Fault], results: Mapping[str, Outcome]) -> int:
    """Print a table of areas and lanes. Return 0 if every fault was noticed."""
    lanes = ("unit", *LANES, SURVIVED, "unknown")
    found = Counter(
        (area, results[fault.name]["lane"] or "unknown" if fault.name in results else "unknown")
        for fault in faults
        for area in (fault.area, "all")
    )
    print("", *lanes, sep="\t")
    for area in (*dict.fromkeys(fault.area for fault in faults), "all"):
        print(area, *(found[area, lane] for lane in lanes), sep="\t")
    return int(any(found["all", lane] for lane in (SURVIVED, "unknown")))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
