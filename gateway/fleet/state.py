"""What the API asked of each model, kept where every process that serves the fleet finds it.

In memory for one process, in a file for the processes of one machine, in Redis for several machines.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeVar
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

import orjson

from gateway.errors import StateUnavailable

log = logging.getLogger(__name__)

T = TypeVar("T")

FORMAT = 1  # of the file
KEPT_S = 3600  # how long an operation can be asked about
OPERATION = re.compile("[0-9a-f]{32}")  # becomes a file's name or a key, and comes from a URL
LOCK_TIMEOUT_S = 3.0  # a write takes milliseconds: whoever holds the lock for longer is stopped
REDIS_TIMEOUT_S = 1.0  # to connect, and for each answer
COMMAND_TIMEOUT_S = 3.0  # all of it, with a second connection when the first was stale
LEASE_MS = 5000
PREFIX = "triton-gateway:"
TLS_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
SPELLING = (
    "GATEWAY_STATE is none of memory:, file:///FOLDER/state.json and "
    "redis://USER:PASSWORD@HOST:6379/0?prefix=NAME: (rediss:// for TLS, with ssl_ca_certs=FILE "
    "for an authority of your own); what is special within a part of it is percent-encoded"
)
READ, KEPT = "read", "kept"  # what is done with the state, or cannot be


class BadState(ValueError):
    """A `GATEWAY_STATE` that cannot be one, or cannot be used, in a sentence."""


class Unreadable(ValueError):
    """What is kept there is not what a gateway keeps, in half a sentence."""


@dataclass(frozen=True)
class Wish:
    """What the API asked of a model: to be loaded with these parameters, or to be unloaded."""

    loaded: bool
    parameters: Mapping[str, Any] = field(default_factory=dict)
    revision: int = 0  # given by the store; a wish that was repeated has another than before


class Store(Protocol):
    """Where wishes are kept. What fails raises `StateUnavailable`, and is then not half done."""

    async def wishes(self) -> Mapping[str, Wish]:
        """The current wish of every model that has one."""

    async def wish(self, model: str, wish: Wish | None) -> int:
        """Keep a wish, or with None forget it. Its revision, higher than every earlier one."""

    async def leads(self) -> bool:
        """Whether this process is the one that reconciles. Ask every second: leading lapses."""

    async def record(self, operation: str, document: Mapping[str, Any]) -> None:
        """Note how far an operation is, to be read everywhere for an hour.

        The operation's id is `secrets.token_hex(16)`; another is a `ValueError`.
        """

    async def operation(self, operation: str) -> Mapping[str, Any] | None:
        """What was last recorded of an operation; None if nothing, or if this is no id."""

    async def close(self) -> None: ...


def store(url: str) -> Store:
    """`memory:`, `file:///PATH` or `redis://HOST:6379/0`. Raises `BadState`."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise BadState(SPELLING) from None
    kept: Store | None = None
    if parts.scheme == "memory" and not parts.netloc + parts.path + parts.query + parts.fragment:
        kept = Memory()
    elif parts.scheme == "file":
        kept = file_at(parts)
    elif parts.scheme in ("redis", "rediss"):
        kept = redis_at(parts, port or 6379)
    if kept is None:
        # Without the address itself, here and everywhere: it can hold a password.
        raise BadState(SPELLING)
    return kept


