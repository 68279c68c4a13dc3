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

from gateway.client.api import ApiClient
from gateway.client.errors import ClientError, UsageError
from gateway.client.infer_client import InferClient
from gateway.client.inputs import Input, InputSource
from gateway.client.ordered import OrderedExecutor
from gateway.client.pipes import write_descriptor
from gateway.client.progress import ProgressBar
from gateway.client.records import (
    OutputFormat,
    Record,
    RecordWriter,
    create_record_writer,
    resume_output,
)
from gateway.client.requests import BatchRequester
from gateway.client.target import Target
from gateway.messages import print_message

MAX_LISTED_FAILURES: Final = 10
STDOUT_DESCRIPTOR: Final = 1
BROKEN_PIPE_STATUS: Final = 128 + signal.SIGPIPE


@dataclass(frozen=True)
class InferOptions:
    """What the command line asks for."""

    target: Target
    model: str
    version: str
    inputs: InputSource
    concurrency: int = 16
    batch_size: int = 1
    retries: int = 10
    timeout_s: float = 60.0
    output_path: Path | None = None
    format: OutputFormat = OutputFormat.jsonl
    resume: bool = False
    overwrite: bool = False


@dataclass
class InferStats:
    """How far it is."""

    total: int | None
    skipped: int = 0
    succeeded: int = 0
    failed: int = 0
    failures: list[Record] = field(default_factory=list)
    started_at: float = field(default_factory=time.monotonic)

    @property
    def written_count(self) -> int:
        return self.succeeded + self.failed

    @property
    def remaining_count(self) -> int | None:
        return None if self.total is None else self.total - self.skipped - self.written_count

    def add_record(self, record: Record) -> None:
        if record.outputs is not None:
            self.succeeded += 1
            return
        self.failed += 1
        if len(self.failures) < MAX_LISTED_FAILURES:
            self.failures.append(record)

    def summary(self) -> str:
        took_s = max(time.monotonic() - self.started_at, 1e-9)
        parts = [f"{self.succeeded} answered", f"{self.failed} failed"]
        if self.skipped:
            parts.append(f"{self.skipped} were there already")
        return f"{', '.join(parts)}, in {took_s:.1f} s ({self.written_count / took_s:.0f}/s)"


def run_infer(options: InferOptions) -> int:
    """The exit status. Raises `ClientError`."""
    with ApiClient(options.target) as api:
        described = api.get_model(options.model, options.version)
    check_batching(options, described)
    names = [output["name"] for output in described["outputs"]]
    to_terminal = options.output_path is None and os.isatty(STDOUT_DESCRIPTOR)
    form = create_record_writer(options.format, names, to_terminal=to_terminal)
    streams = described["decoupled"]
    done: Counter[str] = Counter()
    if options.resume and options.output_path is not None and options.output_path.exists():
        done = resume_output(options.output_path, form)
    descriptor = open_output(options)
    gc.freeze()  # what was imported stays; looking through it again and again costs 5 % of a run
    try:
        return uvloop.run(InferRun(options, form, done, descriptor, streams).run())
    finally:
        if descriptor != STDOUT_DESCRIPTOR:
            os.close(descriptor)


def check_batching(options: InferOptions, model: dict[str, Any]) -> None:
    """Raises `Misused` for what this model cannot do."""
    if options.batch_size == 1:
        return
    required = [tensor for tensor in model["inputs"] if not tensor.get("optional")]
    if model["decoupled"]:
        raise UsageError(f"--batch: {options.model} answers any number of times")
    if model["max_batch_size"] == 0:
        raise UsageError(f"--batch: {options.model} has no batch dimension")
    single = len(required) == 1 and (
        (required[0]["datatype"] == "BYTES" and required[0]["shape"] == [1])
        or "image" in required[0]
    )
    if not single:
        raise UsageError(f"--batch: an input of {options.model} is not one text or one image")


