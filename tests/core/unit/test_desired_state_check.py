"""Desired models with code are ignored unless uploads are allowed, whoever wrote the state."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.errors import Forbidden, MalformedRequest
from gateway.repository.load_parameters import check_load_parameters
from gateway.repository.plan import find_ignored_models
from gateway.repository.state.content import ALL, DesiredModel

PLAIN = {
    "a": DesiredModel(ALL, {}, 1),
    "b": DesiredModel(0, {}, 2),
    "c": DesiredModel(ALL, {"unload_dependents": True}, 3),
}
CODE: list[dict[str, Any]] = [
    {"config": "{}"},
    {"config": {"backend": "python"}},
    {"file:1/model.py": "AAAA"},
    {"config": "{}", "file:1/model.py": "AAAA"},
]
NEITHER: list[dict[str, Any]] = [
    {"file:../../other/1/model.py": "AAAA"},
    {"file:/etc/x": "AAAA"},
    {f"file:1/{'a' * 256}": "AAAA"},
    {f"file:{'a/' * 2000}a": "AAAA"},
    {"anything": 1},
    {"unload_dependents": "yes"},
]


@pytest.mark.fault("somebody writes code into the state, in its file or in Redis")
@pytest.mark.parametrize("parameters", CODE)
def test_code_is_ignored_unless_uploads_are_allowed(parameters: dict[str, Any]) -> None:
    wishes = {**PLAIN, "evil": DesiredModel(ALL, parameters, 4)}
    ignored = find_ignored_models(wishes, can_upload=False)
    assert list(ignored) == ["evil"]
    assert "GATEWAY_MODEL_UPLOADS=code" in ignored["evil"]
    assert find_ignored_models(wishes, can_upload=True) == {}


def test_invalid_parameters_and_names_are_always_ignored() -> None:
    names = ("", "..", "../a", "a/b", "a\\b", "%2e%2e%2fa", "a\0", "a\n")
    invalid = [("odd", DesiredModel(ALL, parameters, 4)) for parameters in NEITHER]
    invalid += [(name, DesiredModel(ALL, {}, 4)) for name in names]
    for name, wish in invalid:
        for can_upload in (False, True):
            ignored = find_ignored_models({**PLAIN, name: wish}, can_upload=can_upload)
            assert list(ignored) == [name]


def test_load_parameters_are_checked_like_those_of_the_state() -> None:
    for parameters in CODE:
        check_load_parameters(parameters, can_upload=True)
        with pytest.raises(Forbidden):
            check_load_parameters(parameters, can_upload=False)
    for parameters in NEITHER:
        with pytest.raises(MalformedRequest):
            check_load_parameters(parameters, can_upload=True)
