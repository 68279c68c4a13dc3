"""Checks of the fleet: each yields a sentence for every difference from a world."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

import httpx

from tests.chaos.fleet import (
    ADDING_CONFIG,
    EXTRA,
    EXTRA_KEY,
    LAZY,
    STEADY,
    STEP_NUMBER,
    Fleet,
    format_source,
)
from tests.chaos.world import ENSEMBLES, LOADED, STEPS, UNLOADED, Model, World
from tests.support.fleet import BODY, V2_BODY
from tests.support.keys import ADMIN, bearer
from tests.support.servers import FAULTS, GatewayProcess, Triton

# Each request has a connection of its own, because the processes are killed.
CLIENT = httpx.Client(verify=False, timeout=10.0, limits=httpx.Limits(max_keepalive_connections=0))

# The reconciler's own actions.
ACTIONS: Final = re.compile(r'gateway_model_actions_total\{.*by="reconciler"')
LOG_LINES = 80  # of a traceback


def find_differences(fleet: Fleet, world: World) -> list[str]:
    """Return how the fleet differs from a world; what costs most is looked at last."""
    differences: list[str] = []
    for name, triton in fleet.replicas.items():
        differences += note_failure(name, check_replica(triton, world))
    for name, gateway in fleet.gateways.items():
        differences += note_failure(name, check_lists(fleet, gateway, world))
    if differences:
        return differences
    for name, gateway in fleet.gateways.items():
        differences += note_failure(name, check_answers(gateway, world))
    return [*differences, *check_agreement(fleet), *check_leftovers(fleet)]


def note_failure(name: str, differences: Iterator[str]) -> Iterator[str]:
    """Yield the differences of one process, with its name; the last one may be that it does not answer."""
    try:
        for difference in differences:
            yield f"{name}: {difference}"
    except (httpx.HTTPError, KeyError, ValueError) as exc:
        yield f"{name}: {exc!r}"


def compare(what: str, seen: object, expected: object) -> Iterator[str]:
    if seen != expected:
        yield f"{what}: expected {expected}, seen {seen}"


def check_replica(triton: Triton, world: World) -> Iterator[str]:
    """Check the models that a Triton itself lists, and their outputs."""
    url = f"http://{triton.address}/v2"
    ready: dict[str, set[str]] = {}
    for entry in CLIENT.post(f"{url}/repository/index").json():
        if entry.get("state") == "READY":
            ready.setdefault(entry["name"], set()).add(entry["version"])
    for name, model in world.models.items():
        yield from compare(
            f"versions of {name}", ready.get(name, set()), set(map(str, model.served))
        )
    yield from compare(f"versions of {STEADY}", ready.get(STEADY), {"1"})
    yield from compare(f"versions of {LAZY}, which is idle", ready.get(LAZY), None)
    if world.has_extra_model:  # otherwise it is left alone
        yield from compare(f"versions of {EXTRA}", ready.get(EXTRA), {"1"})
    for name, wish in world.wishes.items():
        is_wanted = wish == LOADED or name in world.needed
        if is_wanted or wish == UNLOADED:  # otherwise it may be left from an ensemble
            yield from compare(f"versions of {name}", ready.get(name), {"1"} if is_wanted else None)
    for name, model in world.models.items():
        for version, number in model.served.items():
            path = f"{url}/models/{name}/versions/{version}/infer"
            document = CLIENT.post(path, json=V2_BODY).json()
            outputs = document.get("outputs", [{}])
            expected = [1 + number, 2 + number]
            yield from compare(f"{name} version {version}", outputs[0].get("data"), expected)


def ask(gateway: GatewayProcess, path: str, key: str = ADMIN) -> httpx.Response:
    return CLIENT.get(f"{gateway.url}{path}", headers=bearer(key))


def list_models(gateway: GatewayProcess) -> dict[str, dict[str, Any]]:
    return {model["name"]: model for model in ask(gateway, "/v1/models").json()["models"]}


def check_lists(fleet: Fleet, gateway: GatewayProcess, world: World) -> Iterator[str]:
    """Check the lists of a gateway: desired states, labels, the state on each replica, and cordons."""
    listed = list_models(gateway)
    first, *others = [triton.address for triton in fleet.replicas.values()]
    in_service = others if world.is_cordoned else [first, *others]
    for name, model in world.models.items():
        told = listed.get(name, {})
        labels = {label: int(value["version"]) for label, value in told.get("labels", {}).items()}
        yield from compare(f"desired state of {name}", told.get("wished", ""), model.wish)
        yield from compare(f"labels of {name}", labels, model.labels)
        yield from compare(f"replicas behind with {name}", told.get("behind", []), [])
        state = "READY" if model.served else "UNAVAILABLE"
        expected = dict.fromkeys(in_service, state) if model.versions else {}
        # An index may still have a model without files.
        if model.versions or told:
            yield from compare(f"replicas of {name}", told.get("replicas", {}), expected)
    for name, wish in world.wishes.items():
        told = listed.get(name, {})
        yield from compare(f"desired state of {name}", told.get("wished", ""), wish)
        yield from compare(f"replicas behind with {name}", told.get("behind", []), [])
    declared = listed.get(EXTRA, {}).get("declared", False)
    yield from compare(f"declaration of {EXTRA}", declared, world.has_extra_model)
    replicas = ask(gateway, "/v1/replicas").json()["replicas"]
    cordoned = [each["address"] for each in replicas if each.get("cordoned")]
    yield from compare("cordoned replicas", cordoned, [first] if world.is_cordoned else [])
    status = ask(gateway, "/v1/models", EXTRA_KEY).status_code
    yield from compare("status with the added key", status, 200 if world.has_extra_key else 401)


def check_answers(gateway: GatewayProcess, world: World) -> Iterator[str]:
    """Check the responses of a gateway to inferences, and the files that it lists."""
    for name, model in world.models.items():
        path = f"/v1/models/{name}"
        yield from compare(name, infer(gateway, path), expected_answer(model))
        for label, version in model.labels.items():
            answer = infer(gateway, f"{path}/versions/{label}")
            expected = model.served.get(version, "LABEL_NOT_READY")
            yield from compare(f"{name} {label}", answer, expected)
        response = ask(gateway, f"{path}/files")
        listed = response.json().get("files", [])
        files = {each["path"]: each["sha256"] for each in listed}
        yield from compare(f"files of {name}", files, expected_files(model))

    for name in ENSEMBLES:
        if world.wishes[name] == LOADED:
            expected = STEP_NUMBER * len(STEPS[name])
            yield from compare(name, infer(gateway, f"/v1/models/{name}"), expected)


def count_actions(fleet: Fleet) -> dict[str, list[str]]:
    """Return the counts of the reconciler's actions, by gateway."""
    counts = {}
    for name, gateway in fleet.gateways.items():
        lines = ask(gateway, "/metrics").text.splitlines()
        counts[name] = [line for line in lines if ACTIONS.match(line)]
    return counts


