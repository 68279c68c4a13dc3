"""Loads and unloads of ensembles and their steps: the fleet becomes as desired, and stays so."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path

import httpx
import pytest

from tests.support.fleet import QUICK, V2_BODY, post_to, url_of, write_echo
from tests.support.model_folders import write_model_folder
from tests.support.servers import Triton, gateway
from tests.support.wait import wait_until

CALM_S = 20.0  # in which no action may follow

# Two ensembles share a step. Each step is an ensemble of `echo`, which is always loaded: no model costs a
# process, and there are steps two levels below.
STEPS: Mapping[str, tuple[str, ...]] = {
    "one": ("step", "shared"),
    "two": ("shared",),
    "step": (),
    "shared": (),
}
MODELS = tuple(STEPS)

ENSEMBLE = """
platform: "ensemble"
max_batch_size: 0
input [ {{ name: "X" data_type: TYPE_FP32 dims: [ 2 ] }} ]
output [ {{ name: "Y" data_type: TYPE_FP32 dims: [ 2 ] }} ]
ensemble_scheduling {{ step [ {steps} ] }}
"""
STEP = """
{{ model_name: "{name}" model_version: -1
   input_map {{ key: "X" value: "{source}" }} output_map {{ key: "Y" value: "{target}" }} }}
"""


@dataclass(frozen=True)
class Call:
    verb: str
    model: str


CALLS = [
    *(Call(verb, model) for verb in ("load", "unload") for model in MODELS),
    *(Call("unload with dependents", model) for model in ("step", "shared")),
]


@dataclass(frozen=True)
class Sequence:
    """Calls for the models of one family, and the models that are declared before them, or after them."""

    calls: tuple[Call, ...]
    declared: frozenset[str] = frozenset()
    declared_later: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Expected:
    """What a sequence has made of a family so far: its desired states, and what each Triton has loaded."""

    declared: frozenset[str] = frozenset()
    desired: Mapping[str, bool] = field(default_factory=dict)
    loaded: frozenset[str] = frozenset()

    @property
    def wanted(self) -> frozenset[str]:
        names = self.declared | {name for name, is_loaded in self.desired.items() if is_loaded}
        return names.union(*(STEPS[name] for name in names))

    def declare(self, names: frozenset[str]) -> Expected:
        after = replace(self, declared=self.declared | names)
        return replace(after, loaded=after.loaded | after.wanted)

    def call(self, call: Call) -> tuple[int, Expected]:
        """Return the status of a call, and what it makes of the family."""
        name = call.model
        if call.verb == "load":
            steps = STEPS[name]
            kept = {
                each: is_it for each, is_it in self.desired.items() if is_it or each not in steps
            }
            loaded = self.loaded | {name, *steps}
            return 200, replace(self, desired={**kept, name: True}, loaded=loaded)
        users = {each for each, steps in STEPS.items() if name in steps}
        dependents = users & (self.loaded | self.wanted)
        if (call.verb == "unload" and dependents) or self.declared & {name, *dependents}:
            return 409, self
        unloaded = {name, *dependents}
        desired = {**self.desired, **dict.fromkeys(unloaded, False)}
        return 200, replace(self, desired=desired, loaded=self.loaded - unloaded)


def list_attempts(sequence: Sequence) -> set[object]:
    """Return what a sequence tries: each call, and the late declaration, with the states before it."""
    expected = Expected().declare(sequence.declared)
    attempts: set[object] = set()
    for attempt in (*sequence.calls, sequence.declared_later):
        desired = tuple(sorted(expected.desired.items()))
        attempts.add((expected.declared, desired, expected.loaded, attempt))
        if isinstance(attempt, Call):
            expected = expected.call(attempt)[1]
    return attempts


# What the error of an unload leads to: "unload that first". Then the same with a declared ensemble.
UNLOADS = (Call("unload", "one"), Call("unload", "step"))
FIRST = (
    Sequence((Call("load", "one"), *UNLOADS, Call("load", "one"))),
    Sequence((Call("load", "one"), *UNLOADS), declared_later=frozenset({"one"})),
)


def choose_sequences(count: int) -> list[Sequence]:
    """Return the sequences that differ most: each tries as much as possible that no other has tried."""
    declarations = [((), ()), (("one",), ()), (("step",), ()), ((), ("one",))]
    attempts = {
        sequence: list_attempts(sequence)
        for calls in product(CALLS, repeat=4)
        for early, later in declarations
        for sequence in [Sequence(calls, frozenset(early), frozenset(later))]
    }
    chosen = list(FIRST)
    tried = set().union(*map(list_attempts, chosen))
    while len(chosen) < count:
        best = max(attempts, key=lambda sequence: len(attempts[sequence] - tried))
        chosen.append(best)
        tried |= attempts[best]
    return chosen


def write_family(repository: Path, suffix: str) -> None:
    for name, steps in STEPS.items():
        used = [f"{step}{suffix}" for step in steps] or ["echo"]
        values = ["X", *(f"between{at}" for at in range(1, len(used))), "Y"]
        rows = zip(used, values, values[1:], strict=False)
        text = ",".join(STEP.format(name=each, source=at, target=to) for each, at, to in rows)
        write_model_folder(repository / f"{name}{suffix}", ENSEMBLE.format(steps=text), {})
        (repository / f"{name}{suffix}" / "1").mkdir()


@dataclass
class Scene:
    """Two Tritons behind a gateway, and a family of models for each sequence."""

    tritons: list[Triton]
    client: httpx.Client
    models_file: Path
    families: dict[str, Expected]  # by the suffix of their models

    def declare(self, declared: Mapping[str, frozenset[str]]) -> None:
        """Replace the models file."""
        names = [f"{name}{suffix}" for suffix, each in declared.items() for name in sorted(each)]
        fresh = self.models_file.with_suffix(".fresh")
        fresh.write_text(f"models: [{', '.join(['echo', *names])}]\n")
        fresh.replace(self.models_file)
        for suffix, each in declared.items():
            self.families[suffix] = self.families[suffix].declare(each)

    def call(self, suffix: str, call: Call) -> None:
        before = self.families[suffix]
        status, after = before.call(call)
        verb, _, dependents = call.verb.partition(" with ")
        path = f"/v2/repository/models/{call.model}{suffix}/{verb}"
        parameters = {"unload_dependents": bool(dependents)}
        answer = self.client.post(path, json={"parameters": parameters})
        assert answer.status_code == status, answer.text
        forgotten = sorted(f"{name}{suffix}" for name in before.desired.keys() - after.desired)
        assert answer.json().get("forgotten_unloads", []) == forgotten
        if forgotten:
            wait_until(
                lambda: self.list_changed_models() >= {f"model {each}" for each in forgotten}
            )
        self.families[suffix] = after

    def list_changed_models(self) -> set[str]:
        """Return what the last event is about."""
        (event,) = self.client.get("/v1/events?limit=1").json()["events"]
        return {each["subject"] for each in event["changes"]}

    def is_loaded(self, triton: Triton, models: set[str]) -> bool:
        index = post_to(triton, "index").json()
        return {each["name"] for each in index if each.get("state") == "READY"} == {"echo", *models}

    def list_models(self, kind: str) -> set[str]:
        return {
            f"{name}{suffix}"
            for suffix, family in self.families.items()
            for name in getattr(family, kind)
        }

    def has_desired_states(self) -> bool:
        """Return whether the gateway lists what is desired, and no replica lacks its last load."""
        listed = {each["name"]: each for each in self.client.get("/v1/models").json()["models"]}
        names = {None: "", True: "loaded", False: "unloaded"}
        return all(
            listed[f"{name}{suffix}"].get("wished", "") == names[family.desired.get(name)]
            and listed[f"{name}{suffix}"].get("declared", False) == (name in family.declared)
            and "behind" not in listed[f"{name}{suffix}"]
            for suffix, family in self.families.items()
            for name in MODELS
        )

    def list_actions(self) -> list[str]:
        """Return the counts of the reconciler's actions."""
        lines = self.client.get("/metrics").text.splitlines()
        return [
            line
            for line in lines
            if line.startswith("gateway_model_actions_total{") and 'by="reconciler"' in line
        ]

    def check_calm(self, loaded: Mapping[str, set[str]]) -> None:
        """Wait until each Triton has loaded its models; nothing may happen afterwards."""

        def is_settled() -> bool:
            states = (self.is_loaded(each, loaded[each.address]) for each in self.tritons)
            return all(states) and self.has_desired_states()

        wait_until(is_settled)
        actions = self.list_actions()
        with pytest.raises(AssertionError, match="not true after"):
            wait_until(lambda: not is_settled() or self.list_actions() != actions, CALM_S)


