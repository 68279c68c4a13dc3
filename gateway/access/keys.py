"""The keys file: callers, their roles and the models that they may use. It holds hashes, never keys.

Error messages about a keys file do not quote its contents.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from datetime import datetime, timezone
from hmac import compare_digest
from pathlib import Path
from typing import Any, Final, TypeGuard

import yaml

from gateway.callers import ANY_MODEL, ROLE_RIGHTS, Caller, CallerKind, CallerLimits, Priority, Role
from gateway.config.files import YAML_ERRORS, Entries, WatchedFile, parse_yaml, read_config_file
from gateway.messages import CommandError, format_utc_time, join_names, parse_time
from gateway.webhooks import SECRET_PREFIX, decode_secret

KEY_PREFIX: Final = "tgw_"  # lets secret scanners find leaked keys
# The name is logged, so it must not be the key itself.
KEY_NAME: Final = re.compile(rf"(?!{KEY_PREFIX})[\w.@:/+-]{{1,64}}", re.ASCII)
SHA256_HEX: Final = re.compile(r"[0-9a-fA-F]{64}")
COUNT_FIELDS: Final = ("requests_per_day", "requests_per_month", "max_inflight")
LIMIT_FIELDS: Final = ("requests_per_second", *COUNT_FIELDS)
TIME_FIELDS: Final = ("not_before", "expires")
RIGHTS_FIELDS: Final = {
    "name", "roles", "models", "priority", "callback_secrets", *LIMIT_FIELDS,
}  # fmt: skip
KEY_FIELDS: Final = RIGHTS_FIELDS | {"id", "sha256", *TIME_FIELDS}
MAX_REQUEST_RATE: Final = 1e9
MAX_COUNT: Final = 10**15  # Redis counts in floating point
NO_LIMITS: Final = CallerLimits()
NEVER: Final = datetime.max.replace(tzinfo=timezone.utc)
KEYS: Final = "keys"  # the name of the list


class BadKeysFile(CommandError):
    """A keys file is invalid or cannot be read or written."""


@dataclass(frozen=True)
class CallerRule:
    """An entry of a list beside `keys`: the caller of requests with other credentials than a key."""

    caller: Caller


# Parses an entry of such a list, which the message calls by its label. Raises `BadKeysFile`.
RuleParser = Callable[[str, Any], CallerRule]
# The parsers of the lists that capabilities add, by the names of the lists.
RuleParsers = Mapping[str, RuleParser]
NO_RULES: Final[RuleParsers] = {}


@dataclass(frozen=True)
class KeysContent:
    """Callers by the SHA-256 of their key, and rules by the name of their list."""

    callers: Mapping[bytes, Caller]
    rules: Mapping[str, Sequence[CallerRule]]

    def list_rule_callers(self) -> list[Caller]:
        return [rule.caller for rules in self.rules.values() for rule in rules]

    def list_callers(self) -> list[Caller]:
        return [*self.callers.values(), *self.list_rule_callers()]


def parse_keys_content(text: str, parsers: RuleParsers) -> KeysContent:
    document = parse_document(text, parsers)
    callers = parse_keys_document(document)
    rules = {name: parse_rules(name, document.get(name, []), parsers[name]) for name in parsers}
    names = {caller.name for caller in callers.values()}
    for name, entries in rules.items():
        if not names.isdisjoint(entry.caller.name for entry in entries):
            raise BadKeysFile(f"a key and an entry of '{name}' have the same name")
    return KeysContent(callers, rules)


def parse_keys_document(document: Mapping[str, Any]) -> dict[bytes, Caller]:
    entries = document.get(KEYS, [])
    callers = [parse_key_entry(f"key {number}", entry) for number, entry in enumerate(entries, 1)]
    callers_by_digest = {caller.digest: caller for caller in callers}
    lasting_names = [caller.name for caller in callers if caller.expires is None]
    if len(set(lasting_names)) < len(lasting_names):
        raise BadKeysFile("two keys have the same name, and neither of them expires")
    if len(callers_by_digest) < len(callers):
        raise BadKeysFile("two keys have the same sha256")
    return callers_by_digest


def parse_rules(name: str, entries: Any, parse: RuleParser) -> Sequence[CallerRule]:
    return tuple(
        parse(f"entry {number} of '{name}'", each) for number, each in enumerate(entries, 1)
    )


def parse_document(text: str, parsers: RuleParsers | None = None) -> dict[str, Any]:
    """Return the lists of the file by their names, which are `keys` and those of the parsers, or any."""
    try:
        document = parse_yaml(text)
    except yaml.MarkedYAMLError as exc:
        mark = exc.problem_mark
        position = f" at line {mark.line + 1}" if mark is not None else ""
        raise BadKeysFile(f"invalid YAML{position}") from None
    except YAML_ERRORS:
        raise BadKeysFile("invalid YAML (aliases and duplicate fields are not supported)") from None
    if not isinstance(document, dict) or not document:
        raise BadKeysFile("the file must contain the field 'keys', with a list")
    known = {KEYS, *(parsers or ())}
    if parsers is not None and not document.keys() <= known:
        raise BadKeysFile(f"the file may contain no fields but {join_names(sorted(known))}")
    for name in sorted(known & document.keys()):
        if not isinstance(document[name], list):
            raise BadKeysFile(f"'{name}' must be a list")
    return document


def parse_key_entry(label: str, entry: Any) -> Caller:
    if not isinstance(entry, dict) or not set(entry) <= KEY_FIELDS:
        names = ", ".join(sorted(KEY_FIELDS))
        raise BadKeysFile(f"{label} must be an object with the fields {names}")
    name = entry.get("name")
    digest = entry.get("sha256")
    if not isinstance(name, str) or not KEY_NAME.fullmatch(name):
        raise BadKeysFile(
            f"the name of {label} must be 1 to 64 letters, digits and . @ : / + - _ (and not a key)"
        )
    if not isinstance(digest, str) or not SHA256_HEX.fullmatch(digest):
        raise BadKeysFile(
            f"the sha256 of {label} ({name}) must be 64 hexadecimal digits, in quotes"
        )
    key_id = entry.get("id", name)
    if not isinstance(key_id, str) or not KEY_NAME.fullmatch(key_id):
        raise BadKeysFile(
            f"the id of {label} ({name}) must be 1 to 64 letters, digits and . @ : / + - _, in quotes"
        )
    return replace(parse_caller(label, name, entry, bytes.fromhex(digest)), id=key_id)


def parse_caller(
    label: str,
    name: str,
    entry: Mapping[str, Any],
    digest: bytes = b"",
    *,
    kind: CallerKind = CallerKind.key,
) -> Caller:
    """Return the caller with the rights of an entry. Raises `BadKeysFile`."""
    suffix = f"of {label} ({name})"
    roles = entry.get("roles")
    if not is_string_list(roles) or not set(roles) <= set(Role):
        raise BadKeysFile(f"the roles {suffix} must be a list of {', '.join(Role)}")
    models = entry.get("models", list(ANY_MODEL))
    if not is_string_list(models):
        raise BadKeysFile(f"the models {suffix} must be a list of names or patterns, in quotes")
    limits = parse_caller_limits(suffix, entry)
    not_before, expires = (parse_time_field(name, suffix, entry) for name in TIME_FIELDS)
    if not_before is not None and expires is not None and expires <= not_before:
        raise BadKeysFile(f"expires {suffix} must be later than not_before")
    priority = entry.get("priority")
    if priority is not None and priority not in list(Priority.__members__):
        names = ", ".join(Priority.__members__)
        raise BadKeysFile(f"the priority {suffix} must be one of {names}")
    secrets = entry.get("callback_secrets", [])
    try:
        for secret in secrets:
            decode_secret(secret)
    except (TypeError, ValueError, AttributeError):
        raise BadKeysFile(
            f"the callback_secrets {suffix} must be a list of {SECRET_PREFIX}…, each with 24 to 64 random "
            "bytes in base64"
        ) from None
    return Caller(
        name,
        tuple(map(Role, roles)),
        tuple(models),
        limits=limits,
        priority=None if priority is None else Priority[priority],
        callback_secrets=tuple(secrets),
        not_before=not_before,
        expires=expires,
        digest=digest,
        rights=frozenset().union(*(ROLE_RIGHTS[Role(role)] for role in roles)),
        kind=kind,
    )


def parse_caller_limits(suffix: str, entry: Mapping[str, Any]) -> CallerLimits | None:
    rate = entry.get("requests_per_second")
    if rate is not None and not is_request_rate(rate):
        raise BadKeysFile(f"requests_per_second {suffix} must be a number above 0")
    for name in COUNT_FIELDS:
        count = entry.get(name)
        if count is not None and not (type(count) is int and 0 < count <= MAX_COUNT):
            raise BadKeysFile(f"{name} {suffix} must be a whole number above 0")
    counts = {name: entry.get(name) for name in COUNT_FIELDS}
    limits = CallerLimits(rate and float(rate), **counts)
    return None if limits == NO_LIMITS else limits


def parse_time_field(field: str, suffix: str, entry: Mapping[str, Any]) -> datetime | None:
    value = entry.get(field)
    if value is None:
        return None
    time = parse_time(value) if isinstance(value, str) else value  # YAML reads one without quotes
    if not isinstance(time, datetime) or time.tzinfo is None:
        raise BadKeysFile(
            f"{field} {suffix} must be a time with a zone (RFC 3339), such as 2027-01-31T00:00:00Z"
        )
    return time.astimezone(timezone.utc)


def is_string_list(value: Any) -> TypeGuard[list[str]]:
    has_texts = isinstance(value, list) and all(isinstance(text, str) and text for text in value)
    return has_texts and bool(value)


def is_request_rate(value: Any) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and 0 < value <= MAX_REQUEST_RATE


class KeysFile(WatchedFile[KeysContent]):
    def __init__(self, path: Path, rule_parsers: RuleParsers = NO_RULES) -> None:
        self._rule_parsers = rule_parsers
        self.value = KeysContent({}, {})
        super().__init__(path, self._read, label="keys")

    def _read(self, path: Path) -> KeysContent:
        """Return the callers and rules; callers that did not change are the same objects."""
        content = read_keys_content(path, self._rule_parsers)
        previous = self.value.callers
        kept = {
            digest: previous[digest] if previous.get(digest) == caller else caller
            for digest, caller in content.callers.items()
        }
        return KeysContent(kept, content.rules)

    def describe_entries(self, value: KeysContent) -> Entries:
        entries: dict[str, Mapping[str, Any]] = {}
        for caller in sorted(value.callers.values(), key=find_end, reverse=True):
            # A name has several keys while it is rotated: the last one to expire has the name alone.
            is_first = caller.name not in entries
            name = caller.name if is_first else f"{caller.name} ({caller.digest[:4].hex()}…)"
            entries[name] = describe_caller(caller)
        for name, rules in value.rules.items():
            for number, rule in enumerate(rules, 1):
                entries[f"{name} {number}: {rule.caller.name}"] = describe_rule(rule)
        return entries

    def find_caller(self, digest: bytes) -> Caller | None:
        """Return the caller with the key of this SHA-256.

        Only hashes are compared, so that the time it takes reveals nothing about other keys.
        """
        caller = self.value.callers.get(digest)
        return caller if caller is not None and compare_digest(caller.digest, digest) else None


def find_end(caller: Caller) -> datetime:
    return caller.expires or NEVER


def describe_caller(caller: Caller) -> dict[str, Any]:
    """Return the entry of a key, as events show it: of its hash, only the beginning."""
    times = {name: getattr(caller, name) for name in TIME_FIELDS}
    return {
        "id": caller.id,
        "roles": [role.value for role in caller.roles],
        "models": list(caller.models),
        **vars(caller.limits or NO_LIMITS),
        "priority": None if caller.priority is None else caller.priority.name,
        "callback_secrets": len(caller.callback_secrets),
        **{name: time and format_utc_time(time) for name, time in times.items()},
        "sha256": f"{caller.digest[:4].hex()}…",
    }


def describe_rule(rule: CallerRule) -> dict[str, Any]:
    own = {each.name: getattr(rule, each.name) for each in fields(rule) if each.name != "caller"}
    rights = describe_caller(rule.caller)
    del rights["id"], rights["sha256"]
    return own | rights


def read_keys_file(path: Path) -> dict[bytes, Caller]:
    """Return the callers by the hash of their key; other lists are ignored.

    Raises `BadKeysFile`, which names the file.
    """
    text = read_keys_text(path)
    with name_keys_file(path):
        return parse_keys_document(parse_document(text))


def read_keys_content(path: Path, parsers: RuleParsers) -> KeysContent:
    """Return the callers and the rules. Raises `BadKeysFile`, which names the file."""
    text = read_keys_text(path)
    with name_keys_file(path):
        return parse_keys_content(text, parsers)


@contextmanager
def name_keys_file(path: Path) -> Iterator[None]:
    try:
        yield
    except BadKeysFile as exc:
        raise BadKeysFile(f"the keys file {path}: {exc}") from None


def read_keys_text(path: Path) -> str:
    try:
        return read_config_file(path)
    except OSError as exc:
        raise BadKeysFile(f"the keys file {path}: {exc.strerror}") from None
    except UnicodeDecodeError:
        raise BadKeysFile(f"the keys file {path}: the file is not valid UTF-8") from None
