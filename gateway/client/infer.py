"""`triton-gateway infer`: every input asked, every outcome written, and what is said about it."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import uvloop

from gateway.client.api import Api
from gateway.client.asking import Asker
from gateway.client.errors import ClientError, Misused
from gateway.client.inputs import Input, Inputs
from gateway.client.order import InOrder
from gateway.client.pipes import write_all
from gateway.client.progress import Progress
from gateway.client.records import Format, Record, Writer, resumed, writer
from gateway.client.target import Target
from gateway.client.wire import Wire
from gateway.words import say

MOST_LISTED: Final = 10
STDOUT: Final = 1
BROKEN_PIPE: Final = 128 + signal.SIGPIPE


@dataclass(frozen=True)
class Order:
    """What the command line asks for."""

    target: Target
    model: str
    version: str
    inputs: Inputs
    concurrency: int = 16
    batch: int = 1
    retries: int = 10
    timeout_s: float = 60.0
    output: Path | None = None
    format: Format = Format.jsonl
    resume: bool = False
    overwrite: bool = False


@dataclass
class Tally:
    """How far it is."""

    total: int | None
    skipped: int = 0
    answered: int = 0
    failed: int = 0
    failures: list[Record] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    @property
    def written(self) -> int:
        return self.answered + self.failed

    @property
    def remaining(self) -> int | None:
        return None if self.total is None else self.total - self.skipped - self.written

    def note(self, record: Record) -> None:
        if record.outputs is not None:
            self.answered += 1
            return
        self.failed += 1
        if len(self.failures) < MOST_LISTED:
            self.failures.append(record)

    def summary(self) -> str:
        took_s = max(time.monotonic() - self.began, 1e-9)
        parts = [f"{self.answered} answered", f"{self.failed} failed"]
        if self.skipped:
            parts.append(f"{self.skipped} were there already")
        return f"{', '.join(parts)}, in {took_s:.1f} s ({self.written / took_s:.0f}/s)"


def infer(order: Order) -> int:
    """The exit status. Raises `ClientError`."""
    with Api(order.target) as api:
        described = api.model(order.model, order.version)
    check(order, described)
    names = [output["name"] for output in described["outputs"]]
    to_terminal = order.output is None and os.isatty(STDOUT)
    form = writer(order.format, names, to_terminal=to_terminal)
    streams = described["decoupled"]
    done: Counter[str] = Counter()
    if order.resume and order.output is not None and order.output.exists():
        done = resumed(order.output, form)
    descriptor = opened(order)
    gc.freeze()  # what was imported stays; looking through it again and again costs 5 % of a run
    try:
        return uvloop.run(Run(order, form, done, descriptor, streams).run())
    finally:
        if descriptor != STDOUT:
            os.close(descriptor)


def check(order: Order, described: dict[str, Any]) -> None:
    """Raises `Misused` for what this model cannot do."""
    if order.batch == 1:
        return
    required = [tensor for tensor in described["inputs"] if not tensor.get("optional")]
    if described["decoupled"]:
        raise Misused(f"--batch: {order.model} answers any number of times")
    if described["max_batch_size"] == 0:
        raise Misused(f"--batch: {order.model} has no batch dimension")
    single = len(required) == 1 and (
        (required[0]["datatype"] == "BYTES" and required[0]["shape"] == [1])
        or "image" in required[0]
    )
    if not single:
        raise Misused(f"--batch: an input of {order.model} is not one text or one image")


def opened(order: Order) -> int:
    """A descriptor of where the records go."""
    if order.output is None:
        return STDOUT
    kept = os.O_APPEND if order.resume else os.O_TRUNC if order.overwrite else os.O_EXCL
    if order.output.exists() and not order.output.is_file():
        kept = 0  # a pipe, say
    try:
        return os.open(order.output, os.O_WRONLY | os.O_CREAT | kept, 0o666)
    except FileExistsError:
        raise Misused(
            f"{order.output} exists: --resume goes on with it, --overwrite begins anew"
        ) from None
    except OSError as exc:
        raise ClientError(f"{order.output} cannot be written: {exc.strerror}") from None


class Run:
    """One run of the command, inside the loop."""

    def __init__(
        self, order: Order, form: Writer, done: Counter[str], descriptor: int, streams: bool
    ) -> None:
        self._order = order
        self._form = form
        self._done = done
        self._descriptor = descriptor
        self._streams = streams
        self._tally = Tally(order.inputs.total)
        self._signal = 0

    async def run(self) -> int:
        order, tally = self._order, self._tally
        wire = Wire(
            order.target,
            order.model,
            order.version,
            timeout_s=order.timeout_s,
            retries=order.retries,
            streams=self._streams,
        )
        work: InOrder[list[Input], list[Record]] = InOrder(
            Asker(wire), self._write, order.concurrency
        )
        self._listen(work)
        try:
            async with Progress(lambda: (tally.skipped + tally.written, tally.failed), tally.total):
                await self._begin()
                await work.run(self._groups())
        except BrokenPipeError:
            return BROKEN_PIPE
        except ClientError as exc:
            raise type(exc)(f"{exc}; {self._left()}") from exc
        except OSError as exc:
            raise ClientError(f"the results cannot be written: {exc.strerror}") from exc
        finally:
            wire.close()
        return self._verdict(wire.retried)

    def _listen(self, work: InOrder[list[Input], list[Record]]) -> None:
        def stop(number: int) -> None:
            self._signal = number
            work.stop()

        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop, number)

    async def _begin(self) -> None:
        if self._descriptor == STDOUT or os.fstat(self._descriptor).st_size == 0:
            await write_all(self._descriptor, self._form.header)

    async def _groups(self) -> AsyncIterator[list[Input]]:
        group: list[Input] = []
        async for given in self._order.inputs:
            if self._done[given.name]:
                self._done[given.name] -= 1
                self._tally.skipped += 1
                continue
            group.append(given)
            if len(group) == self._order.batch:
                yield group
                group = []
        if group:
            yield group

    async def _write(self, groups: list[list[Record]]) -> None:
        records = [record for group in groups for record in group]
        await write_all(self._descriptor, b"".join(map(self._form.line, records)))
        for record in records:
            self._tally.note(record)

    def _verdict(self, retried: int) -> int:
        tally = self._tally
        again = f"; asked again {retried} times" if retried else ""
        say(tally.summary() + again)
        for record in tally.failures:
            say(f"  {record.name}: {record.error}")
        if tally.failed > len(tally.failures):
            say(f"  and {tally.failed - len(tally.failures)} more")
        if self._signal:
            say(f"interrupted: {self._left()}")
            return 128 + self._signal
        return 1 if tally.failed else 0

    def _left(self) -> str:
        remaining = self._tally.remaining
        left = "the rest was not asked" if remaining is None else f"{remaining} remain"
        if self._order.output is None:
            return f"{left} (with --output FILE, --resume can go on)"
        return f"{left}; the same command with --resume goes on"
