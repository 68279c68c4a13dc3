"""The target of a request to Triton."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from gateway.errors import UnknownModel
from gateway.triton.sequence import SequenceStep


class VersionFallback(Protocol):
    """Names another version for a request that Triton has refused, because its version was unloaded."""

    def choose_other_version(self, refused: str, step: SequenceStep | None) -> str:
        """Return a version; empty if there is no other one."""


class RequestTarget(NamedTuple):
    """The target of a request to Triton, used to choose a replica and to build error messages."""

    model: str = ""
    version: str = ""
    timeout_s: float = 0.0
    is_health_check: bool = False
    sequence_step: SequenceStep | None = None
    not_found_error: type[UnknownModel] = UnknownModel  # the error for a model that is not found
    can_activate: bool = False  # the request waits for a model that is loaded on demand
    fallback: VersionFallback | None = None
