"""The resolution of a requested model and version to what the caller may use."""

from __future__ import annotations

from typing import Final, NamedTuple

from starlette.types import Scope

from gateway.access.auth import authorize
from gateway.callers import Caller, Right
from gateway.errors import UnknownModel
from gateway.names import is_model_name, normalize_version
from gateway.repository.versions.label_router import LabelRouter, UnknownLabel
from gateway.repository.versions.shadows import ShadowRunner
from gateway.repository.versions.version_choice import VersionChoice
from gateway.tensors.sequence import SequenceStep
from gateway.version_labels import DEFAULT_LABEL, is_label_name


class ModelTarget(NamedTuple):
    """A model and a version that the caller may use."""

    model: str
    version: str = ""  # normalized; empty means Triton's choice
    choice: VersionChoice | None = None  # if a label decided on the version

    def with_sequence(self, step: SequenceStep | None) -> ModelTarget:
        """Return the target of a sequence step, which keeps the version of the sequence."""
        if step is None or self.choice is None:
            return self
        return self._replace(version=self.choice.choose_sequence_version(step))


NO_MODEL: Final = ModelTarget("")


class ModelResolver:
    """Resolves the model of every request, whether its name came from a path, a body or gRPC."""

    def __init__(self, labels: LabelRouter, shadows: ShadowRunner) -> None:
        self.labels = labels
        self._shadows = shadows
        self._state = labels.state

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
        With the right to infer, a version can be a label. Each call chooses the version of one request.
        Raises `UnknownLabel` or `LabelNotReady`.
        """
        check_model(scope, right, model, version, not_found_error)
        labels = self._state.labels
        if labels and model in labels and right is Right.infer:
            label = self.labels.find_label(model, version or DEFAULT_LABEL)
            if label is not None:
                choice = VersionChoice(label, scope, self._shadows)
                return ModelTarget(model, choice.version, choice)
        if not version:
            return ModelTarget(model)
        number = normalize_version(version)
        if number is not None:
            return ModelTarget(model, number)
        if right is Right.infer and is_label_name(version) and self.labels.has_model(model):
            raise UnknownLabel(model, version, labels.get(model, ()))
        raise not_found_error(model, version)

    def check_served_name(self, scope: Scope, right: Right, name: str) -> None:
        """Check the caller's rights to a model that another server names, e.g. `org/model`.

        Raises `Forbidden` or `UnknownModel`.
        """
        authorize(scope, right, name)
        caller: Caller = scope["request_info"].caller
        if not caller.matches(name):
            raise UnknownModel(name)

    def check_access(
        self,
        scope: Scope,
        right: Right,
        model: str,
        version: str = "",
        not_found_error: type[UnknownModel] = UnknownModel,
    ) -> None:
        """Check the same, without the choice of a version that a label stands for."""
        if version and not is_label_name(version):
            self.resolve(scope, right, model, version, not_found_error)
        else:
            check_model(scope, right, model, version, not_found_error)


def check_model(
    scope: Scope, right: Right, model: str, version: str, not_found_error: type[UnknownModel]
) -> None:
    authorize(scope, right, model)
    caller: Caller = scope["request_info"].caller
    if model and not (is_model_name(model) and caller.can_see(model)):
        raise not_found_error(model, version)
