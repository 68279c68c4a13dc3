"""The entry point of `python -m gateway` and of the command `triton-gateway`."""

from __future__ import annotations


def main() -> None:
    # Not above: each decoding process imports this module of its parent, and needs no command.
    from gateway.cli import main as run_command  # noqa: PLC0415

    run_command()


if __name__ == "__main__":
    main()
