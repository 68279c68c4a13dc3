"""Requests of `/v2` whose version a label decided."""

from __future__ import annotations

from typing import Final

from gateway.fleet.resolver import LabelledTarget
from gateway.passthrough.rules import MatchedRoute, change_version_cached
from gateway.tensors.sequence import SequenceStep

VERSION_HEADER: Final = b"x-model-version"


class LabelledRequest:
    """The route of a request, with the version that its label decided on in its path."""

    def __init__(self, route: MatchedRoute, target: LabelledTarget) -> None:
        self._target = target
        self._requested = route
        self.route = route
        if route.version or route.rule.has_default_version:
            self.route = change_version_cached(route, target.version)

    def set_sequence(self, step: SequenceStep) -> MatchedRoute:
        """Return the route with the version of the sequence."""
        version = self._target.choose_sequence_version(step)
        self.route = change_version_cached(self._requested, version)
        return self.route

    @property
    def response_header(self) -> tuple[bytes, bytes]:
        return VERSION_HEADER, self.route.version.encode()
