"""What the models of the fleet look like, and what they answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from time import perf_counter

from gateway.context import current
from gateway.errors import (
    BadUpstream,
    DoesNotFit,
    ModelNotReady,
    RefusedByModel,
    UnknownModel,
)
from gateway.fleet.calls import Call, called, model_path, posted
from gateway.fleet.pool import Pool
from gateway.fleet.replica import Replica
from gateway.names import normalized_version
from gateway.tensors.inputs import Inputs
from gateway.tensors.outputs import Result, joined
from gateway.tensors.signature import Signature, signature
from gateway.triton.channel import prepare
from gateway.triton.complaints import Asked
from gateway.triton.infer import Answer
from gateway.triton.streams import Stream
from gateway.triton.wire import Headers
from gateway.words import listed, quoted

FRESH_S = 2.0  # a signature older than this is asked for again, while it goes on serving
OLD_S = 10.0  # … and one of a model that nobody asked for lately is not relied upon
METADATA_TIMEOUT_S = 5.0
# Pieces of one batch that are under way: each has a connection of its own.
PIECES_AT_A_TIME = 32
# Triton and what we know of the model disagree: read it again.
CONTRADICTIONS = (UnknownModel, ModelNotReady, DoesNotFit)


@dataclass
class Known:
    """A signature, when it was read, and the task that reads it again."""

    signature: Signature
    read_at: float
    refresh: asyncio.Task[Signature] | None = None


class Models:
    """What the models take and give, read when first asked for and kept fresh; and their answers.

    Those that `cancellable` names, as globs, or whose config says so, stop when nobody waits any more.
    """

    def __init__(self, pool: Pool, cancellable: Sequence[str] = ()) -> None:
        self._pool = pool
        self._cancellable = cancellable
        self._known: dict[tuple[str, str], Known] = {}
        self._reading: dict[tuple[str, str], asyncio.Task[Signature]] = {}

    def close(self) -> None:
        for task in self._reading.values():
            task.cancel()
        for known in self._known.values():
            if known.refresh is not None:
                known.refresh.cancel()

    async def signature(self, model: str, version: str = "") -> Signature:
        """What a model takes and gives. Raises `UnknownModel` or `ModelNotReady`."""
        number = normalized_version(version) if version else ""
        if number is None:
            raise UnknownModel(model, version)
        version = number
        key, now = (model, version), asyncio.get_running_loop().time()
        known = self._known.get(key)
        if known is None or now - known.read_at > OLD_S:
            return await self._first_read(key)
        if now - known.read_at > FRESH_S and known.refresh is None:
            known.refresh = asyncio.create_task(self._read_again(model, version))
            known.refresh.add_done_callback(lambda task: self._refreshed(key, task))
        return known.signature

    async def _first_read(self, key: tuple[str, str]) -> Signature:
        """Read once, however many ask and wait at the same time."""
        task = self._reading.get(key)
        if task is None:
            task = self._reading[key] = asyncio.create_task(self._read_signature(*key))
            task.add_done_callback(lambda task: self._first_known(key, task))
        with waited_at_once():
            return await asyncio.shield(task)

    def _first_known(self, key: tuple[str, str], task: asyncio.Task[Signature]) -> None:
        if self._reading.get(key) is not task:
            return  # forgotten meanwhile: what it read may be old
        del self._reading[key]
        self._refreshed(key, task)

    def forget(self, model: str) -> None:
        """What was known of a model is doubtful: it was loaded, unloaded, or contradicts us."""
        for key in [key for key in self._known if key[0] == model]:
            known = self._known.pop(key)
            if known.refresh is not None:
                known.refresh.cancel()
        for key in [key for key in self._reading if key[0] == model]:
            self._reading.pop(key)

    def _refreshed(self, key: tuple[str, str], task: asyncio.Task[Signature]) -> None:
        if task.cancelled():
            return
        if task.exception() is not None:
            self._known.pop(key, None)
        else:
            self._known[key] = Known(task.result(), asyncio.get_running_loop().time())

    async def _read_again(self, model: str, version: str) -> Signature:
        current.set(None)  # for no request: the one that found it old is not waiting
        return await self._read_signature(model, version)

    async def _read_signature(self, model: str, version: str) -> Signature:
        asked, path = Asked(model, version, METADATA_TIMEOUT_S), model_path(model, version)
        metadata, config = await asyncio.gather(
            self._pool.ask(asked, b"GET", path), self._pool.ask(asked, b"GET", f"{path}/config")
        )
        try:
            return signature(metadata, config, version)
        except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as exc:
            raise BadUpstream(f"the replica's metadata of model '{model}' cannot be read") from exc

    async def infer(self, model: Signature, inputs: Inputs, call: Call) -> Result:
        """The model's answer; a batch larger than it takes is cut, sent side by side, and joined."""
        pieces = list(inputs.cut(model.max_batch_size))
        if len(pieces) == 1:
            return await self._infer_piece(model, pieces[0], call)
        if call.step is not None:  # its pieces would have no order
            raise DoesNotFit(f"a step of a sequence has at most {model.max_batch_size} items")
        turns = asyncio.Semaphore(PIECES_AT_A_TIME)
        tasks = [
            asyncio.create_task(self._infer_part(model, piece, call, turns)) for piece in pieces
        ]
        with waited_at_once():
            try:
                return joined(await asyncio.gather(*tasks))
            finally:
                for task in tasks:
                    task.cancel()

    async def _infer_part(
        self, model: Signature, piece: Inputs, call: Call, turns: asyncio.Semaphore
    ) -> Result:
        """A piece of a batch; what the model says of «item 2» is counted within the piece."""
        try:
            async with turns:
                return await self._infer_piece(model, piece, call)
        except (RefusedByModel, DoesNotFit) as exc:
            first, last = piece.offset + 1, piece.offset + piece.batch_size
            exc.detail = f"in the part of the batch with items {first} to {last}: {exc.detail}"
            raise

    async def _infer_piece(self, model: Signature, inputs: Inputs, call: Call) -> Result:
        way = called if self._stops(model) else posted
        try:
            answer = await way(self._pool, call.asks(model, inputs.arrays), call)
        except CONTRADICTIONS:
            self.forget(model.model)
            raise
        return Result(
            model,
            answer.outputs,
            inputs.batched,
            call.request_id,
            answer.version,
            classified=bool(call.parameters.get("classification")),
            rows=inputs.rows,
            size_bytes=answer.size_bytes,
        )

    async def stream(
        self, model: Signature, inputs: Inputs, call: Call, timeout_s: float
    ) -> AsyncGenerator[Result, None]:
        """The model's answers as they come: the first is there when this returns, and each of the others
        may take `timeout_s`. Closing what this returns cancels the inference.

        Raises `DoesNotFit` for a batch larger than the model takes: its pieces would be told apart by
        nobody.
        """
        if len(list(inputs.cut(model.max_batch_size))) > 1:
            raise DoesNotFit(f"the model streams at most {model.max_batch_size} items at a time")
        arguments = await prepare(call.asks(model, inputs.arrays))
        asked = Asked(model.model, model.version, timeout_s, sequence=call.step)

        async def start(replica: Replica, trace: Headers) -> tuple[Stream, Answer | None]:
            begun = Stream(replica.channel, asked, arguments, trace)
            try:
                return begun, await begun.next(call.left_s)
            except BaseException:
                begun.close()
                raise

        try:
            begun, first = await self._pool.begin(asked, call.headers, start)
        except CONTRADICTIONS:
            self.forget(model.model)
            raise

        def result_of(answer: Answer) -> Result:
            classified = bool(call.parameters.get("classification"))
            return Result(
                *(model, answer.outputs, inputs.batched, call.request_id, answer.version),
                classified=classified,
                size_bytes=answer.size_bytes,
            )

        return results(begun, first, timeout_s, result_of)

    def _stops(self, model: Signature) -> bool:
        return model.cancellable or any(
            fnmatchcase(model.model, glob) for glob in self._cancellable
        )


async def results(
    stream: Stream,
    answer: Answer | None,
    timeout_s: float,
    result_of: Callable[[Answer], Result],
) -> AsyncGenerator[Result, None]:
    """From this answer on."""
    try:
        while answer is not None:
            yield result_of(answer)
            answer = await stream.next(timeout_s)
    finally:
        stream.close()


@contextmanager
def waited_at_once() -> Iterator[None]:
    """What runs side by side was waited for once, and not as often as there are pieces."""
    notes, began = current.get(), perf_counter()
    before_s = notes.upstream_s if notes is not None else 0.0
    try:
        yield
    finally:
        if notes is not None:
            notes.upstream_s = before_s + perf_counter() - began


def output_names(model: Signature, wanted: Sequence[str]) -> tuple[str, ...]:
    """The outputs to ask for; none are all. Raises `DoesNotFit` for one that the model does not have."""
    unknown = [name for name in wanted if name not in model.outputs]
    if unknown:
        raise DoesNotFit(
            f"the model has no output {quoted(unknown[0])}; its outputs are {listed(model.outputs)}"
        )
    return tuple(wanted)
