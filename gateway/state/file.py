"""In a file, for the processes of one machine."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeVar
from urllib.parse import SplitResult, unquote

import orjson

from gateway.errors import StateUnavailable
from gateway.state.loads import Loads, begin, end, loads_of, new_token, owners, without_owners
from gateway.state.wishes import (
    KEPT,
    KEPT_S,
    READ,
    BadState,
    Trouble,
    Unreadable,
    Wish,
    Wishes,
    decoded,
    is_operation,
    require_operation,
    wishes_of,
)

log = logging.getLogger(__name__)

T = TypeVar("T")
LOCK_TIMEOUT_S: Final = (
    3.0  # a write takes milliseconds: whoever holds the lock for longer is stopped
)


def file_at(url: SplitResult) -> File | None:
    path = Path(unquote(url.path))
    named = path.is_absolute() and not url.path.endswith("/") and "\0" not in str(path)
    if not named or url.netloc not in ("", "localhost") or url.query or url.fragment:
        return None
    kept = File(path)
    kept.check()
    return kept


@dataclass(frozen=True)
class Seen:
    """What the file held when it was read."""

    wishes: Wishes
    stamp: tuple[int, ...]
    file: BinaryIO  # held open, so that no other file gets its inode and is taken for this one


class File:
    """A JSON document for the processes of one machine.

    It is replaced, never written to: there is always a whole one. Changes are made under a lock, in a
    thread of their own, where they keep their order and no request waits for a disk.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = path.with_name(f"{path.name}.lock")
        self._leadership = path.with_name(f"{path.name}.leader")
        self._operations = path.with_name(f"{path.name}.operations")
        self._loads = path.with_name(f"{path.name}.loads")
        self._alive_folder = path.with_name(f"{path.name}.processes")
        self._owner = secrets.token_hex(8)
        self._alive: int | None = None
        self._thread = ThreadPoolExecutor(1, "state")
        self._seen: Seen | None = None
        self._leading: int | None = None
        self._trouble = Trouble(str(path))

    def check(self) -> None:
        """Make the folder if there is none. Raises `BadState` unless the state can be read and kept."""
        folder = self._path.parent
        try:
            folder.mkdir(0o700, parents=True, exist_ok=True)
            os.close(os.open(self._lock, os.O_RDWR | os.O_CREAT, 0o600))
            if not os.access(folder, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            self._read()
            self._forget()
        except Unreadable as exc:
            raise BadState(
                f"GATEWAY_STATE: {self._path} is not the state of a gateway ({exc}); repair it, or "
                "move it away to start with nothing"
            ) from None
        except OSError as exc:
            raise BadState(
                f"GATEWAY_STATE: {self._path} cannot be used ({why(exc)}); it needs a folder where "
                "this user may write"
            ) from None

    async def wishes(self) -> Mapping[str, Wish]:
        if KEPT in self._trouble:  # until somebody changes a model, nothing else would end it
            with suppress(StateUnavailable):
                await self._do(KEPT, self._try_to_write)
        return await self._do(READ, lambda: self._read().models)

    async def wish(self, model: str, wish: Wish | None) -> int:
        return await self._do(KEPT, lambda: self._change(model, wish))

    async def leads(self) -> bool:
        try:
            return await self._in_thread(self._lead)
        except OSError:
            return True  # as in Redis, below

    async def loads(self) -> Loads:
        return await self._do(READ, self._living_loads)

    async def begin_load(self, replica: str, model: str) -> tuple[str, str]:
        token = new_token(self._owner)

        def change() -> str:
            self._live()
            with locked(self._lock):
                loads, before = begin(self._read_loads(), replica, model, token)
                put(self._loads, orjson.dumps(loads), durable=False)
            return before

        return token, await self._do(KEPT, change)

    async def end_load(self, replica: str, model: str, token: str, left: str) -> None:
        def change() -> None:
            with locked(self._lock):
                loads, _ = end(self._read_loads(), replica, model, token, left)
                put(self._loads, orjson.dumps(loads), durable=False)

        await self._do(KEPT, change)

    async def forget_loads(self, replica: str) -> None:
        def change() -> None:
            with locked(self._lock):
                kept = {
                    name: models for name, models in self._read_loads().items() if name != replica
                }
                put(self._loads, orjson.dumps(kept), durable=False)

        await self._do(KEPT, change)

    async def record(self, operation: str, document: Mapping[str, Any]) -> None:
        require_operation(operation)
        raw = orjson.dumps(document)
        await self._do(KEPT, lambda: self._record(operation, raw))

    async def operation(self, operation: str) -> Mapping[str, Any] | None:
        if not is_operation(operation):
            return None
        return await self._do(READ, lambda: self._recorded(operation))

    def windows(self) -> None:
        return None

    @property
    def is_available(self) -> bool:
        return not self._trouble

    async def close(self) -> None:
        with suppress(asyncio.TimeoutError):  # of a disk that hangs
            await asyncio.wait_for(self._in_thread(self._let_go), LOCK_TIMEOUT_S)
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _in_thread(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)

    async def _do(self, action: str, function: Callable[[], T]) -> T:
        try:
            done = await self._in_thread(function)
        except OSError as exc:
            raise self._trouble.begins(action, why(exc)) from exc
        except Unreadable as exc:
            raise self._trouble.begins(action, f"the state file is damaged: {exc}") from exc
        self._trouble.ends(action)
        return done

    def _read(self) -> Wishes:
        """The document, parsed anew only when another stands there or this one was written to."""
        try:
            stamp = stamp_of(self._path.stat())
        except FileNotFoundError:
            if not self._path.parent.is_dir():
                raise  # a folder that is away is not a state without models
            self._forget()
            return Wishes()
        if self._seen is None or self._seen.stamp != stamp:
            self._forget()
            self._seen = seen(self._path)
        return self._seen.wishes

    def _forget(self) -> None:
        if self._seen is not None:
            self._seen.file.close()
        self._seen = None

    def _change(self, model: str, wish: Wish | None) -> int:
        with locked(self._lock):
            wishes = self._read().having(model, wish)
            put(self._path, wishes.encoded())
        return wishes.revision

    def _read_loads(self) -> Loads:
        try:
            return loads_of(decoded(self._loads.read_bytes()))
        except (FileNotFoundError, Unreadable):
            return {}

    def _living_loads(self) -> Loads:
        loads = self._read_loads()
        alive = {owner for owner in owners(loads) if owner == self._owner or self._lives(owner)}
        return without_owners(loads, frozenset(alive))

    def _live(self) -> None:
        """Hold a lock for as long as this process lives: its loads are under way until then."""
        if self._alive is None:
            self._alive_folder.mkdir(0o700, exist_ok=True)
            self._alive = taken(self._alive_folder / self._owner)

    def _lives(self, owner: str) -> bool:
        path = self._alive_folder / owner
        if not path.exists():
            return False
        descriptor = taken(path)
        if descriptor is not None:  # nobody holds it
            path.unlink(missing_ok=True)
            os.close(descriptor)
        return descriptor is None

    def _try_to_write(self) -> None:
        probe = self._path.with_name(f"{self._path.name}.probe")
        with locked(self._lock):
            put(probe, b"")
            probe.unlink()

    def _lead(self) -> bool:
        if self._leading is not None and not is_at(self._leadership, self._leading):
            os.close(self._leading)  # the file was removed: others lock another one
            self._leading = None
        if self._leading is None:
            self._leading = taken(self._leadership)
        return self._leading is not None

    def _record(self, operation: str, raw: bytes) -> None:
        path = self._operations / f"{operation}.json"
        with locked(self._lock):
            self._operations.mkdir(0o700, exist_ok=True)
            if not path.exists():
                remove_old(self._operations)
            put(path, raw)

    def _recorded(self, operation: str) -> Mapping[str, Any] | None:
        try:
            raw = (self._operations / f"{operation}.json").read_bytes()
        except FileNotFoundError:
            return None
        document: Mapping[str, Any] = decoded(raw)
        return document

    def _let_go(self) -> None:
        self._forget()
        if self._leading is not None:
            os.close(self._leading)
        self._leading = None
        if self._alive is not None:
            (self._alive_folder / self._owner).unlink(missing_ok=True)
            os.close(self._alive)
        self._alive = None


def why(exc: OSError) -> str:
    return (exc.strerror or type(exc).__name__).lower()


def stamp_of(status: os.stat_result) -> tuple[int, ...]:
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


def seen(path: Path) -> Seen:
    """Raises `OSError` or `Unreadable`."""
    with ExitStack() as closing:
        file = closing.enter_context(path.open("rb"))
        stamp = stamp_of(os.fstat(file.fileno()))
        wishes = wishes_of(decoded(file.read()))
        closing.pop_all()
        return Seen(wishes, stamp, file)


def put(path: Path, raw: bytes, *, durable: bool = True) -> None:
    """Replace a file by a whole one, if `durable` on the disk when this returns. Under a lock; raises
    `OSError`."""
    new = path.with_name(f"{path.name}.new")
    try:
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(raw)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        new.replace(path)
    except OSError:
        with suppress(OSError):
            new.unlink()
        raise
    if not durable:
        return
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the new name, too
    finally:
        os.close(folder)


def remove_old(folder: Path) -> None:
    """Operations that nobody asks about any more, and what a crash left of one."""
    for path in folder.iterdir():
        if time.time() - path.stat().st_mtime > KEPT_S:
            path.unlink()


def is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def taken(path: Path) -> int | None:
    """A lock that ends with this process, as a descriptor; None while another holds it."""
    with ExitStack() as closing:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        closing.callback(os.close, descriptor)
        with suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if is_at(path, descriptor):
                closing.pop_all()
                return descriptor
    return None


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Raises `TimeoutError`: waiting for a lock in the kernel could not be given up."""
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    while (descriptor := taken(path)) is None:
        if time.monotonic() > deadline:
            raise TimeoutError(errno.ETIMEDOUT, "another process holds its lock")
        time.sleep(0.005)
    try:
        yield
    finally:
        os.close(descriptor)
