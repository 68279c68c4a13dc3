"""The command `triton-gateway`, as `python -m gateway` too."""

from __future__ import annotations

import sys

from gateway.client import commands


def main() -> None:
    """What only asks a gateway does not wait for the imports of the server."""
    if sys.argv[1:2] and sys.argv[1] in commands.NAMES:
        commands.main()
    else:
        from gateway import cli

        cli.main()


if __name__ == "__main__":
    main()
