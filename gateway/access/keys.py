"""The keys file: callers, their roles and the models that they may use. It holds hashes, never keys.

Error messages about a keys file do not quote its contents.
"""

from __future__ import annotations

import fcntl
import hashlib
import math
import os
import re
import secrets
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from hmac import compare_digest
from pathlib import Path
from textwrap import indent
from typing import Any, Final, TypeGuard

import yaml

from gateway.callers import ANY_MODEL, ROLE_RIGHTS, Caller, Role
from gateway.config_files import YAML_ERRORS, Entries, WatchedFile, parse_yaml, read_config_file
from gateway.messages import CommandError

KEY_PREFIX: Final = "tgw_"  # lets secret scanners find leaked keys
KEY_BYTES: Final = 32
# The name is logged, so it must not be the key itself.
KEY_NAME: Final = re.compile(rf"(?!{KEY_PREFIX})[\w.@:/+-]{{1,64}}", re.ASCII)
SHA256_HEX: Final = re.compile(r"[0-9a-fA-F]{64}")
KEY_FIELDS: Final = {"name", "sha256", "roles", "models", "requests_per_second"}
MAX_REQUEST_RATE: Final = 1e9


class BadKeysFile(CommandError):
    """A keys file is invalid or cannot be read or written."""


def parse_keys(text: str) -> dict[bytes, Caller]:
    entries = parse_key_entries(text)
    callers = [parse_key_entry(f"key {number}", entry) for number, entry in enumerate(entries, 1)]
    callers_by_digest = {caller.digest: caller for caller in callers}
    if len({caller.name for caller in callers}) < len(callers):
        raise BadKeysFile("two keys have the same name")
    if len(callers_by_digest) < len(callers):
        raise BadKeysFile("two keys have the same sha256")
    return callers_by_digest


def parse_key_entries(text: str) -> list[Any]:
    try:
        document = parse_yaml(text)
    except yaml.MarkedYAMLError as exc:
        mark = exc.problem_mark
        position = f" at line {mark.line + 1}" if mark is not None else ""
        raise BadKeysFile(f"invalid YAML{position}") from None
    except YAML_ERRORS:
        raise BadKeysFile("invalid YAML (aliases and duplicate fields are not supported)") from None
    if not isinstance(document, dict) or set(document) != {"keys"}:
        raise BadKeysFile("the file must contain exactly one field, 'keys', with a list")
    if not isinstance(document["keys"], list):
        raise BadKeysFile("'keys' must be a list")
    return document["keys"]


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
    suffix = f"of {label} ({name})"
    if not isinstance(digest, str) or not SHA256_HEX.fullmatch(digest):
        raise BadKeysFile(f"the sha256 {suffix} must be 64 hexadecimal digits, in quotes")
    roles = entry.get("roles")
    if not is_string_list(roles) or not set(roles) <= set(Role):
        raise BadKeysFile(f"the roles {suffix} must be a list of {', '.join(Role)}")
    models = entry.get("models", list(ANY_MODEL))
    if not is_string_list(models):
        raise BadKeysFile(f"the models {suffix} must be a list of names or patterns, in quotes")
    rate = entry.get("requests_per_second")
    if rate is not None and not is_request_rate(rate):
        raise BadKeysFile(f"requests_per_second {suffix} must be a number above 0")
    return Caller(
        name,
        tuple(map(Role, roles)),
        tuple(models),
        requests_per_second=rate and float(rate),
        digest=bytes.fromhex(digest),
        rights=frozenset().union(*(ROLE_RIGHTS[Role(role)] for role in roles)),
    )


def is_string_list(value: Any) -> TypeGuard[list[str]]:
    has_texts = isinstance(value, list) and all(isinstance(text, str) and text for text in value)
    return has_texts and bool(value)


def is_request_rate(value: Any) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and 0 < value <= MAX_REQUEST_RATE


