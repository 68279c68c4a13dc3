"""Shell completion of model names: a question to the gateway that never waits long and never fails."""

from __future__ import annotations

from typing import Final

import typer

from gateway.commands.target import Target
from gateway.messages import CommandError

COMPLETION_TIMEOUT_S: Final = 1.0


def complete_model_name(context: typer.Context, incomplete: str) -> list[str]:
    from gateway.commands.api import connect

    flags = context.params
    try:
        target = Target(**{name: flags[name] for name in ("url", "key", "ca") if flags.get(name)})
        with connect(target, COMPLETION_TIMEOUT_S) as client:
            names = [model.name for model in client.models()]
    except (CommandError, LookupError, TypeError):  # another server answered, or none
        return []
    given = flags.get("models") or flags.get("names") or ()
    return [name for name in names if name.startswith(incomplete) and name not in given]
