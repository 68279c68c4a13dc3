"""A parser for the `parameters` of a config.pbtxt into a dataclass whose fields are the settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T")


class ParameterError(ValueError):
    """A parameter is unknown or has an invalid value."""


def require(condition: bool, message: str) -> None:
    if not condition:
        raise ParameterError(message)


def own_parameters(model_config: Mapping[str, Any]) -> dict[str, str]:
    """Return the parameters for the model's code.

    Triton's parameters are upper case (`EXECUTION_ENV_PATH`), and the gateway's contain a dot
    (`gateway.content_type.image`).
    """
    return {
        name: parameter["string_value"]
        for name, parameter in model_config.get("parameters", {}).items()
        if "." not in name and not name.isupper()
    }


def read(kind: type[T], given: Mapping[str, str]) -> T:
    """Return an instance of the dataclass `kind`; raise ParameterError for an invalid parameter."""
    hints = get_type_hints(kind)
    names = [field.name for field in dataclasses.fields(kind) if field.init]  # type: ignore[arg-type]
    for name in given:
        require(name in names, f"unknown parameter {name}; valid parameters are {', '.join(names)}")
    return kind(**{name: _value(name, hints[name], text) for name, text in given.items()})


def _value(name: str, hint: Any, text: str) -> Any:
    if get_origin(hint) is Literal:
        choices = get_args(hint)
        require(text in choices, f"{name} must be one of {', '.join(choices)}, not {text!r}")
        return text
    parse, expected = _PARSERS[hint]
    try:
        return parse(text.strip())
    except (ValueError, ZeroDivisionError):
        raise ParameterError(f"{name} must be {expected}, not {text!r}") from None


def _number(text: str) -> float:
    # Fraction also parses values such as 1/255, and rejects NaN and infinities.
    return float(Fraction(text))


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(_number(part.strip()) for part in text.split(","))


_PARSERS: dict[Any, tuple[Callable[[str], Any], str]] = {
    int: (int, "an integer"),
    float: (_number, "a number"),
    tuple[float, ...]: (_numbers, "numbers separated by commas"),
}
