"""The command `triton-gateway`, with other values of the constants that are `Fixed` fields of the settings.

`python -m tests.support.gateway_main` takes them from variables named as if they were settings, such as
GATEWAY_POLL_INTERVAL_S, and passes them to the gateway's `main`; the gateway itself reads no such variable.
"""

from __future__ import annotations

import os
import sys

from pydantic import BaseModel

# It imports the settings of each capability.
import gateway.server.launch  # noqa: F401
from gateway import __main__
from gateway.cli import main
from gateway.config.settings import ENV_PREFIX, FIXED, CapabilitySettings, Settings

KINDS: tuple[type[BaseModel], ...] = (Settings, *CapabilitySettings.__subclasses__())
FIXED_FIELDS = {
    f"{ENV_PREFIX}{name.upper()}": name
    for kind in KINDS
    for name, field in kind.model_fields.items()
    if FIXED in field.metadata
}


def run() -> None:
    values = {
        FIXED_FIELDS[variable]: os.environ.pop(variable)
        for variable in FIXED_FIELDS.keys() & os.environ.keys()
    }
    # As without this module: each worker imports the module of its command.
    sys.modules["__main__"] = __main__
    main(values)


if __name__ == "__main__":
    run()
