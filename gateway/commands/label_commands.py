"""The commands `label`: the version labels of models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from gateway.commands.errors import UsageError
from gateway.commands.flags import JsonOption, ModelArgument, add_target
from gateway.commands.help import create_cli
from gateway.commands.plain import LabelName, add_plain_commands
from gateway.commands.resources import LABELS
from gateway.commands.target import Target

label_cli = create_cli(help="Manage the version labels of models.")
add_plain_commands("label", label_cli)


@label_cli.command("set")
@add_target
def set_model_label(
    target: Target,
    model: ModelArgument,
    label: LabelName,
    versions: Annotated[
        list[str],
        typer.Argument(
            metavar="VERSIONS", help="A version, or several with their shares, such as 1=90 2=10."
        ),
    ],
    sticky: Annotated[
        bool, typer.Option("--sticky", help="Each API key keeps its version of a split.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Let a label mean a version, or split its requests between versions."""
    from gateway.client.calls import build_label_path

    body = build_label(versions, sticky)
    LABELS.show(target, "PUT", build_label_path(model, label), body, json=json)


def build_label(versions: Sequence[str], sticky: bool) -> dict[str, Any]:
    document: dict[str, Any] = {"version": versions[0]}
    if len(versions) > 1 or "=" in versions[0]:
        document = {"versions": dict(map(parse_share, versions))}
        if len(document["versions"]) < len(versions):
            raise UsageError("a version is given twice")
    if sticky:
        document["sticky"] = "key"
    return document


def parse_share(text: str) -> tuple[str, int]:
    version, _, share = text.partition("=")
    if not (version.isdecimal() and share.isdecimal()):
        raise UsageError(f"expected VERSION=SHARE, such as 1=90, not {text!r}")
    return version, int(share)
