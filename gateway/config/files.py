"""A strict YAML parser, and files that are reloaded when they change."""

from __future__ import annotations

import asyncio
import concurrent.futures
import errno
import logging
import os
import stat
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, Generic, TypeVar
from weakref import WeakValueDictionary

import yaml

from gateway.messages import CommandError, describe_difference

log = logging.getLogger(__name__)

T = TypeVar("T")
Entries = Mapping[str, Mapping[str, Any]]  # name → the entry as JSON
EntryChange = tuple[str, Any, Any]  # the name, and the fields that differ: before and afterwards

MAX_FILE_BYTES: Final = 10_000_000
READ_TIMEOUT_S: Final = 2.0
START_TIMEOUT_S: Final = 30.0
MAX_DEPTH: Final = 100
MAX_NUMBER_CHARS: Final = 100
STRING_TAG: Final = "tag:yaml.org,2002:str"
SCALAR_TAGS: Final = frozenset(
    f"tag:yaml.org,2002:{name}"
    for name in ("null", "bool", "int", "float", "binary", "timestamp", "str")
)
COLLECTION_TAGS: Final = (None, "!", "tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")
# PyYAML does not wrap the errors of its constructors, such as for `!!int x` or the date 2020-13-45.
YAML_ERRORS: Final = (
    yaml.YAMLError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError,
)  # fmt: skip


def parse_yaml(text: str) -> Any:
    """Return the value of a text with one document at most. Raises one of `YAML_ERRORS`.

    Rejects aliases, with which a short text expands without bound, and duplicate keys.
    """
    # libyaml yields one event after the other: as a whole, a large document would hold the GIL.
    loader = yaml.CSafeLoader(text)
    try:
        loader.get_event()  # the start of the stream
        if isinstance(loader.get_event(), yaml.StreamEndEvent):
            return None
        value = parse_yaml_value(loader)
        loader.get_event()  # the end of the document
        if not isinstance(loader.get_event(), yaml.StreamEndEvent):
            raise ValueError("the file must contain a single document")
        return value
    finally:
        loader.dispose()


def parse_yaml_value(loader: yaml.CSafeLoader) -> Any:
    open_collections: list[tuple[bool, list[Any]]] = []  # whether it is a mapping, and its items
    while True:
        event = loader.get_event()
        if isinstance(event, yaml.AliasEvent):
            raise ValueError("aliases (*NAME) are not supported")
        if isinstance(event, yaml.CollectionStartEvent):
            if event.tag not in COLLECTION_TAGS:
                raise ValueError(f"the tag {event.tag} is not supported")
            if len(open_collections) == MAX_DEPTH:
                raise ValueError(f"more than {MAX_DEPTH} levels are not supported")
            open_collections.append((isinstance(event, yaml.MappingStartEvent), []))
            continue
        if isinstance(event, yaml.ScalarEvent):
            value = construct_scalar(loader, event)
        else:
            is_mapping, value = open_collections.pop()
            if is_mapping:
                value = construct_mapping(value)
        if not open_collections:
            return value
        open_collections[-1][1].append(value)


def construct_scalar(loader: Any, event: yaml.ScalarEvent) -> Any:
    tag = event.tag
    if tag is None or tag == "!":
        tag = loader.resolve(yaml.ScalarNode, event.value, event.implicit)
    if tag == STRING_TAG:
        return event.value
    if tag not in SCALAR_TAGS:
        raise ValueError(f"the tag {tag} is not supported")
    if len(event.value) > MAX_NUMBER_CHARS:  # PyYAML reads 1:1:1… in quadratic time
        raise ValueError("a number is too long")
    return loader.yaml_constructors[tag](loader, yaml.ScalarNode(tag, event.value))


def construct_mapping(items: list[Any]) -> dict[Any, Any]:
    keys = items[::2]
    mapping = dict(zip(keys, items[1::2], strict=True))
    if len(mapping) < len(keys):
        ((duplicate, _),) = Counter(keys).most_common(1)
        raise ValueError(f"duplicate key {duplicate!r}")
    return mapping


def check_regular_file(status: os.stat_result) -> None:
    """Check that reading the file ends, and soon. Raises `OSError`."""
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file")
    if status.st_size > MAX_FILE_BYTES:
        raise OSError(errno.EFBIG, f"the file is larger than {MAX_FILE_BYTES // 1_000_000} MB")


def read_config_file(path: Path) -> str:
    # A pipe without a writer would block without O_NONBLOCK.
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        check_regular_file(os.fstat(file.fileno()))
        return file.read(MAX_FILE_BYTES).decode()


@dataclass(frozen=True)
class FileChange(Generic[T]):
    """The content of a file that changed: a value, or the reason why it has none."""

    value: T | None
    problem: str = ""
    difference: str = ""
    is_new: bool = False  # whether the value is another
    differences: Sequence[EntryChange] = ()
    file_sha256: str = ""


