"""What a state may wish: code only where uploading is allowed, whoever wrote it there."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.errors import Forbidden, MalformedRequest
from gateway.fleet.load_parameters import check_load_parameters
from gateway.fleet.models_file import DeclaredModel
from gateway.fleet.reconcile_plan import filter_uploads, merge_declared_models
from gateway.state.desired import DesiredModel

PLAIN = {
    "a": DesiredModel(True, {}, 1),
    "b": DesiredModel(False, {}, 2),
    "c": DesiredModel(True, {"unload_dependents": True}, 3),
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
    {"anything": 1},
    {"unload_dependents": "yes"},
]


@pytest.mark.fault("somebody writes code into the state, in its file or in Redis")
@pytest.mark.parametrize("parameters", CODE)
def test_code_is_ignored_by_name_unless_uploading_is_allowed(parameters: dict[str, Any]) -> None:
    wishes = {**PLAIN, "evil": DesiredModel(True, parameters, 4)}
    found, ignored = filter_uploads(wishes, can_upload=False)
    assert found == PLAIN
    assert list(ignored) == ["evil"]
    assert "GATEWAY_MODEL_UPLOADS=code" in ignored["evil"]
    assert filter_uploads(wishes, can_upload=True) == (wishes, {})


@pytest.mark.parametrize("parameters", NEITHER)
def test_what_no_load_may_bring_is_ignored_in_any_case(parameters: dict[str, Any]) -> None:
    wishes = {**PLAIN, "odd": DesiredModel(True, parameters, 4)}
    for uploads in (False, True):
        found, ignored = filter_uploads(wishes, can_upload=uploads)
        assert (found, list(ignored)) == (PLAIN, ["odd"])


@pytest.mark.parametrize("name", ["", "..", "../a", "a/b", "a\\b", "%2e%2e%2fa", "a\0", "a\n"])
def test_a_name_that_is_a_path_or_unprintable_is_ignored(name: str) -> None:
    wishes = {**PLAIN, name: DesiredModel(True, {}, 4)}
    found, ignored = filter_uploads(wishes, can_upload=True)
    assert (found, list(ignored)) == (PLAIN, [name])


def test_the_check_is_the_one_of_a_call() -> None:
    for parameters in CODE:
        check_load_parameters(parameters, can_upload=True)
        with pytest.raises(Forbidden):
            check_load_parameters(parameters, can_upload=False)
    for parameters in NEITHER:
        with pytest.raises(MalformedRequest):
            check_load_parameters(parameters, can_upload=True)


def test_a_declared_model_keeps_its_declaration_where_the_state_is_ignored() -> None:
    declared = {"evil": DeclaredModel("evil", (), {"max_batch_size": 4})}
    found, _ = filter_uploads({"evil": DesiredModel(True, CODE[0], 4)}, can_upload=False)
    assert merge_declared_models(found, declared) == {
        "evil": DesiredModel(
            True, {"config": {"max_batch_size": 4}}, 0, declared["evil"].config_digest
        )
    }


def test_a_declared_model_that_was_loaded_without_parameters_has_those_of_its_declaration() -> None:
    declared = {"a": DeclaredModel("a", (), {"max_batch_size": 4})}
    assert merge_declared_models({"a": DesiredModel(True, {}, 1)}, declared)["a"].parameters == {
        "config": {"max_batch_size": 4}
    }
