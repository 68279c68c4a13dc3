"""`triton-gateway infer`: a record for each input, in order; with resume and a summary; also as a job."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import Counter, deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
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


@dataclass
class InferRun:
    """The options of the command line, and what was done."""

    target: Target
    model: str
    version: str
    inputs: InputSource
    flags: InferFlags
    format: OutputFormat
    words: Sequence[str] = ()  # texts without --text
    job: str = ""
    total: int | None = None
    done_before: Counter[str] = field(default_factory=Counter)  # inputs, by an earlier run
    counts: Counter[str] = field(default_factory=Counter)  # succeeded, failed, skipped
    failures: list[Record] = field(default_factory=list)
    started_at: float = field(default_factory=time.monotonic)

    def run(self) -> int:
        """Write the records, and return the exit status."""
        flags = self.flags
        self.total = self.inputs.total
        with self.target.connect() as client:
            model = client.model(self.model, self.version)
            if flags.job:
                self.total = client.request("GET", build_job_path(flags.job))["progress"]["total"]
        self.check_inputs(model)
        if flags.resume and flags.output is not None and flags.output.exists():
            self.done_before = resume_output(flags.output)
        descriptor = open_output(flags)
        try:
            with self.target.connect(flags.timeout, flags.retries) as client:
                return self.write_records(self.list_outcomes(client, model), descriptor)
        finally:
            if descriptor != STDOUT_DESCRIPTOR:
                os.close(descriptor)

    def check_inputs(self, model: ModelInfo) -> None:
        """Check the inputs against the model. Raises `UsageError`."""
        required = [tensor for tensor in model.inputs if not tensor.is_optional]
        takes_one_text = [(each.datatype, each.shape) for each in required] == [("BYTES", (1,))]
        if self.words and not (takes_one_text and required[0].content_type in ("", TEXT)):
            raise UsageError(
                f"no such file or folder: {self.words[0]}; the input of {self.model} is not a single text"
            )
        if self.flags.batch > 1 and model.is_decoupled:
            raise UsageError(f"--batch: {self.model} returns any number of responses")
        if self.flags.batch > 1 and model.max_batch_size == 0:
            raise UsageError(f"--batch: {self.model} has no batch dimension")

    def list_outcomes(self, client: Client, model: ModelInfo) -> Generator[Named, None, None]:
        if self.flags.job:
            return self.continue_job(client)
        if not self.flags.is_async:
            return self.infer(client, is_decoupled=model.is_decoupled)
        return self.run_request(client) if self.inputs.total == 1 else self.run_batch(client)

    def read_inputs(self) -> Iterator[tuple[str, Any]]:
        return (each for each in self.inputs if not self.skip(each[0]))

    def skip(self, name: str) -> bool:
        """Return whether an earlier run has done an input, and count it."""
        if not self.done_before[name]:
            return False
        self.done_before[name] -= 1
        self.counts["skipped"] += 1
        return True

    def infer(self, client: Client, *, is_decoupled: bool) -> Generator[Named, None, None]:
        names: deque[str] = deque()

        def read_values() -> Iterator[Any]:
            for name, value in self.read_inputs():
                names.append(name)
                yield value

        flags = self.flags
        options: dict[str, Any] = {"batch": flags.batch, "concurrency": flags.concurrency}
        # Values that may block are read one by one in a thread, which costs time.
        values = read_values() if self.inputs.may_block else list(read_values())
        outcomes = client.infer_many(
            self.model, values, version=self.version, stream=is_decoupled, **options
        )
        with closing(outcomes):
            for outcome in outcomes:
                if isinstance(outcome, GatewayError) and outcome.code == UNREACHABLE:
                    raise outcome
                yield names.popleft(), outcome

    def run_request(self, client: Client) -> Generator[Named, None, None]:
        """Submit the only input as a job, which may be larger than a row of a batch."""
        url = self.flags.callback
        for name, value in self.read_inputs():
            job = client.submit(self.model, value, version=self.version, callback_url=url)
            self.show_job(job.id)
            if not self.flags.no_wait:
                yield name, self.read_result(client)

    def run_batch(self, client: Client) -> Generator[Named, None, None]:
        unreadable: list[Named] = []

        def read_rows() -> Iterator[tuple[str, Any]]:
            for name, value in self.read_inputs():
                item = read_item(value)
                if isinstance(item, GatewayError):
                    unreadable.append((name, item))
                else:
                    yield name, item

        job = client.submit_batch(self.model, read_rows(), callback_url=self.flags.callback)
        self.show_job(job.id)
        yield from unreadable
        if not self.flags.no_wait:
            yield from client.batch_results(job)

    def continue_job(self, client: Client) -> Generator[Named, None, None]:
        self.show_job(self.flags.job)
        if client.request("GET", build_job_path(self.job))["kind"] == "request":
            yield self.job, self.read_result(client)
            return
        yield from (each for each in client.batch_results(self.job) if not self.skip(each[0]))

    def read_result(self, client: Client) -> InferOutcome:
        try:
            return client.job_result(self.job, JOB_TIMEOUT_S)
        except GatewayError as exc:
            return exc

    def show_job(self, job: str) -> None:
        self.job = job
        if self.flags.no_wait:
            sys.stdout.write(f"{escape_unprintable(job)}\n")
        else:
            print_message(f"job {job}")

    def write_records(self, outcomes: Generator[Named, None, None], descriptor: int) -> int:
        encode_record = RECORD_ENCODERS[self.format]
        try:
            with show_counts(self.total) as show, closing(outcomes):
                for name, outcome in outcomes:
                    record = make_record(name, outcome)
                    if not self.flags.no_wait:
                        write_all(descriptor, encode_record(record))
                    self.counts["failed" if "error" in record else "succeeded"] += 1
                    if "error" in record and len(self.failures) < MAX_LISTED_FAILURES:
                        self.failures.append(record)
                    show(self.counts.total(), self.counts["failed"])
        except BrokenPipeError:
            return BROKEN_PIPE_STATUS
        except (KeyboardInterrupt, SystemExit) as exc:  # SIGINT, SIGTERM
            self.report()
            goes_on = f"job {self.job} goes on; " if self.job else ""
            print_message(f"interrupted: {goes_on}{self.describe_rest()}")
            return int(exc.code or 0) if isinstance(exc, SystemExit) else INTERRUPT_STATUS
        except OSError as exc:
            raise ClientError(f"the results cannot be written: {exc.strerror}") from exc
        except (GatewayError, ClientError) as exc:
            exc.args = (f"{exc}; {self.describe_rest()}",)
            raise
        if self.failures or not self.flags.no_wait:
            self.report()
        return 1 if self.failures else 0

    def report(self) -> None:
        counts = self.counts
        elapsed_s = max(time.monotonic() - self.started_at, 1e-9)
        skipped = f", {counts['skipped']} skipped" if counts["skipped"] else ""
        rate = (counts["succeeded"] + counts["failed"]) / elapsed_s
        done = f"{counts['succeeded']} succeeded, {counts['failed']} failed{skipped}"
        print_message(f"{done}, in {elapsed_s:.1f} s ({rate:.0f}/s)")
        for record in self.failures:
            print_message(f"  {record['input']}: {record['error']}")

    def describe_rest(self) -> str:
        """Return what is done, and how to continue."""
        file = self.flags.output
        if self.job:
            resume = "" if file is None else f" --output {file} --resume"
            return (
                f"triton-gateway infer {self.model} --job {self.job}{resume} writes its result, "
                f"triton-gateway jobs cancel {self.job} cancels or deletes it"
            )
        count = self.counts.total()
        if file is not None and file.is_file():  # a signal may come between a record and its count
            count = file.read_bytes().count(b"\n")
        done = f"{count}{'' if self.total is None else f' of {self.total}'} inputs are done"
        if file is None:
            return f"{done} (only a run with --output FILE can be resumed)"
        return f"{done}; run the same command with --resume to continue"


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


def write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