@pytest.fixture(params=[6, pytest.param(48, marks=pytest.mark.long)])
def sequences(request: pytest.FixtureRequest) -> dict[str, Sequence]:
    chosen = choose_sequences(request.param)
    return {f"_{number}": sequence for number, sequence in enumerate(chosen)}


@pytest.fixture
def scene(tmp_path: Path, sequences: Mapping[str, Sequence]) -> Iterator[Scene]:
    repository = tmp_path / "models"
    write_echo(repository, "echo")
    for suffix in sequences:
        write_family(repository, suffix)
    models_file = tmp_path / "models.yaml"
    models_file.write_text("models: [echo]\n")
    with Triton(repository) as one, Triton(repository) as other:
        for triton in (one, other):
            triton.wait()
        urls = (url_of(one), url_of(other))
        with gateway(*urls, models_file=str(models_file), **QUICK) as (client, _):
            families = dict.fromkeys(sequences, Expected())
            yield Scene([one, other], client, models_file, families)


def test_fleet_settles_after_any_sequence_of_loads_and_unloads(
    scene: Scene, sequences: Mapping[str, Sequence]
) -> None:
    scene.declare({suffix: each.declared for suffix, each in sequences.items()})
    wait_until(lambda: scene.client.get("/readyz").is_success)
    wait_until(scene.has_desired_states)
    for suffix, sequence in sequences.items():
        for call in sequence.calls:
            scene.call(suffix, call)
    scene.declare(
        {suffix: each.declared | each.declared_later for suffix, each in sequences.items()}
    )
    everywhere = {each.address: scene.list_models("loaded") for each in scene.tritons}
    scene.check_calm(everywhere)
    for suffix, family in scene.families.items():
        for name in MODELS:
            path = f"/v2/models/{name}{suffix}/infer"
            is_success = scene.client.post(path, json=V2_BODY).is_success
            assert is_success == (name in family.loaded), sequences[suffix]
    # A Triton that starts again gets what is wanted, with its steps, and nothing else.
    restarted = scene.tritons[0]
    restarted.kill()
    restarted.start()
    restarted.wait()
    scene.check_calm({**everywhere, restarted.address: scene.list_models("wanted")})
