"""Types of settings."""

from __future__ import annotations

from typing import Annotated, Any, Final

from pydantic import BeforeValidator, Field
from pydantic_settings import NoDecode

MAX_SETTING_S: Final = 86400.0


def split_list(value: Any) -> Any:
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return value


# Bounded, because timers do not accept infinity.
PositiveSeconds = Annotated[float, Field(gt=0, le=MAX_SETTING_S)]
NonNegativeSeconds = Annotated[float, Field(ge=0, le=MAX_SETTING_S)]
# pydantic-settings itself would read a tuple as JSON.
CommaSeparated = Annotated[tuple[str, ...], NoDecode, BeforeValidator(split_list)]
