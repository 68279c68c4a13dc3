"""The rules for the gateways' answers to changes: what each means, and which faults excuse which code."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any, Final

import httpx

from tests.chaos.actions import DISK, Action, Response
from tests.chaos.fleet import MODELS, REDIS
from tests.chaos.world import STEPS, Answer, Outcome
from tests.support.errors import INTERNALS

RIVAL: Final = "another change of the model"
REPLICA = "replica"
GATEWAY = "gateway"
# Code → the beginnings of the causes that excuse it. Without any, it must follow from the world.
EXCUSES: Final[Mapping[str, tuple[str, ...]]] = {
    "STATE_UNAVAILABLE": (REDIS,),
    "REPOSITORY_FULL": (DISK,),
    "REPOSITORY_UNAVAILABLE": (DISK,),
    "CHANGE_IN_PROGRESS": (RIVAL, GATEWAY, REDIS),
    "CONFLICT": (RIVAL,),
    "PARTLY_DONE": (REPLICA, REDIS),  # another gateway does not learn of a change without Redis
    "VERSION_NOT_READY": (REPLICA, RIVAL),
    "UNAVAILABLE": (REPLICA,),
    "BAD_UPSTREAM": (REPLICA,),
    "MODEL_LOADING": (REPLICA,),
}


class Violation(Exception):
    """Something that must not be, whatever was disturbed."""


def judge(action: Action, response: Response | None, causes: Collection[str]) -> Answer:
    """Return what the response to a change means. Raises `Violation` if no cause explains it."""
    effect = action.effect
    assert effect is not None
    if isinstance(response, httpx.ConnectError):  # nothing was sent
        return Answer(effect, Outcome.refused, is_excused=True)
    if isinstance(response, httpx.HTTPError):
        return Answer(effect, Outcome.unknown, partial_effect=action.partial_effect)
    if response is None or response.is_success:
        return Answer(effect, Outcome.done)
    document: dict[str, Any] = response.json()
    check_error(action, document)
    code = document["code"]
    is_excused = any(cause.startswith(EXCUSES.get(code, ())) for cause in causes)
    if response.status_code >= 500 and not is_excused:
        raise Violation(f"nothing that was disturbed explains {code}: {document['error']}")
    if code == "PARTLY_DONE":
        return Answer(effect, Outcome.partly_done, code, partial_effect=action.partial_effect)
    return Answer(effect, Outcome.refused, code, is_excused)


def check_error(action: Action, document: Mapping[str, Any]) -> None:
    """Raise `Violation` if an error has another form than all, shows the inside, or promises too much."""
    if not {"error", "code", "request_id"} <= document.keys():
        raise Violation(f"the error has the keys {sorted(document)}")
    sentence = document["error"]
    if shown := [word for word in INTERNALS if word in sentence]:
        raise Violation(f"the error shows {shown[0]!r}: {sentence}")
    if "keeps retrying" in sentence and action.model not in (*MODELS, *STEPS):
        raise Violation(f"no gateway desires the state of {action.model}: {sentence}")
    counted = re.search(r"ed on (\d+) of (\d+) replicas", sentence)
    outcomes = document.get("replicas", {}).values()
    if counted and int(counted[1]) != sum("reason" not in outcome for outcome in outcomes):
        raise Violation(f"the report has another number of replicas: {document}")


def describe(action: Action, response: Response | None) -> str:
    """Return a description of an action and of the response to it."""
    if isinstance(response, httpx.Response):
        code = "" if response.is_success else f" {response.json().get('code')}"
        return f"{action.text}: {response.status_code}{code}"
    return action.text if response is None else f"{action.text}: {type(response).__name__}"
