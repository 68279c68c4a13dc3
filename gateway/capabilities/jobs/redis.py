"""Jobs in Redis, for gateways on several machines.

The bodies and results are in a folder that the gateways share, or in Redis. Leases end by the clock of Redis.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import Any, Final, TypeVar

import orjson

from gateway.capabilities.jobs.errors import JobsFull, JobsUnavailable, ResultTooLarge
from gateway.capabilities.jobs.job import BODY_SUFFIX, MAX_DOCUMENT_BYTES, StoredJob
from gateway.capabilities.jobs.store import ANY_TOKEN, LEASES, REFUSED, TOO_MANY, TURNS, Change
from gateway.errors import BodyTooLarge, StateUnavailable
from gateway.repository.state.interface import READ_ACTION, WRITE_ACTION
from gateway.repository.state.redis_connection import REDIS_REASONS, RedisConnection, RedisServer

log = logging.getLogger(__name__)

T = TypeVar("T")
# Without a shared folder, Redis keeps bodies and results up to these sizes.
MAX_BODY_BYTES: Final = 1 << 20
MAX_RESULT_BYTES: Final = 64 << 20
BODY_WITHOUT_JOB_TTL_S: Final = 3600
MAX_RENEWAL_S: Final = 5.0  # every worker has renewed its leases twice
READ_COMMANDS: Final = ("ZRANGE", "ZRANK", "ZCARD", "GET", "HGET", "STRLEN", "GETRANGE")
SAFE_POLICY: Final = "noeviction"
OUT_OF_MEMORY: Final = REDIS_REASONS["OutOfMemoryError"]
# `KEYS[1]` is the prefix of all keys. The hashes `documents`, `tokens`, `sizes` and `names`, and a sorted set
# for each list. Scripts never parse a document, which others may have written.
KEY: Final = "local function key(name) return KEYS[1] .. name end\n"
# Makes every change. Arguments: the fields of a `Change`, and the document. `time` is the prelude's.
CHANGE: Final = (
    KEY
    + f"""
local change, document = cjson.decode(ARGV[1]), ARGV[2]
local id, scores = change.id, change.scores
local stored = redis.call('HGET', key('documents'), id)
local token = redis.call('HGET', key('tokens'), id)
if change.seen_token == cjson.null then
  local holder = change.name ~= '' and redis.call('HGET', key('names'), change.name)
  if stored then  -- the command was sent a second time
    return id
  elseif holder and holder ~= change.lost_id then
    return holder
  elseif redis.call('ZCARD', key(change.limited)) >= change.max_length then
    return '{TOO_MANY}'
  end
elseif change.seen_token ~= {ANY_TOKEN} and change.seen_token ~= tonumber(token) then
  -- It may be the same command, sent a second time.
  return stored == document and id or '{REFUSED}'
end
local now = time[1] + time[2] / 1e6
scores['{LEASES}'] = change.lease_s > 0 and now + change.lease_s or cjson.null
local function leave_lists()
  for name, score in pairs(scores) do
    if score == cjson.null then
      redis.call('ZREM', key(name), id)
    end
  end
end
-- A Redis without memory refuses only what needs some before the first change: jobs can always end.
if scores[change.limited] == cjson.null then
  leave_lists()
end
local size = tonumber(redis.call('HGET', key('sizes'), id) or '') or 0
if document == '' then
  for _, name in ipairs({{'documents', 'tokens', 'sizes'}}) do
    redis.call('HDEL', key(name), id)
  end
  if change.name ~= '' and redis.call('HGET', key('names'), change.name) == id then
    redis.call('HDEL', key('names'), change.name)
  end
else
  redis.call('HSET', key('documents'), id, document)
  redis.call('HSET', key('tokens'), id, string.format('%d', change.token))
  redis.call('HSET', key('sizes'), id, string.format('%d', change.size_bytes))
  if not stored then
    redis.call('PERSIST', key('file:' .. id .. '{BODY_SUFFIX}'))
    if change.name ~= '' then
      redis.call('HSET', key('names'), change.name, id)
    end
  end