class WatchedFile(Generic[T]):
    """A file that is parsed again when it or one of its `companions` changes.

    `parse` raises a `CommandError` that names the file if it is invalid. The constructor passes that on;
    after a later change, `value` stays the last valid one and `is_valid` becomes false.

    The file is read and parsed in a thread, one at a time, because a file system may hang, and a large file
    takes long. Python does not wait for such a thread when it exits.
    """

    def __init__(
        self, path: Path, parse: Callable[[Path], T], *companions: Path, label: str = ""
    ) -> None:
        self.path = path
        # Records a change, which is in the log otherwise.
        self.on_change: Callable[[FileChange[T]], None] | None = None
        self._parse = parse
        self._companions = companions
        self._is_rejected = False
        self._is_overdue = False
        self._stamp: list[tuple[int, ...]] = []
        self._check: Future[FileChange[T] | None] | None = None
        reading = call_in_daemon_thread(self._read_first)
        try:
            self.value = reading.result(START_TIMEOUT_S)
        except concurrent.futures.TimeoutError:
            raise CommandError(f"{path} could not be read within {START_TIMEOUT_S:g} s") from None
        if label:
            watched_files[label] = self

    @property
    def is_valid(self) -> bool:
        return not (self._is_rejected or self._is_overdue)

    def reload_if_changed(self) -> bool:
        """Return whether there is a new value, after two seconds at most."""
        check = self._start_check()
        if not self._is_overdue:
            concurrent.futures.wait([check], READ_TIMEOUT_S)
        return self._finish_check()

    async def reload_in_background(self) -> bool:
        """Return what `reload_if_changed` returns, without blocking the event loop."""
        check = self._start_check()
        if not self._is_overdue:
            await asyncio.wait([asyncio.wrap_future(check)], timeout=READ_TIMEOUT_S)
        return self._finish_check()

    def describe_entries(self, value: T) -> Entries:
        """Return what the changes of the file are described by; a certificate has no entries."""
        return {}

    def _start_check(self) -> Future[FileChange[T] | None]:
        if self._check is None:
            self._check = call_in_daemon_thread(self._read_change)
        return self._check

    def _finish_check(self) -> bool:
        check = self._check
        if check is None:  # another task has used it
            return False
        if not check.done():
            if not self._is_overdue:
                self._is_overdue = True
                message = "%s could not be read within %g s; the last valid version stays in use until it is"
                log.error(message, self.path, READ_TIMEOUT_S)
            return False
        self._check = None
        self._is_overdue = False
        change = check.result()
        if change is None:
            return False
        self._is_rejected = bool(change.problem)
        if change.value is None:
            log.error("%s; the last valid version stays in use", change.problem)
            return False
        self.value = change.value
        if change.is_new and self.on_change is not None:
            self.on_change(change)
        else:
            log.warning("%s changed and was reloaded: %s", self.path, change.difference)
        return change.is_new

    # In the thread.

    def _read_first(self) -> T:
        self._stamp = self._read_stamp()
        return self._parse(self.path)

    def _read_change(self) -> FileChange[T] | None:
        stamp = self._read_stamp()
        if stamp == self._stamp:
            return None
        self._stamp = stamp  # An invalid file is logged once, not at every check.
        previous = self.value
        try:
            value = self._parse(self.path)
        except CommandError as exc:
            return FileChange(None, str(exc))
        before = self.describe_entries(previous)
        after = self.describe_entries(value)
        return FileChange(
            value,
            difference=describe_difference(before, after),
            is_new=value != previous,
            differences=find_differences(before, after),
            file_sha256=read_file_digest(self.path),
        )

    def _read_stamp(self) -> list[tuple[int, ...]]:
        return [read_file_stamp(path) for path in (self.path, *self._companions)]


# By their label in `gateway_file_valid`.
watched_files: WeakValueDictionary[str, WatchedFile[Any]] = WeakValueDictionary()


def read_file_stamp(path: Path) -> tuple[int, ...]:
    # Kubernetes replaces a link above the file, so the inode counts as well.
    try:
        status = path.stat()
    except OSError:
        return ()
    return (status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino)


def find_differences(before: Entries, after: Entries) -> list[EntryChange]:
    """Return the entries that were added, removed and changed; of the last, only the fields that differ."""
    differences = []
    for name in sorted(before.keys() | after.keys()):
        old = before.get(name)
        new = after.get(name)
        if old == new:
            continue
        if old is not None and new is not None:
            names = [each for each in old.keys() | new.keys() if old.get(each) != new.get(each)]
            old, new = (
                {each: entry[each] for each in names if each in entry} for entry in (old, new)
            )
        differences.append((name, old, new))
    return differences


def read_file_digest(path: Path) -> str:
    """Return the SHA-256 of a file; empty if it cannot be read any longer."""
    try:
        return sha256(read_config_file(path).encode()).hexdigest()
    except (OSError, UnicodeDecodeError):
        return ""


def call_in_daemon_thread(function: Callable[[], T]) -> Future[T]:
    """Run a function in a thread that the interpreter does not wait for at exit."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            result = function()
        except BaseException as exc:  # noqa: BLE001 - raised by `future.result`
            future.set_exception(exc)
        else:
            future.set_result(result)

    threading.Thread(target=run, name="config-file", daemon=True).start()
    return future