def infer(gateway: GatewayProcess, path: str) -> int | str:
    """The number that the model added, or the code of the error."""
    url = f"{gateway.url}{path}/infer"
    response = CLIENT.post(url, json=BODY, headers=bearer(ADMIN))
    document = response.json()
    if response.is_success:
        return int(document["outputs"]["Y"][0]) - 1
    return str(document["code"])


def expected_answer(model: Model) -> int | str:
    if model.served:
        return model.served[max(model.served)]
    return "MODEL_NOT_READY" if model.versions else "MODEL_NOT_FOUND"


def expected_files(model: Model) -> Mapping[str, str]:
    texts = {f"{each}/model.py": format_source(number) for each, number in model.versions.items()}
    if texts:
        texts["config.pbtxt"] = ADDING_CONFIG
    return {path: hashlib.sha256(text.encode()).hexdigest() for path, text in texts.items()}


def check_agreement(fleet: Fleet) -> Iterator[str]:
    """Compare what the gateways list of models, but for what each has seen itself: errors, and steps."""
    documents = []
    for gateway in fleet.gateways.values():
        listed = list_models(gateway)
        for model in listed.values():
            model.pop("last_error", None)
            model.pop("steps", None)
        documents.append(listed)
    one, other = documents
    for name in sorted(one.keys() | other.keys()):
        if one.get(name) != other.get(name):
            yield f"the gateways disagree about {name}: {one.get(name)} and {other.get(name)}"


def check_leftovers(fleet: Fleet) -> Iterator[str]:
    """Files of changes that are over; those by which processes lock may stay."""
    found = (fleet.folder / "models").rglob(".triton-gateway-*")
    left = sorted(str(path.relative_to(fleet.folder)) for path in found if path.suffix != ".lock")
    yield from compare("temporary files", [name for name in left if not name.endswith("lock")], [])


def find_log_fault(fleet: Fleet) -> str:
    """Return the first lines in the gateways' logs that are always a fault of theirs, with what follows."""
    words = (*FAULTS, "Traceback")
    for name, gateway in fleet.gateways.items():
        for number, line in enumerate(gateway.lines):
            if any(word in line for word in words):
                return "\n".join([f"{name} logged:", *gateway.lines[number : number + LOG_LINES]])
    return ""
