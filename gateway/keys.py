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

from gateway.documents import UNREADABLE, Loader, stamp
from gateway.words import Failure

log = logging.getLogger(__name__)

PREFIX: Final = "tgw_"  # by which a key that lies around is found
KEY_BYTES: Final = 32
# It is shown in the log, and must not be the key itself.
NAME: Final = re.compile(rf"(?!{PREFIX})[\w.@:/+-]{{1,64}}", re.ASCII)
HASH: Final = re.compile(r"[0-9a-fA-F]{64}")
FIELDS: Final = {"name", "sha256", "roles", "models", "requests_per_second"}
ALL: Final = ("*",)
# What a path's segment may hold as it is (RFC 3986, section 3.3).
UNQUOTED: Final = "!$&'()*+,;=:@"
HIGHEST_RATE: Final = 1e9
MOST_SEEN: Final = 1024
LONGEST_SEEN: Final = 256


class BadKeysFile(Failure):
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


RIGHTS: Final = {
    Role.infer: frozenset((Right.infer,)),
    Role.metrics: frozenset((Right.metrics,)),
    Role.admin: frozenset(Right),
}


@dataclass(frozen=True, eq=False)
class Caller:
    """Who asks. `name` is that of the key; `requests_per_second` is for the limits."""

    name: str
    roles: tuple[Role, ...] = ()
    models: tuple[str, ...] = ALL
    requests_per_second: float | None = None
    digest: bytes = field(default=b"", repr=False)
    rights: frozenset[Right] = frozenset()
    _seen: dict[str, bool] = field(default_factory=dict, repr=False)

    @cached_property
    def sees_all(self) -> bool:
        return "*" in self.models

    def sees(self, model: str) -> bool:
        """Whether the model exists for this caller."""
        if self.sees_all:
            return True
        found = self._seen.get(model)
        if found is None:
            found = is_plain(model) and any(fnmatchcase(model, glob) for glob in self.models)
            if len(model) <= LONGEST_SEEN:
                if len(self._seen) >= MOST_SEEN:
                    self._seen.clear()
                self._seen[model] = found
        return found


def is_plain(model: str) -> bool:
    """Whether the name stands in a path as it is. Triton decodes nothing, but what stands before it might:
    `res%2F..%2Fsecret` would match `res*` here and be `secret` there."""
    return model not in (".", "..") and quote(model, safe=UNQUOTED) == model


# Reading.


def keys_in(text: str) -> dict[bytes, Caller]:
    """The keys of a keys file, by hash. Raises `BadKeysFile`."""
    entries = entries_in(text)
    found = [one(f"key {number}", entry) for number, entry in enumerate(entries, 1)]
    for what, values in (
        ("name", {caller.name for caller in found}),
        ("sha256", {caller.digest for caller in found}),
    ):
        if len(values) < len(found):
            raise BadKeysFile(f"two keys have the same {what}")
    return {caller.digest: caller for caller in found}


def entries_in(text: str) -> list[Any]:
    try:
        document = yaml.load(text, Loader)  # noqa: S506 - a safe one
    except yaml.MarkedYAMLError as exc:
        mark = exc.problem_mark
        where = f" from line {mark.line + 1} on" if mark is not None else ""
        raise BadKeysFile(f"it is not YAML{where}") from None
    except UNREADABLE:
        raise BadKeysFile(
            "it is not plain YAML (aliases and doubled fields are not taken)"
        ) from None
    if not isinstance(document, dict) or set(document) != {"keys"}:
        raise BadKeysFile("it must hold one field, 'keys', with a list")
    if not isinstance(document["keys"], list):
        raise BadKeysFile("'keys' must be a list")
    return document["keys"]


def one(which: str, entry: Any) -> Caller:
    if not isinstance(entry, dict) or not set(entry) <= FIELDS:
        raise BadKeysFile(f"{which} must be an object of {', '.join(sorted(FIELDS))}")
    name, digest = entry.get("name"), entry.get("sha256")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise BadKeysFile(
            f"the name of {which} must be 1 to 64 letters, digits and . @ : / + - _ (and not a key)"
        )
    what = f"of {which} ({name})"
    if not isinstance(digest, str) or not HASH.fullmatch(digest):
        raise BadKeysFile(f"the sha256 {what} must be 64 hexadecimal digits, in quotes")
    roles = entry.get("roles")
    if not is_texts(roles) or not set(roles) <= set(Role):
        raise BadKeysFile(f"the roles {what} must be a list of {', '.join(Role)}")
    models = entry.get("models", list(ALL))
    if not is_texts(models):
        raise BadKeysFile(f"the models {what} must be a list of names or patterns, in quotes")
    rate = entry.get("requests_per_second")
    if rate is not None and not is_rate(rate):
        raise BadKeysFile(f"requests_per_second {what} must be a number above 0")
    return Caller(
        name,
        tuple(map(Role, roles)),
        tuple(models),
        rate and float(rate),
        bytes.fromhex(digest),
        frozenset().union(*(RIGHTS[Role(role)] for role in roles)),
    )


def is_texts(value: Any) -> TypeGuard[list[str]]:
    return bool(
        isinstance(value, list) and value and all(isinstance(text, str) and text for text in value)
    )


def is_rate(value: Any) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and 0 < value <= HIGHEST_RATE


