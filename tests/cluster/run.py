"""A run: the installations one after the other, and each event under load."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tests.cluster.events import CHART_EVENTS, OVERLAY_EVENTS, Event
from tests.cluster.installations import Chart, Installation, Prod
from tests.cluster.kubectl import ClusterError
from tests.cluster.resources import GATEWAY, build_namespace
from tests.cluster.scene import Obstacle, Run, Scene, Wellness
from tests.cluster.verdict import (
    Losses,
    Outcome,
    find_violations,
    format_table,
    format_violations,
    list_cells,
)

STEADY_S: Final = 5.0  # of load before the first event
Say = Callable[[str], None]


@dataclass
class Report:
    """The outcomes so far, written to a file after each: an interrupted run keeps its figures."""

    path: Path
    say: Say
    outcomes: list[Outcome] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        self.say("  ".join(filter(None, list_cells(outcome))))
        for violation in find_violations(outcome):
            self.say(f"  {violation}")
        self.path.write_text(
            f"{format_table(self.outcomes)}\n\n{format_violations(self.outcomes)}\n"
        )

    @property
    def has_violations(self) -> bool:
        return any(map(find_violations, self.outcomes))


@dataclass(frozen=True)
class Choice:
    """Words of what is left out, and of the events that are chosen; all of them, if there is none."""

    without: Sequence[str] = ()
    only: Sequence[str] = ()

    def includes(self, name: str) -> bool:
        return not any(word in name for word in self.without)

    def includes_event(self, name: str) -> bool:
        is_chosen = not self.only or any(word in name for word in self.only)
        return is_chosen and self.includes(name)


def run_step(report: Report, name: str, act: Callable[[], object]) -> bool:
    """Add a row for something without load; return whether it succeeded."""
    began = time.monotonic()
    differences: tuple[str, ...] = ()
    try:
        act()
    except ClusterError as exc:
        differences = (str(exc),)
    took_s = time.monotonic() - began
    report.add(Outcome(name, Losses.none, well_s=took_s, differences=differences))
    return not differences


def run_event(scene: Scene, event: Event, installation: Installation) -> Outcome:
    """Disturb, wait until everything is well, apply again, and return what the load saw meanwhile."""
    name = f"{installation.name}: {event.name}"
    try:
        return measure_event(scene, event, installation)
    except Obstacle as exc:
        return Outcome(name, event.losses, skipped=str(exc))
    except ClusterError as exc:
        return Outcome(name, event.losses, differences=(str(exc),))


def measure_event(scene: Scene, event: Event, installation: Installation) -> Outcome:
    """Raises `Obstacle` if the cluster cannot be disturbed so, and `ClusterError`."""
    began = time.monotonic()
    began_at = scene.read_clock()
    problems: list[str] = []
    try:
        event.act(scene)
    except ClusterError as exc:
        problems.append(str(exc))
    finally:
        if event.undo is not None:
            event.undo(scene)
    acted_at = scene.read_clock()
    acted = time.monotonic()
    wellness = scene.wait_until_well()
    try:
        problems += apply_again(scene, installation)
    except ClusterError as exc:
        problems.append(str(exc))
    scene.wait_for_old_requests(acted_at)
    return Outcome(
        f"{installation.name}: {event.name}",
        event.losses,
        scene.read_load(began_at, scene.read_clock()),
        well_s=acted - began + wellness.well_s,
        settled_s=wellness.well_s - wellness.pods_ready_s,
        settle_limit_s=scene.run.settle_s,
        fault_ended=scene.fault_ended,
        unnoticed_s=event.unnoticed_s,
        differences=(*problems, *wellness.differences),
        log_faults=tuple(scene.find_log_faults()),
    )


def apply_again(scene: Scene, installation: Installation) -> list[str]:
    """Return a sentence for each workload that another apply has changed, such as its number of pods."""
    before = scene.read_generations()
    installation.apply_again()
    return [
        f"another apply has changed {name}"
        for name, generation in scene.read_generations().items()
        if before.get(name) != generation
    ]


def run_installation(
    installation: Installation,
    events: Sequence[Event],
    report: Report,
    choice: Choice,
) -> None:
    """Install, disturb and uninstall."""
    run = installation.run
    name = installation.name
    run.cluster.apply([build_namespace(installation.namespace, run.name)], installation.namespace)
    scene = Scene(run, installation.namespace, installation.wishes)

    def install() -> None:
        installation.install()
        scene.wait(
            lambda: len(scene.list_pods(GATEWAY)) >= 2,
            "the autoscaler starts no second gateway",
        )
        scene.wait_for_pods()

    def check_fleet() -> None:
        scene.start_load(installation.load)
        check_wellness(scene.wait_until_well())

    if not run_step(report, f"{name}: install until the pods are ready", install):
        return
    run_step(report, f"{name}: another apply changes nothing", installation.check_unchanged)
    if not run_step(report, f"{name}: the fleet is as desired", check_fleet):
        return
    time.sleep(STEADY_S)
    for event in events:
        if choice.includes_event(event.name):
            report.add(run_event(scene, event, installation))
    scene.stop_load()

    def uninstall() -> None:
        installation.uninstall()
        installation.check_uninstalled()

    run_step(report, f"{name}: uninstall", uninstall)


def check_wellness(wellness: Wellness) -> None:
    if wellness.differences:
        raise ClusterError("; ".join(wellness.differences))


@contextmanager
def keep_namespaces(run: Run, purposes: Collection[str], say: Say) -> Iterator[None]:
    """Create the namespace of the tools; remove all namespaces at the end."""
    namespaces = [run.find_namespace(purpose) for purpose in (*purposes, "tools")]
    try:
        tools = build_namespace(run.tools_namespace, run.name)
        run.cluster.apply([tools], run.tools_namespace)
        yield
    finally:
        # Another Ctrl-C would leave what this one should remove; kubectl inherits that it is ignored.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        say(f"removing the namespaces {', '.join(namespaces)}")
        words = ("delete", "namespace", *namespaces, "--ignore-not-found", "--timeout=300s")
        run.cluster.run(*words, timeout_s=330)


def run_all(run: Run, folder: Path, choice: Choice, say: Say) -> Report:
    """Return the report of the installations and events that are chosen."""
    folder.mkdir(parents=True, exist_ok=True)
    report = Report(folder / "results.md", say)
    rows: list[tuple[Installation, Sequence[Event]]] = [
        (Prod(run), OVERLAY_EVENTS),
        (Chart(run), CHART_EVENTS),
    ]
    rows = [row for row in rows if choice.includes(row[0].name)]
    with keep_namespaces(run, [installation.name for installation, _ in rows], say):
        for installation, events in rows:
            run_installation(installation, events, report, choice)
    return report