end
redis.call('INCRBY', key('bytes'), string.format('%d', change.size_bytes - size))
for name, score in pairs(scores) do
  if score ~= cjson.null then
    redis.call('ZADD', key(name), score, id)
  end
end
leave_lists()
if redis.call('ZCARD', key(change.queue)) == 0 then
  redis.call('ZREM', key('{TURNS}'), change.owner)
elseif change.is_start then
  redis.call('ZADD', key('{TURNS}'), now, change.owner)
else
  redis.call('ZADD', key('{TURNS}'), 'NX', now, change.owner)
end
return id
"""
)
# Arguments: the seconds, and IDs each with a token. Returns the IDs of jobs with another token.
RENEW: Final = (
    KEY
    + f"""
local lost = {{}}
for number = 2, #ARGV, 2 do
  if redis.call('HGET', key('tokens'), ARGV[number]) == ARGV[number + 1] then
    redis.call('ZADD', key('{LEASES}'), time[1] + time[2] / 1e6 + ARGV[1], ARGV[number])
  else
    table.insert(lost, ARGV[number])
  end
end
return lost
"""
)
# Arguments: the IDs. Returns their documents; one that is too large for a job is empty.
READ: Final = (
    KEY
    + f"""
local found = {{}}
for number, id in ipairs(ARGV) do
  local is_large = redis.call('HSTRLEN', key('documents'), id) > {MAX_DOCUMENT_BYTES}
  found[number] = is_large and '' or redis.call('HGET', key('documents'), id)
end
return found
"""
)
# Arguments: the file, the position, the data, and the seconds after which it is deleted unless it has a job.
WRITE_BODY: Final = (
    KEY
    + """
