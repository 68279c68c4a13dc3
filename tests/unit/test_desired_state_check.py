"""What a state may wish: code only where uploading is allowed, whoever wrote it there."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.errors import Forbidden, Malformed
from gateway.fleet.declared import Declared
from gateway.fleet.plan import wanted, without_uploads
from gateway.fleet.uploads import check_parameters
from gateway.state.wishes import Wish

PLAIN = {
    "a": Wish(True, {}, 1),
    "b": Wish(False, {}, 2),
    "c": Wish(True, {"unload_dependents": True}, 3),
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


@pytest.mark.parametrize("parameters", CODE)
def test_code_is_ignored_by_name_unless_uploading_is_allowed(parameters: dict[str, Any]) -> None:
    wishes = {**PLAIN, "evil": Wish(True, parameters, 4)}
    found, ignored = without_uploads(wishes, uploads=False)
    assert found == PLAIN
    assert list(ignored) == ["evil"]
    assert "GATEWAY_ALLOW_MODEL_UPLOAD" in ignored["evil"]
    assert without_uploads(wishes, uploads=True) == (wishes, {})


@pytest.mark.parametrize("parameters", NEITHER)
def test_what_no_load_may_bring_is_ignored_in_any_case(parameters: dict[str, Any]) -> None:
    wishes = {**PLAIN, "odd": Wish(True, parameters, 4)}
    for uploads in (False, True):
        found, ignored = without_uploads(wishes, uploads=uploads)
        assert (found, list(ignored)) == (PLAIN, ["odd"])


def test_the_check_is_the_one_of_a_call() -> None:
    for parameters in CODE:
        check_parameters(parameters, uploads=True)
        with pytest.raises(Forbidden):
            check_parameters(parameters, uploads=False)
    for parameters in NEITHER:
        with pytest.raises(Malformed):
            check_parameters(parameters, uploads=True)


def test_a_declared_model_keeps_its_declaration_where_the_state_is_ignored() -> None:
    declared = {"evil": Declared("evil", (), {"max_batch_size": 4})}
    found, _ = without_uploads({"evil": Wish(True, CODE[0], 4)}, uploads=False)
    assert wanted(found, declared) == {
        "evil": Wish(True, {"config": {"max_batch_size": 4}}, 0, declared["evil"].digest)
    }


def test_a_declared_model_that_was_loaded_without_parameters_has_those_of_its_declaration() -> None:
    declared = {"a": Declared("a", (), {"max_batch_size": 4})}
    assert wanted({"a": Wish(True, {}, 1)}, declared)["a"].parameters == {
        "config": {"max_batch_size": 4}
    }
