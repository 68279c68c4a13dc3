"""The commands `label set`, `label list` and `label delete`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

import typer

from gateway.commands.errors import UsageError
from gateway.commands.flags import JsonOption, ModelArgument, add_target
from gateway.commands.target import Target
from gateway.messages import escape_unprintable

label_cli = typer.Typer(no_args_is_help=True, help="Manage the version labels of models.")

LABEL_COLUMNS: Final = ("MODEL", "LABEL", "VERSIONS", "SHADOW", "NOT READY")
LabelName = Annotated[str, typer.Argument(metavar="LABEL", help="Name of the label.")]


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
    print_labels(target, "PUT", model, label, json, build_label(versions, sticky))


@label_cli.command("list")
@add_target
def list_model_labels(target: Target, model: ModelArgument, json: JsonOption = False) -> None:
    """List the labels of a model."""
    print_labels(target, "GET", model, "", json)


@label_cli.command("delete")
@add_target
def delete_model_label(
    target: Target, model: ModelArgument, label: LabelName, json: JsonOption = False
) -> None:
    """Delete a label of a model."""
    print_labels(target, "DELETE", model, label, json)


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


def print_labels(
    target: Target, method: str, model: str, label: str, json: bool, body: Any = None
) -> None:
    from gateway.client.calls import build_label_path
    from gateway.commands import tables

    with target.connect() as client:
        document = client.request(method, build_label_path(model, label), body)
    labels = document.get("labels", [document])
    if method == "DELETE" and not json:
        typer.echo(f"deleted {escape_unprintable(document['label'])}")
    else:
        tables.print_entries(labels, LABEL_COLUMNS, format_label_row, json=json)


def format_label_row(label: Mapping[str, Any]) -> tuple[str, ...]:
    shares = label.get("versions") or {label.get("version", ""): 1}
    total = sum(shares.values())
    if len(shares) == 1:
        versions = next(iter(shares))
    else:
        versions = ", ".join(
            f"{each}: {100 * share / total:.4g} %" for each, share in shares.items()
        )
    shadow = label.get("shadow")
    shadowed = f"{shadow['version']}: {shadow['percent']:g} %" if shadow else ""
    missing = ", ".join(each for each, is_ready in label["ready"].items() if not is_ready)
    return label["model"], label["label"], versions, shadowed, missing
