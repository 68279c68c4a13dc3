"""Changes of the keys file by the command `triton-gateway key`. Comments and order stay; the comment
after an entry goes with it.

All functions raise `BadKeysFile`. A gateway never changes the file.
"""

from __future__ import annotations

import fcntl
import hashlib
import math
import os
import secrets
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from io import StringIO
from pathlib import Path
from typing import Any, Final

import yaml
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from ruamel.yaml.scalarstring import DoubleQuotedScalarString
from ruamel.yaml.util import load_yaml_guess_indent

from gateway.access.keys import (
    KEY_PREFIX,
    KEYS,
    TIME_FIELDS,
    BadKeysFile,
    find_end,
    parse_document,
    parse_key_entry,
    read_keys_file,
    read_keys_text,
)
from gateway.callers import Role
from gateway.messages import format_utc_time

KEY_BYTES: Final = 32
KEY_ID_BYTES: Final = 8


def add_key(
    path: Path, name: str, roles: Sequence[Role], models: Sequence[str], **optional: Any
) -> str:
    """Add a key and return it; only its hash is stored."""
    key = generate_key()
    entry: dict[str, Any] = {
        "name": name,
        "id": secrets.token_hex(KEY_ID_BYTES),
        "sha256": hash_secret(key),
        "roles": [role.value for role in roles],
        "models": list(models),
        **{field: value for field, value in optional.items() if value is not None},
    }
    parse_key_entry("the new key", entry)
    with edit_keys_file(path) as document:
        if any(other["name"] == name for other in document.entries):
            raise BadKeysFile(
                f"key '{name}' already exists; rotate it, revoke it or choose another name"
            )
        document.append(entry)
    return key


def rotate_key(path: Path, name: str, old_expires: datetime, expires: datetime | None) -> str:
    """Add a key with the rights of another one of this name, which expires then; return the new one."""
    key = generate_key()
    with edit_keys_file(path) as document:
        indexes = document.find_keys(name)
        index = max(indexes, key=lambda each: find_end(document.parse(each)))
        old = document.entries[index]
        if expires is None and old.get("expires") is not None:
            raise BadKeysFile(f"key '{name}' expires; say when the new one does, with --expires")
        entry = {field: old[field] for field in old if field not in TIME_FIELDS}
        entry["sha256"] = hash_secret(key)
        if expires is not None:
            entry["expires"] = format_utc_time(expires)
        document.expire(index, old_expires)
        document.append(entry)
    return key


def expire_key(path: Path, name: str, expires: datetime) -> None:
    """Let all keys of a name expire at this time, or earlier if they do."""
    with edit_keys_file(path) as document:
        for index in document.find_keys(name):
            document.expire(index, expires)


def remove_key(path: Path, name: str) -> None:
    """Remove all keys of a name."""
    with edit_keys_file(path) as document:
        for index in reversed(document.find_keys(name)):
            document.remove(index)


def generate_key() -> str:
    return KEY_PREFIX + secrets.token_urlsafe(KEY_BYTES)


def hash_secret(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


class KeysDocument:
    """The keys file while it is edited: its entries, and the changes of its text."""

    def __init__(self, path: Path, text: str) -> None:
        self._path = path
        self._text = text
        self._content: dict[str, Any] = parse_document(text) if text.strip() else {}
        self.entries: list[dict[str, Any]] = self._content.setdefault(KEYS, [])
        self._edits: list[Callable[[Any], object]] = []  # of the list, with its comments

    def find_keys(self, name: str) -> list[int]:
        """Return the indexes of the keys of this name, which has one at least."""
        indexes = [index for index, entry in enumerate(self.entries) if entry["name"] == name]
        if not indexes:
            raise BadKeysFile(f"key '{name}' not found in {self._path}")
        return indexes

    def parse(self, index: int) -> Any:
        return parse_key_entry("the key", self.entries[index])

    def append(self, entry: dict[str, Any]) -> None:
        self.entries.append(entry)
        self._edits.append(lambda keys: keys.append(quote(entry)))

    def remove(self, index: int) -> None:
        del self.entries[index]
        self._edits.append(lambda keys: keys.pop(index))

    def expire(self, index: int, expires: datetime) -> None:
        """Let a key expire then, unless it does earlier."""
        if find_end(self.parse(index)) <= expires:
            return
        time = self.entries[index]["expires"] = format_utc_time(expires)
        self.parse(index)

        def edit(keys: Any) -> None:
            if "expires" in keys[index]:
                keys[index]["expires"] = quote(time)
            else:
                keys[index].insert(list(keys[index]).index("sha256"), "expires", quote(time))

        self._edits.append(edit)

    def write(self) -> str:
        """Return the text with the changes. If they cannot keep its form, it is written anew."""
        with suppress(YAMLError, ValueError, LookupError, TypeError, AttributeError, BadKeysFile):
            text = self._edit_text()
            if parse_document(text) == self._content:
                return text
        return yaml.safe_dump(self._content, sort_keys=False, width=math.inf)

    def _edit_text(self) -> str:
        editor = YAML()
        editor.preserve_quotes = True
        editor.width = len(self._text) + 1000
        document, indent, dash_indent = load_yaml_guess_indent(self._text, yaml=editor)
        editor.indent(sequence=indent, offset=dash_indent)
        for edit in self._edits:
            edit(document.setdefault(KEYS, []))
        stream = StringIO()
        editor.dump(document, stream)
        return stream.getvalue()


def quote(value: Any) -> Any:
    """Return a value whose strings are written in quotes: YAML 1.1 and 1.2 differ in what needs them."""
    if isinstance(value, dict):
        return {name: quote(each) for name, each in value.items()}
    if isinstance(value, list):
        return [quote(each) for each in value]
    return DoubleQuotedScalarString(value) if isinstance(value, str) else value


@contextmanager
def edit_keys_file(path: Path) -> Iterator[KeysDocument]:
    """Lock the file for other commands; write what was changed, if nothing fails."""
    try:
        folder = os.open(path.resolve().parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as exc:
        raise BadKeysFile(f"the folder of {path}: {exc.strerror}") from None
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        text = read_keys_text(path) if path.exists() else ""
        if text.strip():
            read_keys_file(path)
        document = KeysDocument(path, text)
        yield document
        replace_file(path, document.write())
    finally:
        os.close(folder)


def replace_file(path: Path, text: str) -> None:
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
