"""`triton-gateway infer`: batch inference with ordered records, resume and a summary; also as a job."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, Final, cast

import uvloop

from gateway.client import AsyncClient, GatewayError, InferOutcome, ModelInfo, TensorInfo
from gateway.client.jobs import build_job_path
from gateway.client.many import run_ordered
from gateway.commands.errors import ClientError, UsageError
from gateway.commands.flags import InferFlags
from gateway.commands.inference.inputs import Input, InputSource
from gateway.commands.inference.pipes import write_descriptor
from gateway.commands.inference.records import RECORD_ENCODERS, OutputFormat, Record, resume_output
from gateway.commands.inference.requests import GroupInference, make_record, read_input
from gateway.commands.target import Target, report_gateway_errors
from gateway.media_types import TEXT
from gateway.messages import escape_unprintable, print_message

JOB_TIMEOUT_S: Final = 86400.0
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

    def add_records(self, records: Sequence[Record]) -> None:
        failures = [record for record in records if record.outputs is None]
        self.succeeded += len(records) - len(failures)
        self.failed += len(failures)
        self.failures += failures[: MAX_LISTED_FAILURES - len(self.failures)]

    def summary(self) -> str:
        elapsed_s = max(time.monotonic() - self.started_at, 1e-9)
        parts = [f"{self.succeeded} succeeded", f"{self.failed} failed"]
        if self.skipped:
            parts.append(f"{self.skipped} skipped")
        rate = (self.succeeded + self.failed) / elapsed_s
        return f"{', '.join(parts)}, in {elapsed_s:.1f} s ({rate:.0f}/s)"


def run_infer(options: InferOptions) -> int:
    job = options.flags.job
    total = options.inputs.total
    with options.target.connect() as client:
        model = client.model(options.model, options.version)
        if job:
            total = client.request("GET", build_job_path(job))["progress"]["total"]
    if options.words and not takes_one_text(model):
        raise UsageError(
            f"no such file or folder: {options.words[0]}; the input of {options.model} is not a single text"
        )
    check_batching(options, model)
    output = options.flags.output
    done_counts: Counter[str] = Counter()
    if options.flags.resume and output is not None and output.exists():
        done_counts = resume_output(output)
    descriptor = open_output(options.flags)
    run_type = JobRun if options.flags.is_async or job else InferRun
    gc.freeze()  # the imported modules stay; collecting over them costs 5 % of a run
    try:
        run = run_type(
            options, done_counts, total, descriptor=descriptor, is_decoupled=model.is_decoupled
        )
        return uvloop.run(run.run())
    finally:
        if descriptor != STDOUT_DESCRIPTOR:
            os.close(descriptor)


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
        done_counts: Counter[str],
        total: int | None,
        *,
        descriptor: int,
        is_decoupled: bool,
    ) -> None:
        self.options = options
        self.encode_record = RECORD_ENCODERS[options.format]
        self.done_counts = done_counts
        self.descriptor = descriptor
        self.is_decoupled = is_decoupled
        self.received_signal = 0
        self.show_counts: Callable[[int, int], None] | None = None
        self.stats = InferStats(total)

    async def run(self) -> int:
        options = self.options
        client = options.target.create_async_client(options.flags.timeout, options.flags.retries)
        groups = self.open_groups(client)
        self.handle_signals()
        try:
            async with AsyncExitStack() as stack:
                await stack.enter_async_context(client)
                stack.push_async_callback(groups.aclose)
                if sys.stderr.isatty():
                    from gateway.commands.progress import show_counts

                    self.show_counts = stack.enter_context(show_counts(self.stats.total))
                async for records in groups:
                    await self._write(records)
        except BrokenPipeError:
            return BROKEN_PIPE_STATUS
        except asyncio.CancelledError:
            if not self.received_signal:
                raise
        except ClientError as exc:
            raise type(exc)(f"{exc}; {self.describe_remaining()}") from exc
        except OSError as exc:
            raise ClientError(f"the results cannot be written: {exc.strerror}") from exc
        return self.report_outcome(client.retry_count)

    def open_groups(self, client: AsyncClient) -> AsyncGenerator[list[Record], None]:
        """Return the records of groups of inputs."""
        options = self.options
        inference = GroupInference(
            client, options.model, options.version, is_decoupled=self.is_decoupled
        )
        return run_ordered(inference.infer, self.group_inputs(), options.flags.concurrency)

    def handle_signals(self) -> None:
        """Cancel the run at SIGINT and SIGTERM. What is written by then is complete."""
        run = cast("asyncio.Task[int]", asyncio.current_task())

        def stop(number: int) -> None:
            self.received_signal = number
            run.cancel()

        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop, number)

    async def group_inputs(self) -> AsyncIterator[list[Input]]:
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
        await write_descriptor(self.descriptor, b"".join(map(self.encode_record, records)))
        self.stats.add_records(records)
        if self.show_counts is not None:
            self.show_counts(self.stats.done, self.stats.failed)

    def report_outcome(self, retry_count: int) -> int:
        stats = self.stats
        retries = f"; {retry_count} retries" if retry_count else ""
        print_message(stats.summary() + retries)
        for record in stats.failures:
            print_message(f"  {record.name}: {record.error}")
        if stats.failed > len(stats.failures):
            print_message(f"  and {stats.failed - len(stats.failures)} more")
        if self.received_signal:
            print_message(f"interrupted: {self.describe_remaining()}")
            return 128 + self.received_signal
        return 1 if stats.failed else 0

    def describe_remaining(self) -> str:
        message = "the remaining inputs were not sent"
        if self.stats.total is not None:
            message = f"{self.stats.total - self.stats.done} inputs remain"
        if self.options.flags.output is None:
            return f"{message} (only a run with --output FILE can be resumed)"
        return f"{message}; run the same command with --resume to continue"


class JobRun(InferRun):
    """A run that submits its inputs as one job, or continues with a job, and writes its result.

    One input is a request, which may be larger than a row; several are a batch.
    """

    job = ""

    def open_groups(self, client: AsyncClient) -> AsyncGenerator[list[Record], None]:
        """Return the records of the job, which goes on when a signal ends the run."""
        if self.options.flags.job:
            return self._continue_job(client)
        is_request = self.options.inputs.total == 1
        return self._run_request(client) if is_request else self._run_batch(client)

    async def _continue_job(self, client: AsyncClient) -> AsyncGenerator[list[Record], None]:
        job = self.options.flags.job
        with report_gateway_errors():
            kind = (await client.request("GET", build_job_path(job)))["kind"]
            self._show_job(job)
            if kind == "request":
                yield [make_record(job, await self._read_result(client))]
                return
            async for records in self._read_rows(client):
                yield records

    async def _run_request(self, client: AsyncClient) -> AsyncGenerator[list[Record], None]:
        options = self.options
        async for (input_,) in self.group_inputs():
            value = await read_input(input_)
            outcome: InferOutcome = value
            if not isinstance(value, GatewayError):
                with report_gateway_errors():
                    job = await client.submit(
                        options.model,
                        value,
                        version=options.version,
                        callback_url=options.flags.callback,
                    )
                self._show_job(job.id)
                if options.flags.no_wait:
                    return
                outcome = await self._read_result(client)
            yield [make_record(input_.name, outcome)]

    async def _run_batch(self, client: AsyncClient) -> AsyncGenerator[list[Record], None]:
        flags = self.options.flags
        unreadable: list[Record] = []
        with report_gateway_errors():
            rows = self._list_rows(unreadable)
            job = await client.submit_batch(self.options.model, rows, callback_url=flags.callback)
            self._show_job(job.id)
            if flags.no_wait:
                self.stats.add_records(unreadable)
                return
            yield unreadable
            async for records in self._read_rows(client):
                yield records

    async def _read_rows(self, client: AsyncClient) -> AsyncGenerator[list[Record], None]:
        async for name, outcome in client.batch_results(self.job):
            if self.done_counts[name]:
                self.done_counts[name] -= 1
                self.stats.skipped += 1
            else:
                yield [make_record(name, outcome)]

    async def _read_result(self, client: AsyncClient) -> InferOutcome:
        try:
            return await client.job_result(self.job, JOB_TIMEOUT_S)
        except GatewayError as exc:
            return exc

    async def _list_rows(self, unreadable: list[Record]) -> AsyncIterator[tuple[str, Any]]:
        async for (input_,) in self.group_inputs():
            value = await read_input(input_)
            if isinstance(value, GatewayError):
                unreadable.append(make_record(input_.name, value))
            else:
                yield input_.name, value

    def _show_job(self, job: str) -> None:
        self.job = job
        if self.options.flags.no_wait:
            sys.stdout.write(f"{escape_unprintable(job)}\n")
        else:
            print_message(f"job {job}")

    def report_outcome(self, retry_count: int) -> int:
        if self.options.flags.no_wait and self.job and not self.stats.failed:
            return 0
        return super().report_outcome(retry_count)

    def describe_remaining(self) -> str:
        if not self.job:
            return "no job was submitted"
        file = self.options.flags.output
        resume = "" if file is None else f" --output {file} --resume"
        state = f"job {self.job} goes on; " if self.received_signal else ""
        return (
            f"{state}triton-gateway infer {self.options.model} --job {self.job}{resume} writes its result, "
            f"triton-gateway jobs cancel {self.job} cancels or deletes it"
        )
