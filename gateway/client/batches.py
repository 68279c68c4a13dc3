"""Many inferences, of which each fails alone: batches of inputs, and batches of rows as jobs."""

from __future__ import annotations

import asyncio
import base64
import re
import uuid
from collections import deque
from collections.abc import (
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field
from typing import Any, Final, Generic, TypeAlias, TypeVar, cast

from gateway.client.bodies import (
    Body,
    CallInputs,
    encode_document,
    encode_file,
    encode_inputs,
    is_array,
    is_file,
)
from gateway.client.calls import (
    ENDED_STATES,
    ApiRequest,
    InferCall,
    build_job_path,
    build_model_path,
    split_document,
)
from gateway.client.errors import INVALID_RESPONSE, GatewayError
from gateway.client.models import ModelInfo
from gateway.client.replies import LineBuffer, Reply, parse_json_object
from gateway.client.results import InferResult, decode_result, parse_result
from gateway.client.uploads import StreamedBody
from gateway.media_types import OCTET_STREAM

T = TypeVar("T")
R = TypeVar("R")

# Results that may wait for an earlier one, per running task.
BACKLOG_FACTOR: Final = 16
LINE_BREAKS: Final = re.compile(r"[\r\n]+")
QUOTED_CHARACTERS: Final = re.compile(r'(["\\])')
ROW_HEAD: Final = (
    '--{}\r\nContent-Disposition: form-data; name="row"; filename="{}"\r\nContent-Type: {}\r\n\r\n'
)


class OrderedTasks(Generic[T, R]):
    """An asynchronous iterator that runs a task for each item, and yields the results in order.

    `concurrency` tasks run at a time. A slow reader holds the source of the items back. The first error of a
    task or of the source is raised.
    """

    def __init__(
        self, run: Callable[[T], Coroutine[Any, Any, R]], items: AsyncIterator[T], concurrency: int
    ) -> None:
        self._run = run
        self._items = items
        self._task_slots = asyncio.Semaphore(concurrency)
        self._backlog_slots = asyncio.Semaphore(concurrency * (1 + BACKLOG_FACTOR))
        self._tasks: deque[asyncio.Task[R]] = deque()
        self._has_changed = asyncio.Event()
        self._producer: asyncio.Task[None] | None = None

    def __aiter__(self) -> AsyncIterator[R]:
        return self

    async def __anext__(self) -> R:
        if self._producer is None:
            self._producer = asyncio.create_task(self._produce())
            self._producer.add_done_callback(lambda _: self._has_changed.set())
        while True:
            self._has_changed.clear()
            if self._tasks:
                task = self._tasks[0]
                await asyncio.wait({task})
                self._tasks.popleft()
                self._backlog_slots.release()
                return task.result()
            if self._producer.done():
                self._producer.result()
                raise StopAsyncIteration
            await self._has_changed.wait()

    async def _produce(self) -> None:
        async for item in self._items:
            await self._backlog_slots.acquire()
            await self._task_slots.acquire()
            task = asyncio.create_task(self._run(item))
            task.add_done_callback(lambda _: self._task_slots.release())
            self._tasks.append(task)
            self._has_changed.set()
            await asyncio.sleep(0)  # the task begins before the next item is taken from the source

    async def aclose(self) -> None:
        """Cancel the tasks that run."""
        tasks = [task for task in (self._producer, *self._tasks) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks.clear()


@dataclass(frozen=True)
class InferMany:
    """Inferences of many values. `call` has what they share."""

    call: InferCall
    values: Iterable[Any] | AsyncIterable[Any]
    batch: int
    concurrency: int
    timeout_s: float | None

    def __post_init__(self) -> None:
        if self.batch < 1 or self.concurrency < 1:
            raise ValueError("batch and concurrency must be at least 1")


InferOutcome: TypeAlias = "InferResult | GatewayError"
Infer: TypeAlias = Callable[[InferCall], Awaitable[InferResult]]

END: Final = object()
# A single input of a batch may have caused these: every input is then sent alone.
BATCH_SPLIT_STATUSES: Final = (400, 413, 415, 422, 500)


async def group_values(
    values: Iterable[Any] | AsyncIterable[Any], size: int
) -> AsyncIterator[list[Any]]:
    group: list[Any] = []
    async for value in iterate(values):
        group.append(value)
        if len(group) == size:
            yield group
            group = []
    if group:
        yield group


async def iterate(values: Iterable[Any] | AsyncIterable[Any]) -> AsyncIterator[Any]:
    if isinstance(values, AsyncIterable):
        async for value in values:
            yield value
        return
    if isinstance(values, (list, tuple)):
        for value in values:
            yield value
        return
    # Another iterable may block, as one that reads a queue does.
    iterator = iter(values)
    while (value := await asyncio.to_thread(next, iterator, END)) is not END:
        yield value


async def infer_batch(infer: Infer, call: InferCall, values: Sequence[Any]) -> list[InferOutcome]:
    """Send the values in one request, or one for each; return a result or an error for each, in order."""
    items = await asyncio.to_thread(read_items, values)
    outcomes: dict[int, InferOutcome] = {
        number: item for number, item in enumerate(items) if isinstance(item, GatewayError)
    }
    batchable = [number for number, item in enumerate(items) if is_batchable(item)]
    batch = [items[number] for number in batchable]
    if can_combine(batch):
        parts = await infer_items(infer, call.with_value(batch), len(batch))
        outcomes |= zip(batchable, parts, strict=False)
    for number, item in enumerate(items):
        if number not in outcomes:
            outcomes[number] = await infer_item(infer, call.with_value(item))
    return [outcomes[number] for number in range(len(items))]


def read_items(values: Sequence[Any]) -> list[Any]:
    """Return the values, with the contents of files, or the error that reading one is."""

    def read(value: Any) -> Any:
        try:
            return encode_file(value) if is_file(value) else value
        except GatewayError as exc:
            return exc

    return [read(value) for value in values]


def is_batchable(item: Any) -> bool:
    if isinstance(item, Body):
        return item.content_type == OCTET_STREAM or item.content_type.startswith("image/")
    return isinstance(item, str) or is_array(item)


def can_combine(items: Sequence[Any]) -> bool:
    shapes = {item.shape for item in items if is_array(item)}
    kinds = {Body if isinstance(item, Body) else type(item) for item in items}
    return len(items) > 1 and len(kinds) == 1 and len(shapes) <= 1


async def infer_item(infer: Infer, call: InferCall) -> InferOutcome:
    try:
        return await infer(call)
    except GatewayError as exc:
        return exc


async def infer_items(infer: Infer, call: InferCall, count: int) -> Sequence[InferOutcome]:
    """Return no outcomes if each input must be sent alone, to find the one that failed."""
    outcome = await infer_item(infer, call)
    if isinstance(outcome, GatewayError):
        return [] if outcome.status in BATCH_SPLIT_STATUSES else [outcome] * count
    parts = split_document(outcome, count)
    if parts is None:
        message = f"an output of {call.model} does not have {count} values, one for each input"
        return [GatewayError(message, INVALID_RESPONSE)] * count
    return parts


class InferOutcomes(AsyncIterator[InferOutcome]):
    """The outcomes of many inferences, in the order of their values, from batches that run concurrently."""

    def __init__(self, batches: OrderedTasks[list[Any], list[InferOutcome]]) -> None:
        self._batches = batches
        self._outcomes: deque[InferOutcome] = deque()

    async def __anext__(self) -> InferOutcome:
        while not self._outcomes:
            self._outcomes += await anext(self._batches)
        return self._outcomes.popleft()

    async def aclose(self) -> None:
        await self._batches.aclose()


# Batches of rows as jobs.

# The `custom_id` of a row with its value, or with its outcome.
BatchRow: TypeAlias = "tuple[str, Any]"
BatchOutcome: TypeAlias = "tuple[str, InferOutcome]"


@dataclass(frozen=True)
class BatchBody(StreamedBody):
    """A form with a file for each row, which is encoded while it is sent."""

    rows: Iterable[BatchRow] | AsyncIterable[BatchRow]
    boundary: str = field(default_factory=lambda: uuid.uuid4().hex)

    def create_options(self) -> dict[str, Any]:
        return {"content": self._encode(), "headers": self._create_headers()}

    def create_async_options(self) -> dict[str, Any]:
        return {"content": self._encode_async(), "headers": self._create_headers()}

    def _create_headers(self) -> dict[str, str]:
        return {"content-type": f"multipart/form-data; boundary={self.boundary}"}

    def _encode(self) -> Iterator[bytes]:
        for row in cast("Iterable[BatchRow]", self.rows):
            yield self._encode_row(row)
        yield self._encode_end()

    async def _encode_async(self) -> AsyncIterator[bytes]:
        async for row in iterate(self.rows):
            yield await asyncio.to_thread(self._encode_row, row)
        yield self._encode_end()

    def _encode_row(self, row: BatchRow) -> bytes:
        custom_id, value = row
        name = QUOTED_CHARACTERS.sub(r"\\\1", LINE_BREAKS.sub(" ", custom_id))
        body = encode_row_value(value)
        head = ROW_HEAD.format(self.boundary, name, body.content_type).encode("utf-8", "replace")
        return b"".join((head, body.content, b"\r\n"))

    def _encode_end(self) -> bytes:
        return f"--{self.boundary}--\r\n".encode()


def encode_row_value(value: Any) -> Body:
    inputs = CallInputs(by_name=value) if isinstance(value, Mapping) else CallInputs(value)
    body = encode_inputs(inputs)
    return body if isinstance(body, Body) else encode_document(value, {})


def build_batch_request(
    model: str, rows: Iterable[BatchRow] | AsyncIterable[BatchRow], callback_url: str
) -> ApiRequest:
    return ApiRequest(
        "POST",
        f"{build_model_path(model)}/jobs",
        headers={"x-callback-url": callback_url} if callback_url else {},
        body=BatchBody(rows),
        is_repeatable=False,
    )


class BatchReader:
    """Reads the result of a batch while it grows, over as many connections as it takes."""

    def __init__(self, job: str, info: ModelInfo | None) -> None:
        self._job = job
        self._info = info
        self._has_ended = False
        self._rows = 0
        self._rows_at_connect = 0
        self._lines = LineBuffer(build_job_path(job))

    def start_connection(self) -> str:
        """Return the path of the rows that were not read yet."""
        self._rows_at_connect = self._rows
        self._lines.take_rest()
        return f"{build_job_path(self._job)}/result?after={self._rows}"

    def feed(self, data: bytes) -> Iterator[BatchOutcome]:
        for line in self._lines.feed(data):
            self._rows += 1
            yield self._decode_line(line)

    def _decode_line(self, line: bytes) -> BatchOutcome:
        try:
            return self._decode(parse_json_object(line) or {})
        except (LookupError, TypeError, ValueError, AttributeError):
            message = f"row {self._rows} of the result of job {self._job} is damaged"
            raise GatewayError(message, INVALID_RESPONSE) from None

    def _decode(self, row: Mapping[str, Any]) -> BatchOutcome:
        name = str(row.get("custom_id", row.get("row")))
        if "error" in row:
            error = row["error"]
            return name, GatewayError(error["message"], error["code"], row["status"])
        headers = {"content-type": row.get("content_type", "")}
        content = base64.b64decode(row.get("base64", ""))
        reply = Reply(build_job_path(self._job), row.get("status", 0), headers, content)
        if "response" in row:
            return name, parse_result(row["response"], reply, self._info)
        return name, decode_result(reply, self._info)

    def is_complete(self, job: Mapping[str, Any]) -> bool:
        """Return whether the job is done and read. Raises `GatewayError` if it ended otherwise."""
        kind = job.get("kind", "batch")
        if kind != "batch":
            raise GatewayError(f"job {self._job} is of the kind {kind}, whose result has no rows")
        had_ended = self._has_ended
        self._has_ended = job["state"] in ENDED_STATES
        progress = job["progress"]
        is_read = self._rows >= progress["done"] + progress["failed"]
        if job["state"] == "done" and is_read:
            return True
        error = job.get("error") or {"message": "its result has no more rows", "code": ""}
        if self._has_ended and (is_read or (had_ended and self._rows == self._rows_at_connect)):
            message = f"job {self._job} is {job['state']}: {error['message']}"
            raise GatewayError(message, error["code"])
        return False
