"""A run: the installations one after the other, and each event under load."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import yaml

from tests.cluster.events import CHART_EVENTS, OVERLAY_EVENTS, Event
from tests.cluster.installations import (
    INFER_TEXT,
    MANY_STREAMS,
    SENTENCE,
    Chart,
    Dev,
    Installation,
    Prod,
    Zero,
    build_values,
)
from tests.cluster.kubectl import ClusterError
from tests.cluster.logs import LogFiles
from tests.cluster.resources import (
    GATEWAY,
    SCALED_OBJECT,
    TRITON,
    build_namespace,
    fit_overlay,
    read_small_patches,
    render_overlay,
)
from tests.cluster.scene import NAME_LABEL, Obstacle, Run, Scene, Wellness
from tests.cluster.verdict import (
    Losses,
    Outcome,
    find_violations,
    format_table,
    format_violations,
    list_cells,
)
from tests.cluster.walk import PREPARATION, Walk, read_journeys
from tests.support.servers import ROOT, free_ports

ZERO: Final = "zero"
WALK: Final = "kubernetes.md"
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


def run_event(scene: Scene, event: Event, installation: Installation, logs: LogFiles) -> Outcome:
    """Disturb, wait until everything is well, apply again, and return what the load saw meanwhile."""
    name = f"{installation.name}: {event.name}"
    try:
        return measure_event(scene, event, installation, logs)
    except Obstacle as exc:
        return Outcome(name, event.losses, skipped=str(exc))
    except ClusterError as exc:
        return Outcome(name, event.losses, differences=(str(exc),))


def measure_event(
    scene: Scene, event: Event, installation: Installation, logs: LogFiles
) -> Outcome:
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
        log_faults=tuple(logs.find_new_faults()),
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
    logs: LogFiles,
    choice: Choice,
) -> None:
    """Install, disturb and uninstall."""
    run = installation.run
    name = installation.name
    run.cluster.apply([build_namespace(installation.namespace, run.name)], installation.namespace)
    scene = Scene(run, installation.namespace, installation.wishes, has_keys=installation.has_keys)

    def install() -> None:
        installation.install()
        scene.wait(
            lambda: len(scene.list_pods(GATEWAY)) >= installation.gateways,
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
            report.add(run_event(scene, event, installation, logs))
    scene.stop_load()

    def uninstall() -> None:
        installation.uninstall()
        installation.check_uninstalled()

    run_step(report, f"{name}: uninstall", uninstall)


def run_zero(run: Run, report: Report) -> None:
    """Scale the Tritons from zero to some and back, as KEDA does by the demand of the gateways."""
    zero = Zero(run, ZERO)
    if SCALED_OBJECT not in run.cluster.list_kinds():
        report.add(Outcome(f"{ZERO}: KEDA", Losses.none, skipped="KEDA is not installed"))
        return
    run.cluster.apply([build_namespace(zero.namespace, run.name)], zero.namespace)
    scene = Scene(run, zero.namespace, zero.wishes)

    def install() -> None:
        zero.install()
        scene.start_load(())
        scene.wait_for_pods()
        zero.start_scaling()

    def wait_for_none() -> None:
        """A Triton that is ending still serves."""
        selector = f"{NAME_LABEL}={TRITON}"
        scene.wait(
            lambda: not run.cluster.list_objects("pods", zero.namespace, selector),
            "a Triton is left without requests",
        )

    def send_first_request() -> None:
        answer = scene.call("POST", INFER_TEXT, SENTENCE)
        if answer.status != 200:
            raise ClusterError(f"the first request: {answer.status} {answer.body}")

    def send_many() -> None:
        scene.stop_load()
        scene.start_load(MANY_STREAMS)
        scene.wait(
            lambda: len(scene.list_pods(TRITON)) > 1,
            "one Triton is not enough, and no other starts",
        )

    if not run_step(report, f"{ZERO}: install", install):
        return
    run_step(report, f"{ZERO}: without requests, the Tritons end", wait_for_none)
    run_step(
        report, f"{ZERO}: the first request starts a Triton and is answered", send_first_request
    )
    run_step(report, f"{ZERO}: more requests start more Tritons", send_many)
    scene.stop_load()
    run_step(report, f"{ZERO}: without requests, the Tritons end again", wait_for_none)
    run_step(report, f"{ZERO}: uninstall", zero.uninstall)


def run_walk(run: Run, report: Report, journey: str, commands: Sequence[str]) -> None:
    """Run the commands of docs/operate/kubernetes.md, each in a row."""
    with open_walk(run, journey) as walk:
        for command in commands:
            if command.startswith(PREPARATION):
                continue
            if not run_step(report, f"{WALK}, {journey}: {command}", partial(walk.run, command)):
                return


def name_walk(journey: str) -> str:
    return f"walk-{journey}"


@contextmanager
def open_walk(run: Run, journey: str) -> Iterator[Walk]:
    """Yield a shell in a folder like the checkout, whose overlays fit into a small cluster."""
    namespace = run.find_namespace(name_walk(journey))
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "bin").mkdir()
        run.cluster.write_programs(folder / "bin")
        for linked in ("docs", "deploy"):
            (folder / linked).symlink_to(ROOT / linked)
        (folder / "values.yaml").write_text(json.dumps(build_values(run.images)))
        for overlay, components, changes in (
            ("dev", (), {}),
            ("prod", ("cpu-only",), read_small_patches()),
        ):
            rendered = render_overlay(overlay, namespace, components, changes)
            fitted = fit_overlay(rendered, run.cluster.list_kinds(), run.images, run.name)
            target = folder / "k8s" / "overlays" / overlay
            target.mkdir(parents=True)
            (target / "objects.yaml").write_text(yaml.safe_dump_all(fitted))
            (target / "kustomization.yaml").write_text("resources: [objects.yaml]\n")
        if journey == "dev":  # whose namespace is one of its objects
            run.cluster.apply([build_namespace(namespace, run.name)], namespace)
        (port,) = free_ports(1)
        words = {
            r"( -n|namespace) triton-gateway(-dev)?(?= |$)": rf"\1 {namespace}",
            r"\b8080\b": str(port),
            r"^cp deploy/helm/.*": "true",  # the values of the test are there already
        }
        walk = Walk(folder, words)
        try:
            yield walk
        finally:
            walk.close()


def check_wellness(wellness: Wellness) -> None:
    if wellness.differences:
        raise ClusterError("; ".join(wellness.differences))


@contextmanager
def keep_namespaces(run: Run, purposes: Collection[str], say: Say) -> Iterator[None]:
    """Create the namespace of the tools; remove all namespaces at the end."""
    namespaces = [run.find_namespace(purpose) for purpose in (*purposes, "tools")]
    try:
        tools = build_namespace(run.tools_namespace, run.name, is_restricted=False)
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
        (Dev(run, "dev"), ()),
        (Prod(run, "prod"), OVERLAY_EVENTS),
        (Chart(run, "chart"), CHART_EVENTS),
    ]
    rows = [row for row in rows if choice.includes(row[0].name)]
    journeys = read_journeys() if choice.includes(WALK) else {}
    purposes = [*(installation.name for installation, _ in rows), ZERO, *map(name_walk, journeys)]
    namespaces = [*map(run.find_namespace, purposes)]
    with (
        keep_namespaces(run, purposes, say),
        LogFiles(run.cluster, folder / "logs", namespaces) as logs,
    ):
        # First: after a node died, KEDA's adapter may wait for its operator for many minutes.
        if choice.includes(ZERO):
            run_zero(run, report)
        for installation, events in rows:
            run_installation(installation, events, report, logs, choice)
        for journey, commands in journeys.items():
            run_walk(run, report, journey, commands)
    return report
