"""Version labels as values: a name for the version of a model, or for several versions with their shares.

They are stored in a table of the state, and are a key of the models file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeGuard

from gateway.messages import normalize_version, quote_text
from gateway.repository.models_file import BadModelsFile
from gateway.repository.state.content import Table, TableEntry
from gateway.repository.state.documents import UnreadableState

LABEL_NAME: Final = re.compile("[a-z][a-z0-9_-]{0,62}")
DEFAULT_LABEL: Final = "default"  # the label of requests that name no version
STICKY_BY_KEY: Final = "key"
MAX_VERSIONS: Final = 16
MAX_SHARE: Final = 1_000_000
LABEL_KEYS: Final = frozenset(("version", "versions", "sticky", "shadow"))
SHADOW_KEYS: Final = frozenset(("version", "percent"))

ModelLabels = Mapping[str, "VersionLabel"]
LabelTable = Mapping[str, ModelLabels]  # model → label → value


class InvalidLabel(ValueError):
    """An invalid label; the message describes a valid one."""


@dataclass(frozen=True)
class Shadow:
    """A version that gets copies of a share of the requests. Its responses are forgotten."""

    version: str
    percent: float = 100.0

    def to_dict(self) -> dict[str, Any]:
        return {"version": self.version, "percent": self.percent}


@dataclass(frozen=True)
class VersionLabel:
    """The versions that a label means, with their shares of the requests."""

    shares: Mapping[str, int]
    is_sticky_by_key: bool = False  # the name of the caller's key replaces a missing X-Split-Key
    shadow: Shadow | None = None

    @property
    def is_split(self) -> bool:
        return len(self.shares) > 1

    @property
    def versions(self) -> tuple[str, ...]:
        shadow = () if self.shadow is None else (self.shadow.version,)
        return tuple(dict.fromkeys((*self.shares, *shadow)))

    def to_dict(self) -> dict[str, Any]:
        shares = dict(self.shares)
        document: dict[str, Any] = (
            {"versions": shares} if self.is_split else {"version": min(shares)}
        )
        if self.is_sticky_by_key:
            document["sticky"] = STICKY_BY_KEY
        if self.shadow is not None:
            document["shadow"] = self.shadow.to_dict()
        return document


def is_label_name(name: str) -> bool:
    return LABEL_NAME.fullmatch(name) is not None


def check_label_name(name: str) -> None:
    if not is_label_name(name):
        raise InvalidLabel(
            f"{quote_text(name)} is not a valid label: a label begins with a letter and has at most 63 of "
            "a-z, 0-9, - and _"
        )


def parse_label(document: Any) -> VersionLabel:
    """Return the label that a JSON object describes. Raises `InvalidLabel`."""
    if not isinstance(document, dict) or ("version" in document) is ("versions" in document):
        raise InvalidLabel(
            'a label is an object with "version", or with "versions" and the share of each'
        )
    check_keys("a label", document, LABEL_KEYS)
    if "version" in document:
        shares = {parse_version(document["version"]): 1}
    else:
        shares = parse_shares(document["versions"])
    sticky = document.get("sticky")
    if sticky not in (None, STICKY_BY_KEY):
        raise InvalidLabel(f'"sticky" must be "{STICKY_BY_KEY}"')
    shadow = document.get("shadow")
    label = VersionLabel(
        shares, sticky is not None, None if shadow is None else parse_shadow(shadow)
    )
    if label.shadow is not None and label.shadow.version in shares:
        raise InvalidLabel(
            f"version {label.shadow.version} cannot be the label's shadow, because the label names it already"
        )
    return label


def parse_stored_label(entry: TableEntry) -> VersionLabel:
    """Return a label of the state. Raises `UnreadableState`."""
    try:
        check_label_name(entry.keys[1])
        return parse_label(entry.document)
    except InvalidLabel as exc:
        raise UnreadableState(f"invalid label: {exc}") from None


LABELS: Final[Table[LabelTable]] = Table("labels", parse_stored_label)


def parse_declared_labels(entry: Mapping[str, Any]) -> ModelLabels:
    """Parse labels by name, each with a version, or with the object that the API accepts.

    Raises `BadModelsFile`.
    """
    model = entry["name"]
    labels = entry[LABELS.name] or {}
    if not isinstance(labels, dict):
        raise BadModelsFile(f"labels of model {model!r} must be an object, such as {{stable: 1}}")
    declared = {}
    for name, value in labels.items():
        try:
            check_label_name(str(name))
            label = parse_label(value if isinstance(value, dict) else {"version": value})
        except InvalidLabel as exc:
            raise BadModelsFile(f"label {str(name)!r} of model {model!r}: {exc}") from None
        declared[str(name)] = label
    return declared


def parse_shares(document: Any) -> dict[str, int]:
    if not isinstance(document, dict) or not 1 <= len(document) <= MAX_VERSIONS:
        raise InvalidLabel(
            f'"versions" must be an object with 1 to {MAX_VERSIONS} versions and their shares'
        )
    shares = {parse_version(version): share for version, share in document.items()}
    if len(shares) < len(document):
        raise InvalidLabel('"versions" contains a version twice')
    if not all(is_int(share) and 1 <= share <= MAX_SHARE for share in shares.values()):
        raise InvalidLabel(f"a share must be a whole number from 1 to {MAX_SHARE}")
    # In one order, so that equal labels choose alike on every gateway.
    return {version: shares[version] for version in sorted(shares, key=int)}


def parse_shadow(document: Any) -> Shadow:
    if not isinstance(document, dict) or "version" not in document:
        raise InvalidLabel('"shadow" must be an object with "version", and optionally "percent"')
    check_keys("a shadow", document, SHADOW_KEYS)
    percent = document.get("percent", 100)
    if not is_number(percent) or not 0 < percent <= 100:
        raise InvalidLabel('"percent" must be a number above 0, and at most 100')
    return Shadow(parse_version(document["version"]), float(percent))


def parse_version(version: Any) -> str:
    normalized = (
        normalize_version(str(version)) if is_int(version) or isinstance(version, str) else None
    )
    if normalized is None:
        raise InvalidLabel(
            f"{quote_text(str(version))} is not a valid version; a version is a number"
        )
    return normalized


def check_keys(subject: str, document: Mapping[Any, Any], valid: frozenset[str]) -> None:
    """Check that an object has valid keys only. Raises `InvalidLabel`."""
    if unknown := document.keys() - valid:
        raise InvalidLabel(
            f"{subject} has no key {quote_text(min(map(str, unknown)))}; its keys are "
            f"{', '.join(sorted(valid))}"
        )


def is_int(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> TypeGuard[float]:
    return is_int(value) or isinstance(value, float)
