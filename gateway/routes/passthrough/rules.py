"""The rules of `/v2`: the paths that are forwarded, answered here or refused."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from starlette.types import Scope

from gateway.callers import Right
from gateway.errors import Forbidden, MethodNotAllowed, NotFound, UnknownModel, UnknownModelToTrace
from gateway.repository.resolver import parse_triton_version
from gateway.triton.json_guard import GENERATE_RULES, INFER_RULES, JsonRules

SHARED_MEMORY_PATTERN: Final = "/v2/(?:system|cuda)sharedmemory"
REGION_PATTERN: Final = "(?:/region/(?P<region>[^/]+))?"
MODEL_PATTERN: Final = r"/v2/models/(?P<model>[^/]+)(?:/versions/(?P<version>[^/]+))?"
MAX_CACHED_PATH_LENGTH: Final = 256
# Answered for the whole fleet by `routes/`.
FLEET_PATHS: Final = frozenset((b"/v2/models", b"/v2/health/ready"))


@dataclass(frozen=True, slots=True)
class Forwarding:
    """Properties of a request that is forwarded to Triton."""

    is_health_check: bool = False
    is_inference: bool = False  # requires a slot
    json_rules: JsonRules = GENERATE_RULES
    can_activate: bool = False  # waits for a model that is loaded on demand


@dataclass(frozen=True, slots=True)
class FixedResponse:
    """A response that needs no request to Triton."""

    body: bytes


@dataclass(frozen=True, slots=True)
class Statistics:
    """The statistics of a model or of all models, summed over the fleet."""


@dataclass(frozen=True, slots=True)
class Refusal:
    message: str


Action = Forwarding | FixedResponse | Statistics


@dataclass(frozen=True, slots=True)
class RouteRule:
    """The action for requests of matching paths, and the right that they require."""

    pattern: re.Pattern[str]
    methods: frozenset[str]
    action: Action | Refusal
    right: Right = Right.infer
    for_all_models: bool = False
    has_default_version: bool = True  # the label `default` applies
    not_found_error: type[UnknownModel] = UnknownModel


def make_rule(path: str, methods: str, action: Action | Refusal, **options: Any) -> RouteRule:
    return RouteRule(re.compile(path), frozenset(methods.split()), action, **options)


READ: Final = "GET HEAD"
READ_OR_WRITE: Final = "GET HEAD POST"
FORWARD: Final = Forwarding()
HEALTH: Final = Forwarding(is_health_check=True)
STATISTICS: Final = Statistics()
METADATA: Final = Forwarding(can_activate=True)
INFER: Final = Forwarding(is_inference=True, json_rules=INFER_RULES, can_activate=True)
GENERATE: Final = Forwarding(is_inference=True, can_activate=True)
NO_SHARED_MEMORY: Final = Refusal(
    "shared memory cannot be used through the gateway; send the tensors in the body"
)
# The first rule that matches applies: the first one precedes the rule for a model named stats.
ROUTE_RULES: Final = (
    make_rule("/v2/models/stats", READ, STATISTICS, for_all_models=True),
    make_rule(f"{MODEL_PATTERN}/infer", "POST", INFER),
    make_rule(f"{MODEL_PATTERN}/(generate|generate_stream)", "POST", GENERATE),
    make_rule(f"{MODEL_PATTERN}/ready", READ, HEALTH),
    # Without a version, Triton returns the statistics of all versions.
    make_rule(f"{MODEL_PATTERN}/stats", READ, STATISTICS, has_default_version=False),
    make_rule(f"{MODEL_PATTERN}(/config)?", READ, METADATA),
    make_rule("/v2/health/live", READ, HEALTH),
    make_rule("/v2", READ, FORWARD),
    # Many clients call these first to clean up. No region is ever registered.
    make_rule(f"{SHARED_MEMORY_PATTERN}{REGION_PATTERN}/status", READ, FixedResponse(b"[]")),
    make_rule(f"{SHARED_MEMORY_PATTERN}{REGION_PATTERN}/unregister", "POST", FixedResponse(b"")),
    make_rule(f"{SHARED_MEMORY_PATTERN}(/.*)?", READ_OR_WRITE, NO_SHARED_MEMORY),
    make_rule(
        "/v2/(logging|trace/setting)",
        READ_OR_WRITE,
        FORWARD,
        right=Right.manage,
        for_all_models=True,
    ),
    make_rule(
        f"{MODEL_PATTERN}/trace/setting",
        READ_OR_WRITE,
        FORWARD,
        right=Right.manage,
        not_found_error=UnknownModelToTrace,
    ),
)


@dataclass(frozen=True, slots=True)
class MatchedRoute:
    """The rule of a path, and the path's parameters."""

    rule: RouteRule
    action: Action
    template: str  # the path with placeholders, a label value of metrics
    model: str
    version: str
    path: bytes
    version_start: int  # where the path has the version, or would have it

    def path_for_version(self, version: str) -> bytes:
        if version == self.version:
            return self.path
        return replace_version(self.path, self.version_start, self.version, version)


@lru_cache(1024)  # saves 0.5 % of a request whose version a label chooses
def replace_version(path: bytes, start: int, version: str, new_version: str) -> bytes:
    added = new_version if version else f"/versions/{new_version}"
    return b"%b%b%b" % (path[:start], added.encode(), path[start + len(version) :])


def is_passthrough(raw_path: bytes) -> bool:
    """Return whether the path is forwarded to Triton instead of being answered for the fleet.

    Like Triton, the gateway does not decode percent-encoded paths.
    """
    if raw_path[:4] not in (b"/v2", b"/v2/"):
        return False
    return not raw_path.startswith(b"/v2/repository") and raw_path not in FLEET_PATHS


def find_route(scope: Scope) -> MatchedRoute:
    path = scope["raw_path"].decode("latin-1")
    match = match_route_cached if len(path) <= MAX_CACHED_PATH_LENGTH else match_route
    return match(path, scope["method"])


def match_route(path: str, method: str) -> MatchedRoute:
    """Apply the rules to a path. Raises `NotFound`, `Forbidden`, `MethodNotAllowed` or `InvalidVersion`."""
    for rule in ROUTE_RULES:
        if match := rule.pattern.fullmatch(path):
            if isinstance(rule.action, Refusal):
                raise Forbidden(rule.action.message)
            if method not in rule.methods:
                raise MethodNotAllowed(rule.methods)
            return build_route(rule, rule.action, match)
    raise NotFound("path not found in Triton's API; for the available paths, see GET /docs")


def build_route(rule: RouteRule, action: Action, match: re.Match[str]) -> MatchedRoute:
    names = match.groupdict("")
    model = names.get("model", "")
    version = names.get("version", "")
    if version.isascii() and version.isdigit():
        parse_triton_version(version)
    version_start = 0
    if model:
        version_start = match.start("version") if version else match.end("model")
    return MatchedRoute(
        rule=rule,
        action=action,
        template=format_template(match),
        model=model,
        version=version,
        path=match.string.encode("latin-1"),
        version_start=version_start,
    )


def format_template(match: re.Match[str]) -> str:
    """Return the path with placeholders: `{model}`, `{version}` and `{region}`.

    The rules fix the rest of the path, so that the number of templates is bounded: they are label values.
    """
    template = match.string
    present = [name for name, value in match.groupdict().items() if value is not None]
    for name in sorted(present, key=match.start, reverse=True):  # keeps the spans valid
        start, end = match.span(name)
        template = f"{template[:start]}{{{name}}}{template[end:]}"
    return template


match_route_cached = lru_cache(1024)(match_route)