@dataclass(frozen=True)
class Wishes:
    """Every wish, and the revision of the last change; a value that changes make anew."""

    models: Mapping[str, Wish] = field(default_factory=dict)
    revision: int = 0

    def having(self, model: str, wish: Wish | None) -> Wishes:
        revision = self.revision + 1
        models = {name: kept for name, kept in self.models.items() if name != model}
        if wish is not None:
            models[model] = replace(wish, revision=revision)
        return Wishes(models, revision)

    def encoded(self) -> bytes:
        models = {
            name: {**encodable(wish), "revision": wish.revision}
            for name, wish in self.models.items()
        }
        document = {"format": FORMAT, "revision": self.revision, "models": models}
        return orjson.dumps(document, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


def encodable(wish: Wish) -> dict[str, Any]:
    return {"loaded": wish.loaded, "parameters": dict(wish.parameters)}


def decoded(raw: bytes) -> Any:
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError:
        raise Unreadable("it is not JSON") from None


def wish_of(document: Any) -> Wish:
    """Raises `Unreadable`."""
    match document:
        case {"loaded": bool(loaded), "parameters": dict(parameters), "revision": int(revision)}:
            return Wish(loaded, parameters, revision)
    raise Unreadable("it holds something else than wishes")


def wishes_of(document: Any) -> Wishes:
    """Raises `Unreadable`."""
    match document:
        case {"format": int(other)} if other != FORMAT:
            raise Unreadable(f"it has format {other}, and this gateway knows format {FORMAT}")
        case {"format": int(), "revision": int(revision), "models": dict(models)}:
            return Wishes({name: wish_of(wish) for name, wish in models.items()}, revision)
    raise Unreadable("it holds something else than wishes")


def is_operation(operation: str) -> bool:
    return OPERATION.fullmatch(operation) is not None


def require_operation(operation: str) -> None:
    if not is_operation(operation):
        raise ValueError("the id of an operation is 32 hexadecimal digits")


class Trouble:
    """Tells the log when something begins to fail and when it works again, not each time between."""

    def __init__(self, place: str) -> None:
        self._place = place
        self._reasons: dict[str, str] = {}

    def begins(self, action: str, reason: str) -> StateUnavailable:
        if self._reasons.get(action) != reason:
            log.warning("the state at %s cannot be %s: %s", self._place, action, reason)
        self._reasons[action] = reason
        return StateUnavailable(action, reason)

    def ends(self, action: str) -> None:
        if self._reasons.pop(action, None) is not None:
            log.info("the state at %s can be %s again", self._place, action)


class Memory:
    """For one process; gone with it."""

    def __init__(self) -> None:
        self._wishes = Wishes()
        self._operations: dict[str, tuple[float, bytes]] = {}

    async def wishes(self) -> Mapping[str, Wish]:
        return self._wishes.models

    async def wish(self, model: str, wish: Wish | None) -> int:
        self._wishes = self._wishes.having(model, wish)
        return self._wishes.revision

    async def leads(self) -> bool:
        return True

    async def record(self, operation: str, document: Mapping[str, Any]) -> None:
        require_operation(operation)
        now = time.monotonic()
        for old in [name for name, (at, _) in self._operations.items() if now - at > KEPT_S]:
            del self._operations[old]
        self._operations[operation] = (now, orjson.dumps(document))

    async def operation(self, operation: str) -> Mapping[str, Any] | None:
        _, raw = self._operations.get(operation, (0, b"null"))
        document: Mapping[str, Any] | None = orjson.loads(raw)
        return document

    async def close(self) -> None:
        pass


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
        return await self._do(READ, lambda: self._read().models)

    async def wish(self, model: str, wish: Wish | None) -> int:
        return await self._do(KEPT, lambda: self._change(model, wish))

    async def leads(self) -> bool:
        try:
            return await self._in_thread(self._lead)
        except OSError:
            return True  # as in Redis, below

    async def record(self, operation: str, document: Mapping[str, Any]) -> None:
        require_operation(operation)
        raw = orjson.dumps(document)
        await self._do(KEPT, lambda: self._record(operation, raw))

    async def operation(self, operation: str) -> Mapping[str, Any] | None:
        if not is_operation(operation):
            return None
        return await self._do(READ, lambda: self._recorded(operation))

    async def close(self) -> None:
        await self._in_thread(self._let_go)
        self._thread.shutdown(wait=False)

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


def put(path: Path, raw: bytes) -> None:
    """Replace a file by a whole one, on the disk when this returns. Under a lock; raises `OSError`."""
    new = path.with_name(f"{path.name}.new")
    try:
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(raw)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except OSError:
        with suppress(OSError):
            new.unlink()
        raise
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


def redis_at(url: SplitResult, port: int) -> Redis | None:
    options = dict(parse_qsl(url.query, keep_blank_values=True))
    prefix = options.pop("prefix", PREFIX)
    database = url.path.strip("/") or "0"
    tls = url.scheme == "rediss"
    known = options.keys() <= set(TLS_FILES if tls else ())
    if not (url.hostname and database.isdecimal() and known) or url.fragment:
        return None
    for name, file in options.items():
        if not Path(file).is_file():
            raise BadState(f"GATEWAY_STATE: there is no file {file} for {name}")
    server = Server(
        unquote(url.hostname),
        port,
        int(database),
        None if url.username is None else unquote(url.username) or None,
        None if url.password is None else unquote(url.password),
        options if tls else None,
    )
    return Redis(server, prefix)


@dataclass(frozen=True)
class Server:
    """Where a Redis is, and who asks."""

    host: str
    port: int
    database: int
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    tls: Mapping[str, str] | None = None

    def __str__(self) -> str:
        scheme = "redis" if self.tls is None else "rediss"
        return f"{scheme}://{self.host}:{self.port}/{self.database}"


# The scripts change several keys at once, or one that nobody may touch meanwhile.
WISH = """
local revision = redis.call('INCR', KEYS[2])
redis.call('SET', KEYS[3], ARGV[2])
if ARGV[3] then
  redis.call('HSET', KEYS[1], ARGV[1], string.format('{"revision":%d,', revision) .. ARGV[3])
else
  redis.call('HDEL', KEYS[1], ARGV[1])
end
return revision
"""
WISHES = """
local change = redis.call('GET', KEYS[2])
if change and change == ARGV[1] then
  return {change}
end
return {change or '', redis.call('HGETALL', KEYS[1])}
"""
LEAD = """
local leader = redis.call('GET', KEYS[1])
if leader and leader ~= ARGV[1] then
  return 0
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
"""
RESIGN = """
if redis.call('GET', KEYS[1]) == ARGV[1] then
  redis.call('DEL', KEYS[1])
end
"""
# By the name of the exception or of one that it is derived from. Its own text is never told: a server
# quotes the arguments of a command that it does not take, and those can be a password.
REDIS_REASONS = {
    "TimeoutError": "Redis does not answer",
    "AuthenticationError": "Redis does not know this user or password",
    "AuthorizationError": "Redis does not let this user in",
    "NoPermissionError": "Redis does not allow this user a command or key that is needed",
    "BusyLoadingError": "Redis is still loading its data",
    "ReadOnlyError": "this Redis is a copy that cannot be written to",
    "OutOfMemoryError": "Redis is out of memory",
    "ResponseError": "Redis refuses a command",
    "InvalidResponse": "what answers there is not Redis",
    "Exception": "Redis cannot be reached",
}
CODE = re.compile("[A-Z]{4,}(?= )")  # such as MISCONF or WRONGTYPE, before the text


def why_redis(exc: Exception) -> str:
    known = (REDIS_REASONS.get(kind.__name__) for kind in type(exc).__mro__)
    reason, code = next(filter(None, known)), CODE.match(str(exc))
    return f"{reason} ({code[0]})" if code else reason


class Redis:
    """For gateways on several machines; as durable as that Redis is."""

    def __init__(self, server: Server, prefix: str) -> None:
        try:
            from redis import asyncio as redis  # noqa: PLC0415 - an extra
            from redis import backoff, exceptions  # noqa: PLC0415
            from redis.asyncio.retry import Retry  # noqa: PLC0415
        except ImportError:
            raise BadState(
                "GATEWAY_STATE is in Redis, which needs: pip install 'triton-gateway[redis]'"
            ) from None
        tls = server.tls or {}
        self._client: Any = redis.Redis(
            host=server.host,
            port=server.port,
            db=server.database,
            username=server.user,
            password=server.password,
            ssl=server.tls is not None,
            ssl_check_hostname=True,
            ssl_ca_certs=tls.get("ssl_ca_certs"),
            ssl_certfile=tls.get("ssl_certfile"),
            ssl_keyfile=tls.get("ssl_keyfile"),
            socket_connect_timeout=REDIS_TIMEOUT_S,
            socket_timeout=REDIS_TIMEOUT_S,
            # Once, for a connection that was closed while it was idle. Every command bears it.
            retry=Retry(backoff.NoBackoff(), 1, (exceptions.ConnectionError,)),
            protocol=2,  # the other begins with a command that has the password among its arguments
        )
        self._failures = (exceptions.RedisError, OSError, UnicodeError, asyncio.TimeoutError)
        self._token = secrets.token_hex(16)
        self._leading = False
        self._change = b""
        self._wishes: Mapping[str, Wish] = {}
        self._prefix = prefix
        self._trouble = Trouble(str(server))

    async def wishes(self) -> Mapping[str, Wish]:
        """A wish can hold a whole model: they are sent only when one has changed."""
        keys = f"{self._prefix}wishes", f"{self._prefix}change"
        return await self._ask(
            READ, "EVAL", WISHES, len(keys), *keys, self._change, of=self._changed
        )

    def _changed(self, answer: Any) -> Mapping[str, Wish]:
        change, *hashes = answer
        for found in hashes:
            pairs = zip(found[::2], found[1::2], strict=True)
            self._wishes = {name.decode(): wish_of(decoded(raw)) for name, raw in pairs}
        self._change = change
        return self._wishes

    async def wish(self, model: str, wish: Wish | None) -> int:
        keys = [f"{self._prefix}{name}" for name in ("wishes", "revision", "change")]
        # A change is known by a random name: a Redis that lost its data counts from 1 again.
        arguments: list[str | bytes] = [model, secrets.token_hex(8)]
        if wish is not None:
            # Less the brace: the script begins the object with the revision.
            arguments.append(orjson.dumps(encodable(wish))[1:])
        return await self._ask(KEPT, "EVAL", WISH, len(keys), *keys, *arguments, of=int)

    async def leads(self) -> bool:
        arguments = (f"{self._prefix}leader", self._token, LEASE_MS)
        try:
            self._leading = await self._ask(KEPT, "EVAL", LEAD, 1, *arguments, of=bool)
        except StateUnavailable:
            # Nobody can say who leads. If nobody did, a replica that restarts now would stay empty;
            # if all do, it is told several times to load the same, which changes nothing.
            return True
        return self._leading

    async def record(self, operation: str, document: Mapping[str, Any]) -> None:
        require_operation(operation)
        raw = orjson.dumps(document)
        await self._ask(KEPT, "SET", self._operation_key(operation), raw, "EX", KEPT_S, of=bool)

    async def operation(self, operation: str) -> Mapping[str, Any] | None:
        if not is_operation(operation):
            return None
        key = self._operation_key(operation)
        return await self._ask(READ, "GET", key, of=lambda raw: raw and decoded(raw))

    async def close(self) -> None:
        """Another leads at once, and not only when the lease has lapsed."""
        if self._leading:
            with suppress(StateUnavailable):
                arguments = (f"{self._prefix}leader", self._token)
                await self._ask(KEPT, "EVAL", RESIGN, 1, *arguments, of=bool)
        with suppress(*self._failures):
            await self._client.aclose()

    def _operation_key(self, operation: str) -> str:
        return f"{self._prefix}operation:{operation}"

    async def _ask(self, action: str, *command: str | bytes | int, of: Callable[[Any], T]) -> T:
        """What `of` makes of the answer."""
        asked = self._client.execute_command(*command)
        try:
            made = of(await asyncio.wait_for(asked, COMMAND_TIMEOUT_S))
        except (Unreadable, UnicodeDecodeError):
            reason = f"Redis holds what no gateway wrote, at {self._prefix}*"
            raise self._trouble.begins(action, reason) from None
        except self._failures as exc:
            raise self._trouble.begins(action, why_redis(exc)) from None
        self._trouble.ends(action)
        return made
