"""The entry point of `python -m gateway` and of the command `triton-gateway`."""

from __future__ import annotations

from gateway.cli import main

if __name__ == "__main__":
    main()
