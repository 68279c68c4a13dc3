"""Flags that several commands share, as dataclasses: each field defines a flag of the same name."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Any, Concatenate, ParamSpec, TypeVar

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
        def run(**values: Any) -> None:
            flags = group(**{flag.name: values.pop(flag.name) for flag in shared})
            command(flags, **values)  # type: ignore[call-arg]

        parameters = [flag.replace(kind=Parameter.KEYWORD_ONLY) for flag in (*own, *shared)]
        run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {flag.name: flag.annotation for flag in parameters}
        return run

    return decorate