class KeysFile(WatchedFile[Mapping[bytes, Caller]]):
    def __init__(self, path: Path) -> None:
        self.value: Mapping[bytes, Caller] = {}
        super().__init__(path, self._read, label="keys")

    def _read(self, path: Path) -> Mapping[bytes, Caller]:
        """Return the callers; those that did not change are the same objects."""
        callers = read_keys_file(path)
        for digest in callers.keys() & self.value.keys():
            if callers[digest] == self.value[digest]:
                callers[digest] = self.value[digest]
        return callers

    def describe_entries(self, value: Mapping[bytes, Caller]) -> Entries:
        return {caller.name: describe_caller(caller) for caller in value.values()}

    def find_caller(self, digest: bytes) -> Caller | None:
        """Return the caller with the key of this SHA-256.

        Only hashes are compared, so that the time it takes reveals nothing about other keys.
        """
        caller = self.value.get(digest)
        return caller if caller is not None and compare_digest(caller.digest, digest) else None


def describe_caller(caller: Caller) -> dict[str, Any]:
    """Return the entry of a key, as events show it: of its hash, only the beginning."""
    return {
        "roles": [role.value for role in caller.roles],
        "models": list(caller.models),
        "requests_per_second": caller.requests_per_second,
        "sha256": f"{caller.digest[:4].hex()}…",
    }


def read_keys_file(path: Path) -> dict[bytes, Caller]:
    """Return the callers by the hash of their key. Raises `BadKeysFile`, which names the file."""
    text = read_keys_text(path)
    try:
        return parse_keys(text)
    except BadKeysFile as exc:
        raise BadKeysFile(f"the keys file {path}: {exc}") from None


def read_keys_text(path: Path) -> str:
    try:
        return read_config_file(path)
    except OSError as exc:
        raise BadKeysFile(f"the keys file {path}: {exc.strerror}") from None
    except UnicodeDecodeError:
        raise BadKeysFile(f"the keys file {path}: the file is not valid UTF-8") from None


def add_key(
    path: Path, name: str, roles: Sequence[Role], models: Sequence[str], rate: float | None
) -> str:
    """Add a key and return it; only its hash is stored. Raises `BadKeysFile`."""
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
            raise BadKeysFile(f"key '{name}' already exists; revoke it or choose another name")
        write_keys_file(path, append_key_entry(text, [*entries, entry]))
    return key


def remove_key(path: Path, name: str) -> None:
    with lock_keys_file(path) as (text, entries):
        remaining = [entry for entry in entries if entry["name"] != name]
        if len(remaining) == len(entries):
            raise BadKeysFile(f"key '{name}' not found in {path}")
        index = next(index for index, entry in enumerate(entries) if entry["name"] == name)
        write_keys_file(path, remove_key_entry(text, index, remaining))


@contextmanager
def lock_keys_file(path: Path) -> Iterator[tuple[str, list[Any]]]:
    """Lock the file for other commands; yield its text and entries, both empty if it does not exist."""
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
    """Return the list of keys if it is a non-empty block sequence."""
    document = yaml.compose(text, yaml.SafeLoader) if text else None
    if isinstance(document, yaml.MappingNode):
        keys = document.value[0][1]
        if isinstance(keys, yaml.SequenceNode) and keys.value and not keys.flow_style:
            return keys
    return None


def append_key_entry(text: str, entries: Sequence[Any]) -> str:
    """Return the text with the last of these entries added; comments are kept where possible."""
    key_list = find_key_list(text)
    if key_list is not None:
        addition = yaml.safe_dump([entries[-1]], sort_keys=False, width=math.inf)
        extended = f"{text.rstrip()}\n{indent(addition, ' ' * key_list.start_mark.column)}"
        if holds_key_entries(extended, entries):
            return extended
    return dump_key_entries(entries)


def remove_key_entry(text: str, index: int, remaining: Sequence[Any]) -> str:
    key_list = find_key_list(text)
    if key_list is not None and remaining:
        lines = text.splitlines(keepends=True)
        nodes = key_list.value
        end = nodes[index + 1].start_mark if nodes[index + 1 :] else nodes[index].end_mark
        shortened = "".join(lines[: nodes[index].start_mark.line] + lines[end.line :])
        if holds_key_entries(shortened, remaining):
            return shortened
    return dump_key_entries(remaining)


def holds_key_entries(text: str, entries: Sequence[Any]) -> bool:
    try:
        return parse_key_entries(text) == list(entries)
    except BadKeysFile:
        return False


def write_keys_file(path: Path, text: str) -> None:
    """Replace the file atomically, readable by its owner only; a symbolic link stays one."""
    target = path.resolve()
    try:
        handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                if target.exists() and os.geteuid() == 0:
                    status = target.stat()
                    os.fchown(file.fileno(), status.st_uid, status.st_gid)
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
