"""The faults and the changes, as tables. The seed alone decides on the details of each row."""

from __future__ import annotations

import random
import resource
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import httpx
import psutil

from tests.capabilities.uploads.support.uploads import pack_zip
from tests.chaos import world
from tests.chaos.fleet import (
    ADDING_CONFIG,
    GATEWAYS,
    LAZY,
    MODELS,
    REDIS,
    REPLICAS,
    Fleet,
    format_source,
    replace_file,
    write_keys_file,
    write_models_file,
)
from tests.chaos.world import Details, Effect, WorldEffect
from tests.support.fleet import BODY
from tests.support.keys import ADMIN, bearer
from tests.support.wait import TIMEOUT_S

FILES = "files"
DISK = "gateway disk"
VERSIONS = (1, 2)
LABELS = ("stable", "canary")
BROKEN_NUMBER: Final = -1
Response = httpx.Response | httpx.HTTPError


@dataclass(frozen=True)
class Action:
    """A fault has a target, and a change an effect; a call of a gateway returns the response."""

    text: str
    run: Callable[[Fleet], Response | None]
    target: str = ""
    effect: WorldEffect | None = None
    partial_effect: WorldEffect | None = None  # right as well, if the change is partly done
    model: str = ""
    changes_files: bool = False
    delay_s: float = 0.0

    @property
    def area(self) -> str:
        """Actions of a step have different ones: at most one replica is disturbed, and one gateway."""
        return self.target.partition(" ")[0]


Draw = random.Random
Row = Callable[[Draw], Action]


# Faults: over when they return, but for a killed process, which is started at the end of the step.


def kill(target: str) -> Row:
    def run(fleet: Fleet) -> None:
        fleet.killed.append(target)
        fleet.processes[target].kill()

    return lambda _: Action(f"kill {target}", run, target)


def flush(_: Draw) -> Action:
    def run(fleet: Fleet) -> None:
        with fleet.redis.client() as client:
            client.flushall()

    return Action("flush Redis", run, REDIS)


def last(
    text: str,
    target: str,
    most_s: int,
    begin: Callable[[Fleet], None],
    end: Callable[[Fleet], None],
) -> Row:
    """A fault that lasts for a second or some more."""

    def draw_fault(draw: Draw) -> Action:
        lasts_s = round(draw.uniform(1, most_s), 1)

        def run(fleet: Fleet) -> None:
            begin(fleet)
            time.sleep(lasts_s)
            end(fleet)

        return Action(f"{text} for {lasts_s} s", run, target)

    return draw_fault


def pause(target: str) -> Row:
    def send(number: int, fleet: Fleet) -> None:
        fleet.processes[target].signal(number)

    stop = partial(send, signal.SIGSTOP)
    go_on = partial(send, signal.SIGCONT)
    return last(f"pause {target}", target, 5, stop, go_on)


