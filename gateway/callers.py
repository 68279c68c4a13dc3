"""Callers and their rights: values that every edge and every check uses."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum, IntEnum
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Final

from gateway.messages import quote_path_segment, quote_text

ANY_MODEL: Final = ("*",)
MAX_CACHED_MODELS: Final = 1024
MAX_CACHED_NAME_LENGTH: Final = 256


class Right(Enum):
    infer = "infer"  # inference and model metadata
    metrics = "metrics"
    fleet = "fleet"  # addresses and health of the replicas
    manage = "manage"

    __hash__ = object.__hash__  # Enum's own hash is written in Python, and every request uses it


# Each request compares these, which costs 0.4 µs more if they are read from their class.
RIGHT_TO_INFER: Final = Right.infer
RIGHT_TO_MANAGE: Final = Right.manage


class Role(str, Enum):
    infer = "infer"
    metrics = "metrics"
    admin = "admin"


ROLE_RIGHTS: Final = {
    Role.infer: frozenset((Right.infer,)),
    Role.metrics: frozenset((Right.metrics,)),
    Role.admin: frozenset(Right),
}


class Priority(IntEnum):
    """The class of a request while requests wait for their turn."""

    background = 0
    normal = 1
    interactive = 2


class CallerKind(Enum):
    key = "key"
    rule = "rule"  # a rule of the keys file matches the token or the certificate
    anonymous = "anonymous"  # the gateway has no keys
    unauthenticated = "unauthenticated"  # the path requires no key


@dataclass(frozen=True)
class CallerLimits:
    """Limits of a caller; None is no limit."""

    requests_per_second: float | None = None
    requests_per_day: int | None = None
    requests_per_month: int | None = None
    max_inflight: int | None = None

    @property
    def has_quota(self) -> bool:
        return (self.requests_per_day or self.requests_per_month) is not None


@dataclass(frozen=True)
class Caller:
    """A client, identified by its key or by a rule; `name` is the name of the key or the rule."""

    name: str
    roles: tuple[Role, ...] = ()
    models: tuple[str, ...] = ANY_MODEL
    limits: CallerLimits | None = None
    priority: Priority | None = None
    callback_secrets: tuple[str, ...] = field(default=(), repr=False)
    not_before: datetime | None = None
    expires: datetime | None = None
    digest: bytes = field(default=b"", repr=False)
    rights: frozenset[Right] = frozenset()
    kind: CallerKind = CallerKind.key
    # Whose the jobs are that it sends: a name can be given to another key later.
    id: str = ""
    may_administer_locally: bool = False  # a local program of the gateway's user has all rights
    _visibility_cache: dict[str, bool] = field(default_factory=dict, repr=False, compare=False)

    @property
    def label(self) -> str:
        """The words with which a message names the caller."""
        return f"{self.kind.value} {quote_text(self.name)}"

    @cached_property
    def can_see_all(self) -> bool:
        return "*" in self.models

    def can_see(self, model: str) -> bool:
        if self.can_see_all:
            return True
        visible = self._visibility_cache.get(model)
        if visible is None:
            visible = is_path_safe(model) and self.matches(model)
            if len(model) <= MAX_CACHED_NAME_LENGTH:
                if len(self._visibility_cache) >= MAX_CACHED_MODELS:
                    self._visibility_cache.clear()
                self._visibility_cache[model] = visible
        return visible

    def matches(self, name: str) -> bool:
        """Return whether a pattern of the key matches a name that does not become part of a path."""
        return any(fnmatchcase(name, glob) for glob in self.models)


def is_path_safe(model: str) -> bool:
    """Return whether the name needs no escaping in a path.

    Triton decodes nothing, but a proxy before it might: `res%2F..%2Fsecret` would match `res*` here and
    mean `secret` there.
    """
    return model not in (".", "..") and quote_path_segment(model) == model
