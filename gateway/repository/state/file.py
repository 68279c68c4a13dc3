"""The state store in a file, for the processes of one machine."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Final, TypeVar
from urllib.parse import SplitResult, unquote

import orjson

from gateway.access.limits import QuotaCount, add_to_counts
from gateway.errors import StateUnavailable
from gateway.repository.state.content import (
    CORDONS,
    LOADS,
    MAX_EVENTS,
    MODELS,
    OPERATION_TTL_S,
    Document,
    Loads,
    RawTable,
    StoredEvent,
    Table,
    UnreadableState,
    check_capability_tables,
    decode_operation,
    decode_state,
    format_event_line,
    is_operation_id,
    next_event,
    parse_event_lines,
    parse_loads,
)
from gateway.repository.state.documents import REVISION, DocumentStore, changes, reads
from gateway.repository.state.interface import COUNT_ACTION, WRITE_ACTION, BadState, OutageLog
from gateway.telemetry.audit import MAX_EVENT_BYTES

T = TypeVar("T")
STATE_FORMAT: Final = 1
EMPTY_DOCUMENT: Final = {"format": STATE_FORMAT, REVISION: 0, MODELS.name: {}}
PROBE_MARGIN_BYTES: Final = 4096
LOCK_TIMEOUT_S: Final = 3.0  # a write takes milliseconds, so a longer wait means a stopped process
REPORT_TTL_S: Final = 5.0
LAST_EVENT_BYTES: Final = 2 * MAX_EVENT_BYTES  # the end of a file that contains the whole last line
COUNT_EVENTS_BYTES: Final = 256 << 10
QUOTA_FILE_BYTES: Final = 256


def hash_name(name: str) -> str:
    return blake2b(name.encode(), digest_size=16).hexdigest()


def is_same_file(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def try_lock_file(path: Path) -> int | None:
    """Return the descriptor of a lock that ends with this process; None if another process holds it."""
    with ExitStack() as stack:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        stack.callback(os.close, descriptor)
        with suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if is_same_file(path, descriptor):
                stack.pop_all()
                return descriptor
    return None


@contextmanager
def lock_file(path: Path) -> Iterator[int]:
    """Hold a lock, and yield its descriptor. Raises `TimeoutError`.

    It polls because a blocking `flock` has no timeout.
    """
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    while (descriptor := try_lock_file(path)) is None:
        if time.monotonic() > deadline:
            raise TimeoutError(errno.ETIMEDOUT, "another process holds its lock")
        time.sleep(0.005)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


class FileQuotas:
    """A `QuotaCounters` with a file of each caller."""

    def __init__(
        self, folder: Path, run: Callable[[Callable[[], QuotaCount]], Awaitable[QuotaCount]]
    ) -> None:
        self._folder = folder
        self._run = run

    async def add(self, name: str, limits: Mapping[str, int], count: int) -> QuotaCount:
        return await self._run(partial(self._add, name, limits, count))

    def _add(self, name: str, limits: Mapping[str, int], count: int) -> QuotaCount:
        self._folder.mkdir(0o700, exist_ok=True)
        with lock_file(self._folder / f"{hash_name(name)}.json") as descriptor:
            counts = parse_counts(os.pread(descriptor, QUOTA_FILE_BYTES, 0))
            counted = add_to_counts(counts, limits, count)
            if count and counted.is_added:
                # In one piece, which a process that is killed has written or not.
                os.pwrite(descriptor, orjson.dumps(counts).ljust(QUOTA_FILE_BYTES), 0)
        return counted


def parse_counts(raw: bytes) -> dict[str, int]:
    try:
        counts = decode_state(raw)
    except UnreadableState:  # a new file is empty
        return {}
    is_valid = isinstance(counts, dict) and all(type(each) is int for each in counts.values())
    return counts if is_valid else {}


class FileLeases:
    """Leases as locks that end with their process. The methods block, and raise `OSError`."""

    def __init__(self, folder: Path, owner: str) -> None:
        self._folder = folder
        self._owner = owner
        self._locks: dict[str, int] = {}  # name → descriptor

    def acquire(self, name: str) -> bool:
        self._folder.mkdir(0o700, exist_ok=True)
        path = self._folder / f"{hash_name(name)}.lease"
        if name in self._locks and not is_same_file(path, self._locks[name]):
            self.release(name)  # the file was removed, so the lock excludes nobody
        if name not in self._locks:
            descriptor = try_lock_file(path)
            if descriptor is None:
                return False
            self._locks[name] = descriptor
        return True

    def release(self, name: str) -> None:
        descriptor = self._locks.pop(name, None)
        if descriptor is not None:
            os.close(descriptor)

    def exchange_reports(self, report: Document) -> list[Document]:
        self._folder.mkdir(0o700, exist_ok=True)
        new = self._folder / f"{self._owner}.new"
        new.write_bytes(orjson.dumps(report))
        new.replace(self._folder / f"{self._owner}.report")
        found = []
        for path in self._folder.glob("*.report"):
            with suppress(FileNotFoundError, orjson.JSONDecodeError):  # its process has exited
                if time.time() - path.stat().st_mtime > REPORT_TTL_S:
                    path.unlink()
                elif path.stem != self._owner:
                    found.append(orjson.loads(path.read_bytes()))
        return [document for document in found if isinstance(document, dict)]

    def close(self) -> None:
        for name in list(self._locks):
            self.release(name)
        (self._folder / f"{self._owner}.report").unlink(missing_ok=True)


def open_file_store(url: SplitResult) -> FileStateStore | None:
    path = Path(unquote(url.path))
    is_file_path = path.is_absolute() and not url.path.endswith("/") and "\0" not in str(path)
    if not is_file_path or url.netloc not in ("", "localhost") or url.query or url.fragment:
        return None
    store = FileStateStore(path)
    store.check()
    return store


@dataclass(frozen=True)
class FileSnapshot:
    """The content of the file when it was last read."""

    document: Document
    stamp: tuple[int, ...]
    file: BinaryIO  # kept open, so that no other file reuses its inode and is mistaken for it


class FileStateStore(DocumentStore):
    """A JSON document for the processes of one machine.

    It is replaced atomically, never written in place. Changes are made under a lock in a single thread, so
    that they stay in order and the event loop never waits for the disk.
    """

    is_shared: ClassVar[bool] = True

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self._lock_path = path.with_name(f"{path.name}.lock")
        self._operations_folder = path.with_name(f"{path.name}.operations")
        self._loads_path = path.with_name(f"{path.name}.loads")
        self._cordons_path = path.with_name(f"{path.name}.cordons")
        self._events_path = path.with_name(f"{path.name}.events")
        self._alive_folder = path.with_name(f"{path.name}.processes")
        self._owner = secrets.token_hex(8)
        self._alive_lock: int | None = None
        self._executor = ThreadPoolExecutor(1, "state")
        self._snapshot: FileSnapshot | None = None
        self._outages = OutageLog(str(path))
        self._leases = FileLeases(path.with_name(f"{path.name}.leases"), self._owner)
        count = partial(self.run_blocking, COUNT_ACTION)
        self.quotas = FileQuotas(path.with_name(f"{path.name}.quotas"), count)

    def check(self) -> None:
        """Create the folder if necessary. Raises `BadState` unless the state can be read and written."""
        folder = self._path.parent
        try:
            folder.mkdir(0o700, parents=True, exist_ok=True)
            os.close(os.open(self._lock_path, os.O_RDWR | os.O_CREAT, 0o600))
            if not os.access(folder, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            self._read_document()
            self._close_snapshot()
        except UnreadableState as exc:
            raise BadState(
                f"GATEWAY_STATE: {self._path} is not a valid state file ({exc}); repair it, or "
                "move it away to start with an empty state"
            ) from None
        except OSError as exc:
            raise BadState(
                f"GATEWAY_STATE: {self._path} cannot be used ({explain_os_error(exc)}); it needs "
                "a folder that this user can write to"
            ) from None

    async def read(self, table: Table[T]) -> T:
        # Detect the end of an outage even if nobody changes a model.
        if table is MODELS and WRITE_ACTION in self._outages:
            with suppress(StateUnavailable):
                await self._probe_write()
        return await super().read(table)

    @changes
    def _probe_write(self) -> None:
        # As large as the files to write: a full disk may have room for an empty file.
        probe = self._path.with_name(f"{self._path.name}.probe")
        size = sum(path.stat().st_size for path in (self._path, self._loads_path) if path.exists())
        replace_file(probe, bytes(size + PROBE_MARGIN_BYTES))
        probe.unlink()

    @changes
    def record_operation(self, operation_id: str, document: Document) -> None:
        path = self._operations_folder / f"{operation_id}.json"
        self._operations_folder.mkdir(0o700, exist_ok=True)
        if not path.exists():
            remove_old_operations(self._operations_folder)
        replace_file(path, orjson.dumps(document))

    async def read_operation(self, operation_id: str) -> Document | None:
        return await self._read_operation(operation_id) if is_operation_id(operation_id) else None

    @reads
    def _read_operation(self, operation_id: str) -> Document | None:
        raw = read_existing_file(self._operations_folder / f"{operation_id}.json")
        return None if raw is None else decode_operation(raw)

    async def acquire_lease(self, name: str) -> bool:
        return await self._run_unproven(WRITE_ACTION, lambda: self._leases.acquire(name))

    async def release_lease(self, name: str) -> None:
        await self._run_unproven(WRITE_ACTION, lambda: self._leases.release(name))

    async def exchange_reports(self, report: Document) -> list[Document]:
        return await self._run_unproven(WRITE_ACTION, lambda: self._leases.exchange_reports(report))

    @property
    def is_available(self) -> bool:
        return not self._outages

    async def close(self) -> None:
        with suppress(asyncio.TimeoutError):  # the disk may hang
            await asyncio.wait_for(self._run_in_thread(self._release_locks), LOCK_TIMEOUT_S)
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def _run_in_thread(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, function)

    async def run_blocking(self, action: str, function: Callable[[], T]) -> T:
        result = await self._run_unproven(action, function)
        self._outages.record_success(action)
        return result

    async def _run_unproven(self, action: str, function: Callable[[], T]) -> T:
        """Return the result. A success does not end an outage: locks need no room on the disk."""
        try:
            return await self._run_in_thread(function)
        except OSError as exc:
            raise self._outages.record_failure(action, explain_os_error(exc)) from exc
        except UnreadableState as exc:
            raise self._outages.record_failure(action, f"the state file is damaged: {exc}") from exc

    def exclude_others(self) -> AbstractContextManager[object]:
        return lock_file(self._lock_path)

    def _load_field(self, field: str) -> Any:
        if field == LOADS:
            return self._load_loads()
        if field == CORDONS.name:
            return self._load_cordons()
        return self._read_document().get(field, {})

    def _save_fields(self, fields: Mapping[str, Any]) -> None:
        if LOADS in fields:
            replace_file(self._loads_path, orjson.dumps(fields[LOADS]), is_durable=False)
        elif CORDONS.name in fields:
            names = sorted(fields[CORDONS.name])
            replace_file(self._cordons_path, orjson.dumps(names, option=orjson.OPT_APPEND_NEWLINE))
        else:
            options = orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE
            raw = orjson.dumps({**self._read_document(), **fields}, option=options)
            replace_file(self._path, raw)

    def _read_document(self) -> Document:
        """Return the document, and parse the file again only if it changed."""
        try:
            stamp = file_stamp(self._path.stat())
        except FileNotFoundError:
            if not self._path.parent.is_dir():
                raise  # a missing folder (an unmounted volume) is not an empty state
            self._close_snapshot()
            return EMPTY_DOCUMENT
        if self._snapshot is None or self._snapshot.stamp != stamp:
            self._close_snapshot()
            self._snapshot = read_snapshot(self._path)
        return self._snapshot.document

    def _close_snapshot(self) -> None:
        if self._snapshot is not None:
            self._snapshot.file.close()
        self._snapshot = None

    def _load_loads(self) -> Loads:
        raw = read_existing_file(self._loads_path)
        try:
            return {} if raw is None else parse_loads(decode_state(raw))
        except UnreadableState:
            return {}

    def _load_cordons(self) -> RawTable:
        raw = read_existing_file(self._cordons_path)
        names = [] if raw is None else decode_state(raw)
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise UnreadableState("unexpected structure")
        return dict.fromkeys(names, True)

    @changes
    def append_event(self, raw: bytes) -> None:
        """Add a line to the file.

        Its events are counted where its length passes a multiple of `COUNT_EVENTS_BYTES`. If there are twice
        the events to keep, the older half is dropped.
        """
        length, end = self._read_events_end()
        event = next_event(parse_event_lines(end), raw)
        if event is None:
            return
        line = format_event_line(event)
        is_complete = end.endswith(b"\n")
        passed = (length + len(line)) // COUNT_EVENTS_BYTES - length // COUNT_EVENTS_BYTES
        events = self._load_events() if passed or not is_complete else ()
        if len(events) >= 2 * MAX_EVENTS or not is_complete:
            kept = map(format_event_line, events[1 - MAX_EVENTS :])
            replace_file(self._events_path, b"".join((*kept, line)))
        else:
            append_to_file(self._events_path, line)

    def _read_events_end(self) -> tuple[int, bytes]:
        """Return the length of the file, and its end with the last event."""
        try:
            with self._events_path.open("rb") as file:
                length = file.seek(0, os.SEEK_END)
                file.seek(max(length - LAST_EVENT_BYTES, 0))
                return length, file.read()
        except FileNotFoundError:
            return 0, b""

    def _load_events(self) -> Sequence[StoredEvent]:
        return parse_event_lines(read_existing_file(self._events_path) or b"")

    def _claim_loads(self) -> str:
        # The lock is held until this process exits.
        if self._alive_lock is None:
            self._alive_folder.mkdir(0o700, exist_ok=True)
            self._alive_lock = try_lock_file(self._alive_folder / self._owner)
        return self._owner

    def _is_alive(self, owner: str) -> bool:
        path = self._alive_folder / owner
        if owner == self._owner or not path.exists():
            return owner == self._owner
        descriptor = try_lock_file(path)
        if descriptor is not None:  # the owner has exited
            path.unlink(missing_ok=True)
            os.close(descriptor)
        return descriptor is None

    def _release_locks(self) -> None:
        self._close_snapshot()
        self._leases.close()
        if self._alive_lock is not None:
            (self._alive_folder / self._owner).unlink(missing_ok=True)
            os.close(self._alive_lock)
        self._alive_lock = None


def explain_os_error(exc: OSError) -> str:
    return (exc.strerror or type(exc).__name__).lower()


def file_stamp(status: os.stat_result) -> tuple[int, ...]:
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


def read_existing_file(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def read_snapshot(path: Path) -> FileSnapshot:
    with ExitStack() as stack:
        file = stack.enter_context(path.open("rb"))
        stamp = file_stamp(os.fstat(file.fileno()))
        document = parse_state_document(decode_state(file.read()))
        stack.pop_all()
        return FileSnapshot(document, stamp, file)


def parse_state_document(document: Any) -> Document:
    match document:
        case {"format": int(version)} if version != STATE_FORMAT:
            raise UnreadableState(f"format {version} is not supported, only format {STATE_FORMAT}")
        case {"format": int(), "revision": int(), "models": dict(models)}:
            MODELS.decode(models)
            check_capability_tables(document)
            return document  # type: ignore[no-any-return]  # it is a dict
    raise UnreadableState("unexpected structure")


def replace_file(path: Path, raw: bytes, *, is_durable: bool = True) -> None:
    """Replace a file atomically, and if `is_durable`, wait until it is on the disk. Raises `OSError`.

    The caller must hold the lock.
    """
    new = path.with_name(f"{path.name}.new")
    try:
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(raw)
            file.flush()
            if is_durable:
                os.fsync(file.fileno())
        new.replace(path)
    except OSError:
        with suppress(OSError):
            new.unlink()
        raise
    if not is_durable:
        return
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # persist the rename as well
    finally:
        os.close(folder)


def append_to_file(path: Path, line: bytes) -> None:
    """Append to a file, and wait until it is on the disk. Raises `OSError`; the caller holds the lock."""
    with path.open("ab") as file:
        file.write(line)
        file.flush()
        os.fsync(file.fileno())


def remove_old_operations(folder: Path) -> None:
    # Includes temporary files that a crash left behind.
    for path in folder.iterdir():
        if time.time() - path.stat().st_mtime > OPERATION_TTL_S:
            path.unlink()
