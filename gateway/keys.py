"""The keys file: who there is, what each may do, and which models each sees. It holds hashes, never keys.

What is wrong with a file is told without a word of what stands in it.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import math
import os
import re
import secrets
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum
from fnmatch import fnmatchcase
from functools import cached_property
from hmac import compare_digest
from pathlib import Path
from textwrap import indent
from typing import Any, Final, TypeGuard
from urllib.parse import quote

import yaml

from gateway.config_files import YAML_ERRORS, StrictYamlLoader, config_file_stamp
from gateway.messages import CommandError

log = logging.getLogger(__name__)

KEY_PREFIX: Final = "tgw_"  # by which a key that lies around is found
KEY_BYTES: Final = 32
# It is shown in the log, and must not be the key itself.
KEY_NAME: Final = re.compile(rf"(?!{KEY_PREFIX})[\w.@:/+-]{{1,64}}", re.ASCII)
SHA256_HEX: Final = re.compile(r"[0-9a-fA-F]{64}")
KEY_FIELDS: Final = {"name", "sha256", "roles", "models", "requests_per_second"}
ANY_MODEL: Final = ("*",)
# What a path's segment may hold as it is (RFC 3986, section 3.3).
PATH_SAFE_CHARACTERS: Final = "!$&'()*+,;=:@"
MAX_REQUEST_RATE: Final = 1e9
MAX_CACHED_MODELS: Final = 1024
MAX_CACHED_NAME_LENGTH: Final = 256


class BadKeysFile(CommandError):
    """A keys file that cannot be used, in a sentence."""


class Right(Enum):
    infer = "infer"  # inference, and what models look like
    metrics = "metrics"
    fleet = "fleet"  # how the replicas are, and where
    manage = "manage"

    __hash__ = object.__hash__  # Enum's own is a function of Python's, on the way of every request


class Role(str, Enum):
    infer = "infer"
    metrics = "metrics"
    admin = "admin"


ROLE_RIGHTS: Final = {
    Role.infer: frozenset((Right.infer,)),
    Role.metrics: frozenset((Right.metrics,)),
    Role.admin: frozenset(Right),
}


@dataclass(frozen=True, eq=False)
class Caller:
    """Who asks. `name` is that of the key; `requests_per_second` is for the limits."""

    name: str
    roles: tuple[Role, ...] = ()
    models: tuple[str, ...] = ANY_MODEL
    requests_per_second: float | None = None
    digest: bytes = field(default=b"", repr=False)
    rights: frozenset[Right] = frozenset()
    _visibility_cache: dict[str, bool] = field(default_factory=dict, repr=False)

    @cached_property
    def can_see_all(self) -> bool:
        return "*" in self.models

    def can_see(self, model: str) -> bool:
        """Whether the model exists for this caller."""
        if self.can_see_all:
            return True
        found = self._visibility_cache.get(model)
        if found is None:
            found = is_path_safe(model) and any(fnmatchcase(model, glob) for glob in self.models)
            if len(model) <= MAX_CACHED_NAME_LENGTH:
                if len(self._visibility_cache) >= MAX_CACHED_MODELS:
                    self._visibility_cache.clear()
                self._visibility_cache[model] = found
        return found


def is_path_safe(model: str) -> bool:
    """Whether the name stands in a path as it is. Triton decodes nothing, but what stands before it might:
    `res%2F..%2Fsecret` would match `res*` here and be `secret` there."""
    return model not in (".", "..") and quote(model, safe=PATH_SAFE_CHARACTERS) == model


# Reading.


def parse_keys(text: str) -> dict[bytes, Caller]:
    """The keys of a keys file, by hash. Raises `BadKeysFile`."""
    entries = parse_key_entries(text)
    found = [parse_key_entry(f"key {number}", entry) for number, entry in enumerate(entries, 1)]
    for what, values in (
        ("name", {caller.name for caller in found}),
        ("sha256", {caller.digest for caller in found}),
    ):
        if len(values) < len(found):
            raise BadKeysFile(f"two keys have the same {what}")
    return {caller.digest: caller for caller in found}


def parse_key_entries(text: str) -> list[Any]:
    try:
        document = yaml.load(text, StrictYamlLoader)  # noqa: S506 - a safe one
    except yaml.MarkedYAMLError as exc:
        mark = exc.problem_mark
        where = f" from line {mark.line + 1} on" if mark is not None else ""
        raise BadKeysFile(f"it is not YAML{where}") from None
    except YAML_ERRORS:
        raise BadKeysFile(
            "it is not plain YAML (aliases and doubled fields are not taken)"
        ) from None
    if not isinstance(document, dict) or set(document) != {"keys"}:
        raise BadKeysFile("it must hold one field, 'keys', with a list")
    if not isinstance(document["keys"], list):
        raise BadKeysFile("'keys' must be a list")
    return document["keys"]


def parse_key_entry(label: str, entry: Any) -> Caller:
    if not isinstance(entry, dict) or not set(entry) <= KEY_FIELDS:
        raise BadKeysFile(f"{label} must be an object of {', '.join(sorted(KEY_FIELDS))}")
    name, digest = entry.get("name"), entry.get("sha256")
    if not isinstance(name, str) or not KEY_NAME.fullmatch(name):
        raise BadKeysFile(
            f"the name of {label} must be 1 to 64 letters, digits and . @ : / + - _ (and not a key)"
        )
    what = f"of {label} ({name})"
    if not isinstance(digest, str) or not SHA256_HEX.fullmatch(digest):
        raise BadKeysFile(f"the sha256 {what} must be 64 hexadecimal digits, in quotes")
    roles = entry.get("roles")
    if not is_string_list(roles) or not set(roles) <= set(Role):
        raise BadKeysFile(f"the roles {what} must be a list of {', '.join(Role)}")
    models = entry.get("models", list(ANY_MODEL))
    if not is_string_list(models):
        raise BadKeysFile(f"the models {what} must be a list of names or patterns, in quotes")
    rate = entry.get("requests_per_second")
    if rate is not None and not is_request_rate(rate):
        raise BadKeysFile(f"requests_per_second {what} must be a number above 0")
    return Caller(
        name,
        tuple(map(Role, roles)),
        tuple(models),
        rate and float(rate),
        bytes.fromhex(digest),
        frozenset().union(*(ROLE_RIGHTS[Role(role)] for role in roles)),
    )


def is_string_list(value: Any) -> TypeGuard[list[str]]:
    return bool(
        isinstance(value, list) and value and all(isinstance(text, str) and text for text in value)
    )


def is_request_rate(value: Any) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and 0 < value <= MAX_REQUEST_RATE


@dataclass
class KeysFile:
    """The file, read again when it changes. A broken one leaves the last good one in force."""

    path: Path
    is_valid: bool = True  # whether the keys in force are those of the file
    _callers: Mapping[bytes, Caller] = field(default_factory=dict, repr=False)
    _stamp: tuple[int, ...] = ()

    def load(self) -> None:
        """The first read. Raises `BadKeysFile`."""
        self._stamp = config_file_stamp(self.path)
        self._callers = read_keys_file(self.path)

    def reload_if_changed(self) -> None:
        """Read it again if it changed."""
        seen = config_file_stamp(self.path)
        if seen == self._stamp:
            return  # a broken one is complained of once
        self._stamp = seen
        try:
            self._callers = read_keys_file(self.path)
        except BadKeysFile as exc:
            self.is_valid = False
            log.error("the keys stay as they were: %s", exc)
        else:
            self.is_valid = True
            log.warning("the keys file changed: %d keys are in force", len(self._callers))

    def find_caller(self, key: bytes) -> Caller | None:
        """Whose key it is. How long it takes tells nothing of any other key: only hashes are compared."""
        digest = hashlib.sha256(key).digest()
        found = self._callers.get(digest)
        return found if found is not None and compare_digest(found.digest, digest) else None


def read_keys_file(path: Path) -> dict[bytes, Caller]:
    """The keys of a file, by hash. Raises `BadKeysFile`."""
    text = read_keys_text(path)
    try:
        return parse_keys(text)
    except BadKeysFile as exc:
        raise BadKeysFile(f"the keys file {path}: {exc}") from None


def read_keys_text(path: Path) -> str:
    """Raises `BadKeysFile`."""
    try:
        return path.read_text("utf-8")
    except OSError as exc:
        raise BadKeysFile(f"the keys file {path}: {exc.strerror}") from None
    except UnicodeDecodeError:
        raise BadKeysFile(f"the keys file {path}: it is not UTF-8") from None


# Changing, for the command line.


def add_key(
    path: Path, name: str, roles: Sequence[Role], models: Sequence[str], rate: float | None
) -> str:
    """Add a key, and return it: it is written nowhere. Raises `BadKeysFile`."""
    key = KEY_PREFIX + secrets.token_urlsafe(KEY_BYTES)
    entry: dict[str, Any] = {
        "name": name,
        "sha256": hashlib.sha256(key.encode()).hexdigest(),
        "roles": [role.value for role in roles],
        "models": list(models),
    }
    if rate is not None:
        entry["requests_per_second"] = rate
    parse_key_entry("the new key", entry)
    with lock_keys_file(path) as (text, entries):
        if any(other["name"] == name for other in entries):
            raise BadKeysFile(f"there is a key '{name}' already; revoke it, or take another name")
        write_keys_file(path, append_key_entry(text, [*entries, entry]))
    return key


def remove_key(path: Path, name: str) -> None:
    """Take a key out. Raises `BadKeysFile`."""
    with lock_keys_file(path) as (text, entries):
        kept = [entry for entry in entries if entry["name"] != name]
        if len(kept) == len(entries):
            raise BadKeysFile(f"there is no key '{name}' in {path}")
        number = next(at for at, entry in enumerate(entries) if entry["name"] == name)
        write_keys_file(path, remove_key_entry(text, number, kept))


@contextmanager
def lock_keys_file(path: Path) -> Iterator[tuple[str, list[Any]]]:
    """The file's text and entries, and nobody else's turn meanwhile; an absent one has none."""
    try:
        folder = os.open(path.resolve().parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as exc:
        raise BadKeysFile(f"the folder of {path}: {exc.strerror}") from None
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        if path.exists() and (text := read_keys_text(path)).strip():
            read_keys_file(path)
            yield text, parse_key_entries(text)
        else:
            yield "", []
    finally:
        os.close(folder)


def dump_key_entries(entries: Sequence[Any]) -> str:
    return yaml.safe_dump({"keys": list(entries)}, sort_keys=False, width=math.inf)


def find_key_list(text: str) -> yaml.SequenceNode | None:
    """The list of keys where it stands in the text, one below the other."""
    document = yaml.compose(text, StrictYamlLoader) if text else None
    if isinstance(document, yaml.MappingNode):
        found = document.value[0][1]
        if isinstance(found, yaml.SequenceNode) and found.value and not found.flow_style:
            return found
    return None


def append_key_entry(text: str, entries: Sequence[Any]) -> str:
    """The text with the last of these entries added; comments stay where they can."""
    there = find_key_list(text)
    if there is not None:
        fresh = yaml.safe_dump([entries[-1]], sort_keys=False, width=math.inf)
        margin = " " * there.start_mark.column
        if (longer := f"{text.rstrip()}\n{indent(fresh, margin)}") and holds_key_entries(
            longer, entries
        ):
            return longer
    return dump_key_entries(entries)


def remove_key_entry(text: str, index: int, remaining: Sequence[Any]) -> str:
    """The text without the entry of this number."""
    there = find_key_list(text)
    if there is not None and remaining:
        lines = text.splitlines(keepends=True)
        first = there.value[index].start_mark.line
        last = (
            there.value[index + 1].start_mark.line
            if index + 1 < len(there.value)
            else there.value[index].end_mark.line
        )
        shorter = "".join(lines[:first] + lines[last:])
        if holds_key_entries(shorter, remaining):
            return shorter
    return dump_key_entries(remaining)


def holds_key_entries(text: str, entries: Sequence[Any]) -> bool:
    try:
        return parse_key_entries(text) == list(entries)
    except BadKeysFile:
        return False


def write_keys_file(path: Path, text: str) -> None:
    """All of it or nothing, and for the owner's eyes only; a link stays one. Raises `BadKeysFile`."""
    target = path.resolve()
    try:
        handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                if target.exists() and os.geteuid() == 0:
                    found = target.stat()
                    os.fchown(file.fileno(), found.st_uid, found.st_gid)
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            Path(name).replace(target)
        except BaseException:
            with suppress(OSError):
                Path(name).unlink()
            raise
    except OSError as exc:
        raise BadKeysFile(f"the keys file {path} cannot be written: {exc.strerror}") from None
