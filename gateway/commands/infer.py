"""`triton-gateway infer`: batch inference with ordered records, resume and a summary."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Final, cast

import orjson
import uvloop

from gateway.client import GatewayError, ModelInfo, TensorInfo
from gateway.client.ordered import OrderedTasks
from gateway.commands.api import connect, make_command_error
from gateway.commands.errors import ClientError, UsageError
from gateway.commands.flags import InferFlags
from gateway.commands.inputs import Input, InputSource
from gateway.commands.pipes import write_descriptor
from gateway.commands.records import (
    CsvWriter,
    JsonLinesWriter,
    OutputFormat,
    Record,
    RecordWriter,
    TextWriter,
    resume_output,
)
from gateway.commands.requests import GroupInference, read_input
from gateway.commands.target import Target
from gateway.media_types import TEXT
from gateway.messages import escape_unprintable, print_message

MAX_LISTED_FAILURES: Final = 10
STDOUT_DESCRIPTOR: Final = 1
BROKEN_PIPE_STATUS: Final = 128 + signal.SIGPIPE


@dataclass(frozen=True)
class InferOptions:
    """The options of the command line."""

    target: Target
    model: str
    version: str
    inputs: InputSource
    flags: InferFlags
    format: OutputFormat
    words: Sequence[str] = ()  # texts without --text


@dataclass
class InferStats:
    """The progress of a run, and its first failures."""

    total: int | None
    skipped: int = 0
    succeeded: int = 0
    failed: int = 0
    failures: list[Record] = field(default_factory=list)
    started_at: float = field(default_factory=time.monotonic)

    @property
    def done(self) -> int:
        return self.skipped + self.succeeded + self.failed

    def add_record(self, record: Record) -> None:
        if record.outputs is not None:
            self.succeeded += 1
            return
        self.failed += 1
        if len(self.failures) < MAX_LISTED_FAILURES:
            self.failures.append(record)

    def summary(self) -> str:
        elapsed_s = max(time.monotonic() - self.started_at, 1e-9)
        parts = [f"{self.succeeded} succeeded", f"{self.failed} failed"]
        if self.skipped:
            parts.append(f"{self.skipped} skipped")
        rate = (self.succeeded + self.failed) / elapsed_s
        return f"{', '.join(parts)}, in {elapsed_s:.1f} s ({rate:.0f}/s)"


def run_infer(options: InferOptions) -> int:
    with connect(options.target) as client:
        model = client.model(options.model, options.version)
    if options.words and not takes_one_text(model):
        raise UsageError(
            f"no such file or folder: {options.words[0]}; the input of {options.model} is not a single text"
        )
    if options.flags.is_async:
        return asyncio.run(submit_inputs(options))
    check_batching(options, model)
    names = [output.name for output in model.outputs]
    output = options.flags.output
    writer: RecordWriter = JsonLinesWriter()
    if options.format is OutputFormat.csv:
        to_terminal = output is None and os.isatty(STDOUT_DESCRIPTOR)
        writer = CsvWriter(names, to_terminal=to_terminal)
    elif options.format is OutputFormat.text:
        writer = TextWriter()
    done_counts: Counter[str] = Counter()
    if options.flags.resume and output is not None and output.exists():
        done_counts = resume_output(output, writer)
    descriptor = open_output(options.flags)
    gc.freeze()  # the imported modules stay; collecting over them costs 5 % of a run
    try:
        run = InferRun(
            options,
            writer,
            done_counts,
            descriptor=descriptor,
            is_decoupled=model.is_decoupled,
        )
        return uvloop.run(run.run())
    finally:
        if descriptor != STDOUT_DESCRIPTOR:
            os.close(descriptor)


async def submit_inputs(options: InferOptions) -> int:
    """Submit each input as a job, and print its ID. Raises `ClientError` if a job is not accepted."""
    status = 0
    async with options.target.create_async_client(
        options.flags.timeout, options.flags.retries
    ) as client:
        async for input_ in options.inputs:
            value = await read_input(input_)
            if isinstance(value, GatewayError):
                print_message(f"{input_.name}: {value}")
                status = 1
                continue
            try:
                job = await client.submit(
                    options.model,
                    value,
                    version=options.version,
                    callback_url=options.flags.callback,
                )
            except GatewayError as exc:
                raise make_command_error(exc) from None
            line = (
                orjson.dumps(job).decode() if options.flags.json else f"{job['id']} {input_.name}"
            )
            sys.stdout.write(f"{escape_unprintable(line)}\n")
            sys.stdout.flush()
    return status


def list_required_inputs(model: ModelInfo) -> list[TensorInfo]:
    return [tensor for tensor in model.inputs if not tensor.is_optional]


def takes_one_text(model: ModelInfo) -> bool:
    required = list_required_inputs(model)
    is_single = [(tensor.datatype, tensor.shape) for tensor in required] == [("BYTES", (1,))]
    return is_single and required[0].content_type in ("", TEXT)


def check_batching(options: InferOptions, model: ModelInfo) -> None:
    if options.flags.batch == 1:
        return
    required = list_required_inputs(model)
    if model.is_decoupled:
        raise UsageError(
            f"--batch: {options.model} is decoupled: it returns any number of responses"
        )
    if model.max_batch_size == 0:
        raise UsageError(f"--batch: {options.model} has no batch dimension")
    is_possible = len(required) == 1 and (
        (required[0].datatype, required[0].shape) == ("BYTES", (1,))
        or "image" in required[0].document
    )
    if not is_possible:
        raise UsageError(f"--batch: the input of {options.model} is not a single text or image")


def open_output(flags: InferFlags) -> int:
    """Return the descriptor for the records. Raises `UsageError` if the file exists."""
    if flags.output is None:
        return STDOUT_DESCRIPTOR
    mode_flag = os.O_APPEND if flags.resume else os.O_TRUNC if flags.overwrite else os.O_EXCL
    if flags.output.exists() and not flags.output.is_file():
        mode_flag = 0  # such as a pipe
    try:
        return os.open(flags.output, os.O_WRONLY | os.O_CREAT | mode_flag, 0o666)
    except FileExistsError:
        raise UsageError(
            f"{flags.output} exists: --resume continues it, --overwrite replaces it"
        ) from None
    except OSError as exc:
        raise ClientError(f"{flags.output} cannot be written: {exc.strerror}") from None


class InferRun:
    """A run of the command, inside an event loop."""

    def __init__(
        self,
        options: InferOptions,
        writer: RecordWriter,
        done_counts: Counter[str],
        *,
        descriptor: int,
        is_decoupled: bool,
    ) -> None:
        self.options = options
        self.writer = writer
        self.done_counts = done_counts
        self.descriptor = descriptor
        self.is_decoupled = is_decoupled
        self.received_signal = 0
        self.show_counts: Callable[[int, int], None] | None = None
        self.stats = InferStats(options.inputs.total)

    async def run(self) -> int:
        options = self.options
        client = options.target.create_async_client(options.flags.timeout, options.flags.retries)
        inference = GroupInference(
            client, options.model, options.version, is_decoupled=self.is_decoupled
        )
        groups = OrderedTasks(inference.infer, self._group_inputs(), options.flags.concurrency)
        self._install_signal_handlers(groups)
        try:
            async with AsyncExitStack() as stack:
                await stack.enter_async_context(client)
                stack.push_async_callback(groups.aclose)
                if sys.stderr.isatty():
                    from gateway.commands.progress import show_counts

                    self.show_counts = stack.enter_context(show_counts(self.stats.total))
                if self.descriptor == STDOUT_DESCRIPTOR or not os.fstat(self.descriptor).st_size:
                    await write_descriptor(self.descriptor, self.writer.header)
                async for records in groups:
                    await self._write(records)
        except BrokenPipeError:
            return BROKEN_PIPE_STATUS
        except asyncio.CancelledError:
            # The third signal cancels the run.
            if not self.received_signal:
                raise
        except ClientError as exc:
            raise type(exc)(f"{exc}; {self._describe_remaining()}") from exc
        except OSError as exc:
            raise ClientError(f"the results cannot be written: {exc.strerror}") from exc
        return self._report_outcome(client.retry_count)

    def _install_signal_handlers(self, groups: OrderedTasks[list[Input], list[Record]]) -> None:
        """Stop at the first signal, cancel the requests at the second, and the writer at the third."""
        steps = iter((groups.stop, groups.cancel))
        run = cast("asyncio.Task[int]", asyncio.current_task())

        def stop(number: int) -> None:
            self.received_signal = number
            next(steps, run.cancel)()

        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop, number)

    async def _group_inputs(self) -> AsyncIterator[list[Input]]:
        group: list[Input] = []
        async for input_ in self.options.inputs:
            if self.done_counts[input_.name]:
                self.done_counts[input_.name] -= 1
                self.stats.skipped += 1
                continue
            group.append(input_)
            if len(group) == self.options.flags.batch:
                yield group
                group = []
        if group:
            yield group

    async def _write(self, records: list[Record]) -> None:
        await write_descriptor(self.descriptor, b"".join(map(self.writer.encode_record, records)))
        for record in records:
            self.stats.add_record(record)
        if self.show_counts is not None:
            self.show_counts(self.stats.done, self.stats.failed)

    def _report_outcome(self, retry_count: int) -> int:
        stats = self.stats
        retries = f"; {retry_count} retries" if retry_count else ""
        print_message(stats.summary() + retries)
        for record in stats.failures:
            print_message(f"  {record.name}: {record.error}")
        if stats.failed > len(stats.failures):
            print_message(f"  and {stats.failed - len(stats.failures)} more")
        if self.received_signal:
            print_message(f"interrupted: {self._describe_remaining()}")
            return 128 + self.received_signal
        return 1 if stats.failed else 0

    def _describe_remaining(self) -> str:
        message = "the remaining inputs were not sent"
        if self.stats.total is not None:
            message = f"{self.stats.total - self.stats.done} inputs remain"
        if self.options.flags.output is None:
            return f"{message} (only a run with --output FILE can be resumed)"
        return f"{message}; run the same command with --resume to continue"