@dataclass
class KeysFile:
    """The file, read again when it changes. A broken one leaves the last good one in force."""

    path: Path
    is_valid: bool = True  # whether the keys in force are those of the file
    _keys: Mapping[bytes, Caller] = field(default_factory=dict, repr=False)
    _seen: tuple[int, ...] = ()

    def open(self) -> None:
        """The first read. Raises `BadKeysFile`."""
        self._seen = stamp(self.path)
        self._keys = read(self.path)

    def look(self) -> None:
        """Read it again if it changed."""
        seen = stamp(self.path)
        if seen == self._seen:
            return  # a broken one is complained of once
        self._seen = seen
        try:
            self._keys = read(self.path)
        except BadKeysFile as exc:
            self.is_valid = False
            log.error("the keys stay as they were: %s", exc)
        else:
            self.is_valid = True
            log.warning("the keys file changed: %d keys are in force", len(self._keys))

    def owner(self, key: bytes) -> Caller | None:
        """Whose key it is. How long it takes tells nothing of any other key: only hashes are compared."""
        digest = hashlib.sha256(key).digest()
        found = self._keys.get(digest)
        return found if found is not None and compare_digest(found.digest, digest) else None


def read(path: Path) -> dict[bytes, Caller]:
    """The keys of a file, by hash. Raises `BadKeysFile`."""
    text = text_of(path)
    try:
        return keys_in(text)
    except BadKeysFile as exc:
        raise BadKeysFile(f"the keys file {path}: {exc}") from None


def text_of(path: Path) -> str:
    """Raises `BadKeysFile`."""
    try:
        return path.read_text("utf-8")
    except OSError as exc:
        raise BadKeysFile(f"the keys file {path}: {exc.strerror}") from None
    except UnicodeDecodeError:
        raise BadKeysFile(f"the keys file {path}: it is not UTF-8") from None


# Changing, for the command line.


def create(
    path: Path, name: str, roles: Sequence[Role], models: Sequence[str], rate: float | None
) -> str:
    """Add a key, and return it: it is written nowhere. Raises `BadKeysFile`."""
    key = PREFIX + secrets.token_urlsafe(KEY_BYTES)
    entry: dict[str, Any] = {
        "name": name,
        "sha256": hashlib.sha256(key.encode()).hexdigest(),
        "roles": [role.value for role in roles],
        "models": list(models),
    }
    if rate is not None:
        entry["requests_per_second"] = rate
    one("the new key", entry)
    with changing(path) as (text, entries):
        if any(other["name"] == name for other in entries):
            raise BadKeysFile(f"there is a key '{name}' already; revoke it, or take another name")
        write(path, appended(text, [*entries, entry]))
    return key


def revoke(path: Path, name: str) -> None:
    """Take a key out. Raises `BadKeysFile`."""
    with changing(path) as (text, entries):
        kept = [entry for entry in entries if entry["name"] != name]
        if len(kept) == len(entries):
            raise BadKeysFile(f"there is no key '{name}' in {path}")
        number = next(at for at, entry in enumerate(entries) if entry["name"] == name)
        write(path, removed(text, number, kept))


@contextmanager
def changing(path: Path) -> Iterator[tuple[str, list[Any]]]:
    """The file's text and entries, and nobody else's turn meanwhile; an absent one has none."""
    try:
        folder = os.open(path.resolve().parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as exc:
        raise BadKeysFile(f"the folder of {path}: {exc.strerror}") from None
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        if path.exists() and (text := text_of(path)).strip():
            read(path)
            yield text, entries_in(text)
        else:
            yield "", []
    finally:
        os.close(folder)


def dumped(entries: Sequence[Any]) -> str:
    return yaml.safe_dump({"keys": list(entries)}, sort_keys=False, width=math.inf)


def listed_in(text: str) -> yaml.SequenceNode | None:
    """The list of keys where it stands in the text, one below the other."""
    document = yaml.compose(text, Loader) if text else None
    if isinstance(document, yaml.MappingNode):
        found = document.value[0][1]
        if isinstance(found, yaml.SequenceNode) and found.value and not found.flow_style:
            return found
    return None


def appended(text: str, entries: Sequence[Any]) -> str:
    """The text with the last of these entries added; comments stay where they can."""
    there = listed_in(text)
    if there is not None:
        fresh = yaml.safe_dump([entries[-1]], sort_keys=False, width=math.inf)
        margin = " " * there.start_mark.column
        if (longer := f"{text.rstrip()}\n{indent(fresh, margin)}") and says(longer, entries):
            return longer
    return dumped(entries)


def removed(text: str, number: int, kept: Sequence[Any]) -> str:
    """The text without the entry of this number."""
    there = listed_in(text)
    if there is not None and kept:
        lines = text.splitlines(keepends=True)
        first = there.value[number].start_mark.line
        last = (
            there.value[number + 1].start_mark.line
            if number + 1 < len(there.value)
            else there.value[number].end_mark.line
        )
        shorter = "".join(lines[:first] + lines[last:])
        if says(shorter, kept):
            return shorter
    return dumped(kept)


def says(text: str, entries: Sequence[Any]) -> bool:
    try:
        return entries_in(text) == list(entries)
    except BadKeysFile:
        return False


def write(path: Path, text: str) -> None:
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
