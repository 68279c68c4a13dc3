"""`triton-gateway infer`: a record for each input, in order; with resume and a summary; also as a job."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import Counter, deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from gateway.client import Client, GatewayError, ModelInfo
from gateway.client.errors import UNREACHABLE
from gateway.client.jobs import build_job_path
from gateway.client.many import InferOutcome, read_item
from gateway.commands.errors import ClientError, UsageError
from gateway.commands.flags import InferFlags, OutputFormat
from gateway.commands.inputs import InputSource
from gateway.commands.progress import show_counts
from gateway.commands.records import RECORD_ENCODERS, Record, make_record, resume_output
from gateway.commands.target import Target
from gateway.media_types import TEXT
from gateway.messages import escape_unprintable, print_message

Named: TypeAlias = "tuple[str, InferOutcome]"  # by its input
JOB_TIMEOUT_S: Final = 86400.0
MAX_LISTED_FAILURES: Final = 10
STDOUT_DESCRIPTOR: Final = 1
BROKEN_PIPE_STATUS: Final = 128 + signal.SIGPIPE
INTERRUPT_STATUS: Final = 128 + signal.SIGINT


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


def run_infer(options: InferOptions) -> int:
    """Write the records, and return the exit status."""
    flags = options.flags
    total = options.inputs.total
    with options.target.connect() as client:
        model = client.model(options.model, options.version)
        if flags.job:
            total = client.request("GET", build_job_path(flags.job))["progress"]["total"]
    check_inputs(options, model)
    done_counts: Counter[str] = Counter()
    if flags.resume and flags.output is not None and flags.output.exists():
        done_counts = resume_output(flags.output)
    descriptor = open_output(flags)
    try:
        with options.target.connect(flags.timeout, flags.retries) as client:
            run = InferRun(options, client, done_counts, is_decoupled=model.is_decoupled)
            return run.write_records(descriptor, total)
    finally:
        if descriptor != STDOUT_DESCRIPTOR:
            os.close(descriptor)


def check_inputs(options: InferOptions, model: ModelInfo) -> None:
    """Check the inputs against the model. Raises `UsageError`."""
    required = [tensor for tensor in model.inputs if not tensor.is_optional]
    takes_one_text = [(each.datatype, each.shape) for each in required] == [("BYTES", (1,))]
    if options.words and not (takes_one_text and required[0].content_type in ("", TEXT)):
        raise UsageError(
            f"no such file or folder: {options.words[0]}; the input of {options.model} is not a single text"
        )
    if options.flags.batch > 1 and model.is_decoupled:
        raise UsageError(
            f"--batch: {options.model} is decoupled: it returns any number of responses"
        )
    if options.flags.batch > 1 and model.max_batch_size == 0:
        raise UsageError(f"--batch: {options.model} has no batch dimension")


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
    """A run of the command: its inferences, and the counts of its records."""

    def __init__(
        self,
        options: InferOptions,
        client: Client,
        done_counts: Counter[str],  # inputs of an earlier run
        *,
        is_decoupled: bool,
    ) -> None:
        self._options = options
        self._client = client
        self._done_counts = done_counts
        self._is_decoupled = is_decoupled
        self._callback = options.flags.callback
        self._counts: Counter[str] = Counter()  # succeeded, failed, skipped
        self._failures: list[Record] = []
        self._job = ""
        self._started_at = time.monotonic()

    def write_records(self, descriptor: int, total: int | None) -> int:
        encode_record = RECORD_ENCODERS[self._options.format]
        try:
            with show_counts(total) as show, closing(self._list_outcomes()) as outcomes:
                for name, outcome in outcomes:
                    record = make_record(name, outcome)
                    if not self._options.flags.no_wait:
                        write_all(descriptor, encode_record(record))
                    self.count_record(record)
                    show(self._counts.total(), self._counts["failed"])
        except BrokenPipeError:
            return BROKEN_PIPE_STATUS
        except KeyboardInterrupt:
            return self._report_interrupt(total, INTERRUPT_STATUS)
        except SystemExit as exc:  # SIGTERM
            return self._report_interrupt(total, int(exc.code or 0))
        except OSError as exc:
            raise ClientError(f"the results cannot be written: {exc.strerror}") from exc
        except (GatewayError, ClientError) as exc:
            exc.args = (f"{exc}; {self._describe_rest(total)}",)
            raise
        if not (self._options.flags.no_wait and self._job and not self._failures):
            self._report()
        return 1 if self._failures else 0

    def _list_outcomes(self) -> Generator[Named, None, None]:
        flags = self._options.flags
        if flags.job:
            return self._continue_job(flags.job)
        if not flags.is_async:
            return self._infer()
        return self._run_request() if self._options.inputs.total == 1 else self._run_batch()

    def _read_inputs(self) -> Iterator[tuple[str, Any]]:
        return (each for each in self._options.inputs if not self._is_done(each[0]))

    def _is_done(self, name: str) -> bool:
        if not self._done_counts[name]:
            return False
        self._done_counts[name] -= 1
        self._counts["skipped"] += 1
        return True

    def _infer(self) -> Generator[Named, None, None]:
        options = self._options
        names: deque[str] = deque()

        def read_values() -> Iterator[Any]:
            for name, value in self._read_inputs():
                names.append(name)
                yield value

        outcomes = self._client.infer_many(
            options.model,
            read_values(),
            batch=options.flags.batch,
            concurrency=options.flags.concurrency,
            version=options.version,
            stream=self._is_decoupled,
        )
        with closing(outcomes):
            for outcome in outcomes:
                if isinstance(outcome, GatewayError) and outcome.code == UNREACHABLE:
                    raise outcome
                yield names.popleft(), outcome

    def _run_request(self) -> Generator[Named, None, None]:
        """Submit the only input as a job, which may be larger than a row of a batch."""
        model, version = self._options.model, self._options.version
        for name, value in self._read_inputs():
            job = self._client.submit(model, value, version=version, callback_url=self._callback)
            self._show_job(job.id)
            if not self._options.flags.no_wait:
                yield name, self._read_result()

    def _run_batch(self) -> Generator[Named, None, None]:
        unreadable: list[Named] = []

        def read_rows() -> Iterator[tuple[str, Any]]:
            for name, value in self._read_inputs():
                item = read_item(value)
                if isinstance(item, GatewayError):
                    unreadable.append((name, item))
                else:
                    yield name, item

        model = self._options.model
        job = self._client.submit_batch(model, read_rows(), callback_url=self._callback)
        self._show_job(job.id)
        yield from unreadable
        if not self._options.flags.no_wait:
            yield from self._client.batch_results(job)

    def _continue_job(self, job: str) -> Generator[Named, None, None]:
        self._show_job(job)
        if self._client.request("GET", build_job_path(job))["kind"] == "request":
            yield job, self._read_result()
            return
        outcomes = self._client.batch_results(job)
        yield from (each for each in outcomes if not self._is_done(each[0]))

    def _read_result(self) -> InferOutcome:
        try:
            return self._client.job_result(self._job, JOB_TIMEOUT_S)
        except GatewayError as exc:
            return exc

    def _show_job(self, job: str) -> None:
        self._job = job
        if self._options.flags.no_wait:
            sys.stdout.write(f"{escape_unprintable(job)}\n")
        else:
            print_message(f"job {job}")

    def count_record(self, record: Record) -> None:
        self._counts["failed" if "error" in record else "succeeded"] += 1
        if "error" in record and len(self._failures) < MAX_LISTED_FAILURES:
            self._failures.append(record)

    def _report(self) -> None:
        counts = self._counts
        elapsed_s = max(time.monotonic() - self._started_at, 1e-9)
        skipped = f", {counts['skipped']} skipped" if counts["skipped"] else ""
        rate = (counts["succeeded"] + counts["failed"]) / elapsed_s
        done = f"{counts['succeeded']} succeeded, {counts['failed']} failed{skipped}"
        print_message(f"{done}, in {elapsed_s:.1f} s ({rate:.0f}/s)")
        for record in self._failures:
            print_message(f"  {record['input']}: {record['error']}")
        if counts["failed"] > len(self._failures):
            print_message(f"  and {counts['failed'] - len(self._failures)} more")

    def _report_interrupt(self, total: int | None, status: int) -> int:
        self._report()
        goes_on = f"job {self._job} goes on; " if self._job else ""
        print_message(f"interrupted: {goes_on}{self._describe_rest(total)}")
        return status

    def _describe_rest(self, total: int | None) -> str:
        """Return what is done, and how to continue."""
        file = self._options.flags.output
        if self._job:
            command = f"triton-gateway infer {self._options.model} --job {self._job}"
            resume = "" if file is None else f" --output {file} --resume"
            return (
                f"{command}{resume} writes its result, "
                f"triton-gateway jobs cancel {self._job} cancels or deletes it"
            )
        of = "" if total is None else f" of {total}"
        done = f"{self._counts.total()}{of} inputs are done"
        if file is None:
            return f"{done} (only a run with --output FILE can be resumed)"
        return f"{done}; run the same command with --resume to continue"


def write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