def limit_files(size: int, fleet: Fleet) -> None:
    """Let no gateway write a longer file, as on a full disk: every user can set this limit."""
    for gateway in fleet.gateways.values():
        process = psutil.Process(gateway.pid)
        process.rlimit(psutil.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def break_file(name: str) -> Row:
    """The file cannot be parsed, and is then as before."""

    def begin(fleet: Fleet) -> None:
        (fleet.folder / f"{name}.whole").write_text((fleet.folder / name).read_text())
        replace_file(fleet.folder / name, "models: [\n")

    def end(fleet: Fleet) -> None:
        (fleet.folder / f"{name}.whole").replace(fleet.folder / name)

    return last(f"broken {name}", FILES, 3, begin, end)


FAULTS: Final[list[Row]] = [
    *(kill(target) for target in (*REPLICAS, *GATEWAYS, REDIS)),
    *(pause(target) for target in (*REPLICAS, *GATEWAYS, REDIS)),
    flush,
    last(
        "full disk", DISK, 3, partial(limit_files, 0), partial(limit_files, resource.RLIM_INFINITY)
    ),
    break_file("models.yaml"),
    break_file("keys.yaml"),
]


# Changes.


def call(
    name: str,
    method: str,
    path: str,
    effect: Effect,
    body: Callable[[Details], Mapping[str, Any]] = lambda _: {},
    partial_effect: Effect | None = None,
    models: Sequence[str] = MODELS,
    gateways: Sequence[str] = GATEWAYS,
) -> Row:
    """A call of one of the gateways."""

    def draw_call(draw: Draw) -> Action:
        model = draw.choice(models)
        version = draw.choice(VERSIONS)
        label = draw.choice(LABELS)
        details = Details(model, version, label, draw.randrange(1, 10_000))
        gateway = draw.choice(gateways)

        def run(fleet: Fleet) -> Response:
            first = fleet.replicas[REPLICAS[0]].address
            url = fleet.gateways[gateway].url + path.format(**vars(details), first=first)
            try:
                with httpx.Client(verify=False, timeout=TIMEOUT_S) as client:
                    return client.request(method, url, headers=bearer(ADMIN), **body(details))
            except httpx.HTTPError as exc:
                return exc

        return Action(
            f"{name} {path.format(**vars(details), first=REPLICAS[0])} through {gateway}",
            run,
            effect=lambda before: effect(before, details),
            partial_effect=partial_effect and (lambda before: partial_effect(before, details)),
            model=model,
            changes_files=path in (MODEL, VERSION),
        )

    return draw_call


def pack_model(details: Details) -> Mapping[str, Any]:
    source = format_source(details.number)
    return {"content": pack_zip({"config.pbtxt": ADDING_CONFIG, "1/model.py": source})}


def pack_broken_model(details: Details) -> Mapping[str, Any]:
    return pack_model(replace(details, number=BROKEN_NUMBER))


def write_label(details: Details) -> Mapping[str, Any]:
    return {"json": {"version": str(details.version)}}


def edit(write: Callable[..., None], what: str) -> Row:
    """Add something to a file that the gateways watch, or remove it."""

    def draw_edit(draw: Draw) -> Action:
        flag = {what: draw.random() < 0.6}

        def run(fleet: Fleet) -> None:
            write(fleet.folder, **flag)

        text = f"{what} becomes {flag[what]}"
        return Action(text, run, FILES, effect=partial(replace, **flag))

    return draw_edit


LOAD = "/v2/repository/models/{model}/load"
UNLOAD = "/v2/repository/models/{model}/unload"
MODEL = "/v1/models/{model}"
VERSION = MODEL + "/versions/{version}"
LABEL = MODEL + "/labels/{label}"
INFER = MODEL + "/infer"
CORDON = "/v1/replicas/{first}/cordon"
UNCORDON = "/v1/replicas/{first}/uncordon"

CHANGES: Final[list[Row]] = [
    call("load", "POST", LOAD, world.load),
    call("unload", "POST", UNLOAD, world.unload),
    # Twice, so that the models are there more often than not.
    *[call("upload", "PUT", MODEL, world.upload, pack_model)] * 2,
    *[call("upload", "PUT", VERSION, world.upload_version, pack_model)] * 2,
    call("broken upload", "PUT", VERSION, world.upload_broken, pack_broken_model),
    # Partly done or not answered, a deletion unloads the model, and the files may stay.
    call("delete", "DELETE", MODEL, world.delete, partial_effect=world.unload),
    call("delete", "DELETE", VERSION, world.delete_version),
    call("put label", "PUT", LABEL, world.set_label, write_label),
    call("delete label", "DELETE", LABEL, world.delete_label),
    # Ensembles and their steps.
    *[call("load", "POST", LOAD, world.load_part, models=tuple(world.STEPS))] * 2,
    *[call("unload", "POST", UNLOAD, world.unload_part, models=tuple(world.STEPS))] * 2,
    call("cordon", "POST", CORDON, world.cordon, models=("",)),
    call("uncordon", "POST", UNCORDON, world.uncordon, models=("",)),
    # The first request loads this model, and it is unloaded when it was idle.
    call("use", "POST", INFER, world.keep, lambda _: {"json": BODY}, models=(LAZY,)),
    call("unload", "POST", UNLOAD, world.keep, models=(LAZY,)),
    edit(write_models_file, "has_extra_model"),
    edit(write_keys_file, "has_extra_key"),
]
# Both gateways change the same model at once.
RIVALS: Final[list[list[Row]]] = [
    [
        call(name, "POST", path, effect, models=MODELS[:1], gateways=(gateway,))
        for name, path, effect in (("load", LOAD, world.load), ("unload", UNLOAD, world.unload))
    ]
    for gateway in GATEWAYS
]
PATTERNS: Final = (
    [FAULTS],
    [CHANGES],
    [FAULTS, FAULTS],
    *[[FAULTS, CHANGES]] * 3,
    *[[CHANGES, CHANGES]] * 2,
    RIVALS,
)


def draw_step(seed: int, number: int, excluded: Collection[str] = ()) -> list[Action]:
    """Return the one or two actions of a step: the same ones whatever happened before."""
    draw = random.Random(f"{seed} {number}")
    while True:
        actions = [draw.choice(table)(draw) for table in draw.choice(PATTERNS)]
        areas = [each.area for each in actions if each.area]
        is_excluded = any(word in each.text for word in excluded for each in actions)
        if len(areas) == len(set(areas)) and not is_excluded:
            return [replace(each, delay_s=round(draw.uniform(0, 0.3), 2)) for each in actions]
