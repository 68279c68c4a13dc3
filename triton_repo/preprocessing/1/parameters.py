"""Reads the `parameters` of a config.pbtxt into a dataclass, whose fields say what may be set."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T")


class ParameterError(ValueError):
    """A parameter is unknown or has a value that makes no sense; the text is one sentence."""


def require(condition: bool, sentence: str) -> None:
    if not condition:
        raise ParameterError(sentence)


def own_parameters(model_config: Mapping[str, Any]) -> dict[str, str]:
    """The parameters that are meant for the model's code.

    Triton's own are upper case (`EXECUTION_ENV_PATH`) and the gateway's have a dot
    (`gateway.content_type.image`); whatever is left must be known to the model.
    """
    return {
        name: parameter["string_value"]
        for name, parameter in model_config.get("parameters", {}).items()
        if "." not in name and not name.isupper()
    }


def read(kind: type[T], given: Mapping[str, str]) -> T:
    """An instance of the dataclass `kind`; fields that are not given keep their defaults."""
    hints = get_type_hints(kind)
    names = [field.name for field in dataclasses.fields(kind) if field.init]  # type: ignore[arg-type]
    for name in given:
        require(name in names, f"the parameter {name} is unknown; known are {', '.join(names)}")
    return kind(**{name: _value(name, hints[name], text) for name, text in given.items()})


def _value(name: str, hint: Any, text: str) -> Any:
    if get_origin(hint) is Literal:
        choices = get_args(hint)
        require(text in choices, f"{name} must be one of {', '.join(choices)}, not {text!r}")
        return text
    parse, wanted = _PARSERS[hint]
    try:
        return parse(text.strip())
    except (ValueError, ZeroDivisionError):
        raise ParameterError(f"{name} must be {wanted}, not {text!r}") from None


def _number(text: str) -> float:
    """A finite number; a fraction such as 1/255 is one, too."""
    return float(Fraction(text))


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(_number(part.strip()) for part in text.split(","))


_PARSERS: dict[Any, tuple[Callable[[str], Any], str]] = {
    int: (int, "a whole number"),
    float: (_number, "a number"),
    tuple[float, ...]: (_numbers, "numbers separated by commas"),
}