redis.call('SETRANGE', key('file:' .. ARGV[1]), ARGV[2], ARGV[3])
return redis.call('EXPIRE', key('file:' .. ARGV[1]), ARGV[4])
"""
)


class JobRedis(RedisConnection):
    """The Redis of the jobs. What it does here raises `JobsUnavailable` or `JobsFull`."""

    async def send(self, command: str, key: str, *arguments: Any, decode: Callable[[Any], T]) -> T:
        action = READ_ACTION if command in READ_COMMANDS else WRITE_ACTION
        with describe_outage():
            command_line = (command, self.full_key(key), *arguments)
            return await self.execute(action, *command_line, decode=decode)

    async def run(
        self, script: str, *arguments: Any, decode: Callable[[Any], T], action: str = WRITE_ACTION
    ) -> T:
        with describe_outage():
            return await self.run_script(action, script, ("",), *arguments, decode=decode)


class RedisTable:
    """`JobTable` in Redis."""

    def __init__(self, server: RedisServer, prefix: str, lease_s: float) -> None:
        self._redis = JobRedis(server, f"{prefix}jobs:", "queue of jobs")
        self.files = RedisFiles(self._redis)
        self.renewal_s = min(lease_s / 3, MAX_RENEWAL_S)

    async def open(self) -> None:
        """Warn of settings with which Redis loses jobs. While it cannot be reached, none is accepted."""
        with suppress(StateUnavailable):
            if not await self._redis.is_append_only():
                log.warning(
                    "the Redis of GATEWAY_JOBS loses accepted jobs when it ends: its appendonly is off"
                )
            facts = await self._redis.execute(READ_ACTION, "INFO", "memory", decode=dict)
            if (policy := facts.get("maxmemory_policy", SAFE_POLICY)) != SAFE_POLICY:
                text = (
                    "the Redis of GATEWAY_JOBS may forget jobs: its maxmemory-policy is %s, not %s"
                )
                log.warning(text, policy, SAFE_POLICY)

    async def close(self) -> None:
        await self._redis.close()

    async def change(self, change: Change) -> str:
        fields = asdict(change)
        document = fields.pop("document")
        return await self._redis.run(CHANGE, orjson.dumps(fields), document, decode=bytes.decode)

    async def renew(self, tokens: Mapping[str, int], lease_s: float) -> Set[str]:
        pairs = [text for job_id, token in tokens.items() for text in (job_id, str(token))]
        return set(await self._redis.run(RENEW, str(lease_s), *pairs, decode=decode_texts))

    async def read(self, *job_ids: str) -> Sequence[StoredJob]:
        documents = await self._redis.run(READ, *job_ids, decode=list, action=READ_ACTION)
        return [StoredJob(*each) for each in zip(map(str.encode, job_ids), documents, strict=True)]

    async def list_ids(
        self, name: str, first: int, count: int, until: float | None, *, is_reverse: bool
    ) -> Sequence[str]:
        if until is None:
            with describe_outage():
                now_s, _ = await self._redis.execute(READ_ACTION, "TIME", decode=tuple)
            until = float(now_s)
        limits = (repr(until), "-inf") if is_reverse else ("-inf", repr(until))
        order = ("BYSCORE", *(("REV",) if is_reverse else ()), "LIMIT", first, count)
        return await self._redis.send("ZRANGE", name, *limits, *order, decode=decode_texts)

    async def find_rank(self, name: str, job_id: str) -> int | None:
        return await self._redis.send("ZRANK", name, job_id, decode=decode_optional_number)

    async def count(self, *names: str) -> Sequence[int]:
        return [await self._redis.send("ZCARD", name, decode=int) for name in names]

    async def measure(self) -> int:
        return await self._redis.send("GET", "bytes", decode=decode_optional_number) or 0

    async def keep_name(self, name: str, value: str) -> str:
        if value:
            await self._redis.send("HSETNX", "names", name, value, decode=bool)
        return await self._redis.send("HGET", "names", name, decode=decode_text)


class RedisFiles:
    """`JobFiles` in Redis, where nothing is left over: bodies without a job expire."""

    def __init__(self, redis: JobRedis) -> None:
        self._redis = redis

    async def open(self) -> None:
        """The table has opened Redis."""

    async def close(self) -> None:
        """The table closes Redis."""

    async def append(self, file: str, data: bytes) -> None:
        is_body = file.endswith(BODY_SUFFIX)
        max_bytes = MAX_BODY_BYTES if is_body else MAX_RESULT_BYTES
        length = await self._redis.send("STRLEN", name_file(file), decode=int)
        if length + len(data) > max_bytes:
            raise BodyTooLarge(max_bytes) if is_body else ResultTooLarge(max_bytes)
        # Unlike APPEND, this may be repeated on another connection.
        if is_body:
            arguments = (file, length, data, BODY_WITHOUT_JOB_TTL_S)
            await self._redis.run(WRITE_BODY, *arguments, decode=bool)
        else:
            await self._redis.send("SETRANGE", name_file(file), length, data, decode=int)

    async def write(self, file: str, data: bytes) -> None:
        await self.delete(file)
        await self.append(file, data)

    async def flush(self, file: str) -> None:
        """Redis has written it."""

    async def read(self, file: str, start: int, length: int) -> bytes:
        command = ("GETRANGE", name_file(file), start, start + length - 1)
        return await self._redis.send(*command, decode=bytes)

    async def delete(self, *files: str) -> None:
        for file in files:
            await self._redis.send("DEL", name_file(file), decode=bool)

    async def list_old(self) -> Sequence[str]:
        return ()


@contextmanager
def describe_outage() -> Iterator[None]:
    try:
        yield
    except StateUnavailable as exc:
        if exc.reason.startswith(OUT_OF_MEMORY):
            raise JobsFull(exc.reason) from None
        raise JobsUnavailable(exc.reason) from None


def name_file(file: str) -> str:
    return f"file:{file}"


def decode_text(value: bytes | None) -> str:
    return (value or b"").decode(errors="replace")


def decode_texts(values: Sequence[bytes]) -> list[str]:
    return list(map(decode_text, values))


def decode_optional_number(value: Any) -> int | None:
    """Return a number; None if there is none, or something else in its place."""
    with suppress(ValueError, OverflowError, TypeError):
        return int(float(value))
    return None
