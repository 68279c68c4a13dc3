"""Groups of flags, as dataclasses: each field defines a flag of the same name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, Concatenate, ParamSpec, TypeVar

import typer

from gateway.commands.target import Target, complete_model_name, report_gateway_errors

F = TypeVar("F")
P = ParamSpec("P")


def add_flags(
    group: type[F],
) -> Callable[[Callable[Concatenate[F, P], None]], Callable[..., None]]:
    """Return a decorator that adds the flags of a dataclass to a command, after the command's own.

    The first parameter of the command receives the dataclass. Typer reads the flags from a command's
    signature and does not support groups of flags.
    """
    shared = list(signature(group, eval_str=True).parameters.values())

    def decorate(command: Callable[Concatenate[F, P], None]) -> Callable[..., None]:
        own = list(signature(command, eval_str=True).parameters.values())[1:]

        @wraps(command)
        def run(*arguments: P.args, **values: P.kwargs) -> None:
            flags: dict[str, Any] = {flag.name: values.pop(flag.name) for flag in shared}
            command(group(**flags), *arguments, **values)

        parameters = [flag.replace(kind=Parameter.KEYWORD_ONLY) for flag in (*own, *shared)]
        vars(run)["__signature__"] = Signature(parameters)
        run.__annotations__ = {flag.name: flag.annotation for flag in parameters}
        return run

    return decorate


def add_target(command: Callable[Concatenate[Target, P], None]) -> Callable[..., None]:
    """Add the flags of a `Target`, whose responses may have any shape, to a command."""

    @wraps(command)
    def run(target: Target, /, *arguments: P.args, **values: P.kwargs) -> None:
        with report_gateway_errors(target.url):
            command(target, *arguments, **values)

    return add_flags(Target)(run)


# Titles of the groups of commands in the help.
INFERENCE_PANEL = "Use models"
MODELS_PANEL = "Manage models and replicas"
OPERATION_PANEL = "Watch and diagnose"


def format_examples(*commands: str) -> str:
    # The first character keeps the lines as they are.
    return "\n  ".join(("\b\nExamples:", *commands))


ModelArgument = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="Name of the model.", autocompletion=complete_model_name),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
TimeoutOption = Annotated[
    float, typer.Option("--timeout", min=0.001, help="Time limit of a request, in seconds.")
]


class OutputFormat(str, Enum):
    text = "text"
    jsonl = "jsonl"


@dataclass(frozen=True)
class InferFlags:
    """The flags of `infer` that say how its inputs are sent and where the records go."""

    concurrency: Annotated[
        int, typer.Option(min=1, max=1024, help="Number of parallel requests.")
    ] = 16
    batch: Annotated[int, typer.Option(min=1, max=1024, help="Inputs per request.")] = 1
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Output file. Default: standard output.")
    ] = None
    format: Annotated[
        OutputFormat | None, typer.Option(help="Default: text on a terminal, else jsonl.")
    ] = None
    json: Annotated[bool, typer.Option("--json", help="Same as --format jsonl.")] = False
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue an interrupted output file.")
    ] = False
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Overwrite an existing output file.")
    ] = False
    retries: Annotated[int, typer.Option(min=0, help="Maximum number of retries of a request.")] = (
        10
    )
    timeout: TimeoutOption = 60.0
    is_async: Annotated[
        bool,
        typer.Option(
            "--async", help="Run all inputs as one job, which a lost connection does not end."
        ),
    ] = False
    no_wait: Annotated[
        bool, typer.Option("--no-wait", help="With --async: print the job's ID, and do not wait.")
    ] = False
    callback: Annotated[
        str, typer.Option(metavar="URL", help="With --async: URL to call when the job has ended.")
    ] = ""
    job: Annotated[
        str, typer.Option(metavar="JOB", help="Write the results of this job in place of inputs.")
    ] = ""
