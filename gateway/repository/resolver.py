"""The resolution of a requested model and version to what the caller may use."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Container
from typing import Final, NamedTuple, Protocol

from gateway.access.auth import authorize
from gateway.callers import RIGHT_TO_INFER, Right
from gateway.errors import GatewayError, InvalidVersion, NotFound, UnknownModel
from gateway.messages import is_model_name, normalize_version
from gateway.telemetry.request_info import RequestScope
from gateway.triton.sequence import SequenceStep

# The number at the start of a text, as C++'s `std::stol` finds it.
LEADING_NUMBER: Final = re.compile(r"[ \t\n\v\f\r]*([+-]?)0*([0-9]+)")
MAX_VERSION: Final = (1 << 63) - 1


class VersionChoice(Protocol):
    """The version of one request that a rule chose."""

    version: str

    def choose_sequence_version(self, step: SequenceStep) -> str:
        """Return the version of a sequence, which all of its requests keep."""

    def choose_other_version(self, refused: str, step: SequenceStep | None) -> str:
        """Return another version after Triton has refused one; empty if there is none."""


class VersionPolicy:
    """The rules that say which version of a model a request means: here, a version is a number.

    Without one, Triton chooses. A capability overrides the methods.
    """

    @property
    def models_with_rules(self) -> Container[str]:
        return ()

    def is_label(self, version: str) -> bool:
        return False

    def find_default_versions(self, model: str) -> Collection[str]:
        """Return the versions that requests without a version mean; empty if Triton chooses."""
        return ()

    def choose(self, scope: RequestScope, model: str, version: str) -> VersionChoice | None:
        """Return the choice for an inference of a model with rules; None if no rule applies."""
        return None

    def explain_unknown(self, model: str, version: str) -> GatewayError | None:
        """Return the error for a version that is no number, if it is not simply unknown."""
        return None

    async def set_default_version(self, model: str, version: str) -> None:
        """Let requests without a version mean this one."""
        raise NotFound(
            "this gateway has no version labels, and so no default versions; name the version in each request"
        )

    async def forget_model(self, model: str) -> None:
        """Remove the rules of a model whose files were removed."""


class ModelTarget(NamedTuple):
    """A model and a version that the caller may use.

    Every request has one. A frozen dataclass would cost 1.7 % of the instructions of a `/v2` request.
    """

    model: str
    version: str = ""  # normalized; empty means Triton's choice
    choice: VersionChoice | None = None  # set if a rule decided on the version

    @property
    def served_version(self) -> str:
        """Return the version that serves the request; the choice may change it while the request is sent."""
        return self.version if self.choice is None else self.choice.version

    def with_sequence(self, step: SequenceStep | None) -> ModelTarget:
        """Return the target of a sequence step, which keeps the version of the sequence."""
        if step is None or self.choice is None:
            return self
        return self._replace(version=self.choice.choose_sequence_version(step))


NO_MODEL: Final = ModelTarget("")


class ModelResolver:
    """Resolves the model of every request, whether its name came from a path, a body or gRPC."""

    def __init__(self) -> None:
        self.policy = VersionPolicy()

    def resolve(
        self,
        scope: RequestScope,
        right: Right,
        model: str,
        version: str = "",
        not_found_error: type[UnknownModel] = UnknownModel,
        parse_version: Callable[[str], str | None] = normalize_version,
    ) -> ModelTarget:
        """Return what the caller may use of the requested model and version.

        Raises `Forbidden` if the caller lacks the right, and `not_found_error` if it cannot see the model.
        Invalid names and versions are unknown as well: a server on the way could read them as another path.
        With the right to infer, the policy chooses the version, and each call is one choice.
        Raises the errors of the policy, and of `parse_version` for a version that is no label.
        """
        check_model(scope, right, model, version, not_found_error)
        if right is RIGHT_TO_INFER and model in self.policy.models_with_rules:
            choice = self.policy.choose(scope, model, version)
            if choice is not None:
                return ModelTarget(model, choice.version, choice)
        if not version:
            return ModelTarget(model)
        number = parse_version(version)
        if number is not None:
            return ModelTarget(model, number)
        if right is RIGHT_TO_INFER and (error := self.policy.explain_unknown(model, version)):
            raise error
        raise not_found_error(model, version)

    def check_served_name(self, scope: RequestScope, right: Right, name: str) -> None:
        """Check the caller's rights to a model that another server names, e.g. `org/model`.

        Raises `Forbidden` or `UnknownModel`.
        """
        authorize(scope, right, name)
        caller = scope["request_info"].caller
        if not caller.matches(name):
            raise UnknownModel(name)

    def check_access(
        self,
        scope: RequestScope,
        right: Right,
        model: str,
        version: str = "",
        not_found_error: type[UnknownModel] = UnknownModel,
    ) -> None:
        """Check the same as `resolve`, but choose no version for a name that stands for some."""
        if version and not self.policy.is_label(version):
            self.resolve(scope, right, model, version=version, not_found_error=not_found_error)
        else:
            check_model(scope, right, model, version, not_found_error)


def parse_triton_version(version: str) -> str:
    """Return the number that Triton reads in a version, for which `1x` is 1. Raises `InvalidVersion`."""
    match = LEADING_NUMBER.match(version)
    if match is None:
        raise InvalidVersion(version)
    sign, number = match.groups()
    if len(number) > len(str(MAX_VERSION)) or int(number) > MAX_VERSION:
        raise InvalidVersion(version)
    if sign == "-" and number != "0":
        raise InvalidVersion(version, is_negative=True)
    return str(number)


def check_model(
    scope: RequestScope, right: Right, model: str, version: str, not_found_error: type[UnknownModel]
) -> None:
    authorize(scope, right, model)
    caller = scope["request_info"].caller
    if model and not (is_model_name(model) and caller.can_see(model)):
        raise not_found_error(model, version)
