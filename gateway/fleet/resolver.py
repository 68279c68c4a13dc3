"""The resolution of a requested model and version to what the caller may use."""

from __future__ import annotations

from typing import NamedTuple

from starlette.types import Scope

from gateway.auth import authorize
from gateway.errors import UnknownModel
from gateway.keys import Caller, Right
from gateway.names import is_model_name, normalize_version


class ModelTarget(NamedTuple):
    """A model and a version that the caller may use."""

    model: str
    version: str = ""  # normalized; empty means Triton's choice


class ModelResolver:
    """Resolves the model of every request, whether its name came from a path, a body or gRPC."""

    def resolve(
        self,
        scope: Scope,
        right: Right,
        model: str,
        version: str = "",
        not_found_error: type[UnknownModel] = UnknownModel,
    ) -> ModelTarget:
        """Raise `Forbidden` if the caller lacks the right, `not_found_error` if it cannot see the model.

        Invalid names and versions are unknown as well: a server on the way could read them as another path.
        """
        authorize(scope, right, model)
        caller: Caller = scope["request_info"].caller
        if model and not (is_model_name(model) and caller.can_see(model)):
            raise not_found_error(model, version)
        if not version:
            return ModelTarget(model)
        number = normalize_version(version)
        if number is None:
            raise not_found_error(model, version)
        return ModelTarget(model, number)

    def check_served_name(self, scope: Scope, right: Right, name: str) -> None:
        """Check the caller's rights to a model that another server names, e.g. `org/model`.

        Raises `Forbidden` or `UnknownModel`.
        """
        authorize(scope, right, name)
        caller: Caller = scope["request_info"].caller
        if not caller.matches(name):
            raise UnknownModel(name)
