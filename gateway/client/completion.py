"""Shell completion of model names: a question to the gateway that never waits long and never fails."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import typer

from gateway.client.target import Target
from gateway.messages import CommandError

COMPLETION_TIMEOUT_S: Final = 1.0


def complete_model_name(context: typer.Context, incomplete: str) -> list[str]:
    """Return the names of the gateway's models; none if it does not answer in time."""
    from gateway.client.api import ApiClient

    try:
        with ApiClient(read_target(context.params), COMPLETION_TIMEOUT_S) as api:
            models = api.get("/v1/models")["models"]
        names = [str(model["name"]) for model in models]
    except (CommandError, LookupError, TypeError):  # another server answered, or none
        return []
    given = context.params.get("models") or context.params.get("names") or ()
    return [name for name in names if name.startswith(incomplete) and name not in given]


def read_target(flags: Mapping[str, Any]) -> Target:
    names = ("url", "key", "ca")
    return Target(**{name: flags[name] for name in names if flags.get(name)})
