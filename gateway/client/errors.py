"""Why a command ends: a sentence for standard error, and an exit status for scripts (docs/cli.md)."""

from __future__ import annotations

from gateway.words import Failure


class ClientError(Failure):
    """The gateway refused, or something failed."""


class Misused(ClientError):
    """The command line asks for what cannot be."""

    status = 2


class Unreachable(ClientError):
    """Nobody answers there, or what answers is no gateway."""

    status = 3


class NotAllowed(ClientError):
    """No key, a wrong one, or one that may not do this."""

    status = 4


def refusal(http_status: int, sentence: str) -> ClientError:
    return (NotAllowed if http_status in (401, 403) else ClientError)(sentence)