def open_output(options: InferOptions) -> int:
    """A descriptor of where the records go."""
    if options.output_path is None:
        return STDOUT_DESCRIPTOR
    kept = os.O_APPEND if options.resume else os.O_TRUNC if options.overwrite else os.O_EXCL
    if options.output_path.exists() and not options.output_path.is_file():
        kept = 0  # a pipe, say
    try:
        return os.open(options.output_path, os.O_WRONLY | os.O_CREAT | kept, 0o666)
    except FileExistsError:
        raise UsageError(
            f"{options.output_path} exists: --resume goes on with it, --overwrite begins anew"
        ) from None
    except OSError as exc:
        raise ClientError(f"{options.output_path} cannot be written: {exc.strerror}") from None


class InferRun:
    """One run of the command, inside the loop."""

    def __init__(
        self,
        options: InferOptions,
        writer: RecordWriter,
        done_counts: Counter[str],
        descriptor: int,
        is_decoupled: bool,
    ) -> None:
        self._options = options
        self._writer = writer
        self._done_counts = done_counts
        self._descriptor = descriptor
        self._is_decoupled = is_decoupled
        self._stats = InferStats(options.inputs.total)
        self._received_signal = 0

    async def run(self) -> int:
        order, tally = self._options, self._stats
        wire = InferClient(
            order.target,
            order.model,
            order.version,
            timeout_s=order.timeout_s,
            retries=order.retries,
            is_decoupled=self._is_decoupled,
        )
        work: OrderedExecutor[list[Input], list[Record]] = OrderedExecutor(
            BatchRequester(wire), self._write_groups, order.concurrency
        )
        self._install_signal_handlers(work)
        try:
            async with ProgressBar(
                lambda: (tally.skipped + tally.written_count, tally.failed), tally.total
            ):
                await self._write_header()
                await work.run(self._group_inputs())
        except BrokenPipeError:
            return BROKEN_PIPE_STATUS
        except ClientError as exc:
            raise type(exc)(f"{exc}; {self._describe_remaining()}") from exc
        except OSError as exc:
            raise ClientError(f"the results cannot be written: {exc.strerror}") from exc
        finally:
            wire.close()
        return self._report_outcome(wire.retry_count)

    def _install_signal_handlers(
        self, executor: OrderedExecutor[list[Input], list[Record]]
    ) -> None:
        def stop(number: int) -> None:
            self._received_signal = number
            executor.stop()

        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop, number)

    async def _write_header(self) -> None:
        if self._descriptor == STDOUT_DESCRIPTOR or os.fstat(self._descriptor).st_size == 0:
            await write_descriptor(self._descriptor, self._writer.header)

    async def _group_inputs(self) -> AsyncIterator[list[Input]]:
        group: list[Input] = []
        async for given in self._options.inputs:
            if self._done_counts[given.name]:
                self._done_counts[given.name] -= 1
                self._stats.skipped += 1
                continue
            group.append(given)
            if len(group) == self._options.batch_size:
                yield group
                group = []
        if group:
            yield group

    async def _write_groups(self, groups: list[list[Record]]) -> None:
        records = [record for group in groups for record in group]
        await write_descriptor(self._descriptor, b"".join(map(self._writer.encode_record, records)))
        for record in records:
            self._stats.add_record(record)

    def _report_outcome(self, retry_count: int) -> int:
        tally = self._stats
        again = f"; asked again {retry_count} times" if retry_count else ""
        print_message(tally.summary() + again)
        for record in tally.failures:
            print_message(f"  {record.name}: {record.error}")
        if tally.failed > len(tally.failures):
            print_message(f"  and {tally.failed - len(tally.failures)} more")
        if self._received_signal:
            print_message(f"interrupted: {self._describe_remaining()}")
            return 128 + self._received_signal
        return 1 if tally.failed else 0

    def _describe_remaining(self) -> str:
        remaining = self._stats.remaining_count
        left = "the rest was not asked" if remaining is None else f"{remaining} remain"
        if self._options.output_path is None:
            return f"{left} (with --output FILE, --resume can go on)"
        return f"{left}; the same command with --resume goes on"
