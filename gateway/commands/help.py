"""The help of the commands: options in two lines each, in panels, some of which only --help-all shows."""

from __future__ import annotations

import re
import textwrap
from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup

CONNECTION: Final = "Connection"
# The parameters of each panel. All others are advanced.
PANELS: Final = {
    "Common": (
        *("model", "models", "files", "port", "replicas", "load", "open_page"),
        *("text", "lines", "output", "format", "json", "batch"),
    ),
    "Models on demand": ("on_demand", "max_loaded_models"),
    "Triton's ports": ("triton_http_port", "triton_grpc_port", "triton_metrics_port"),
    "Advanced": (),
    "Options": ("help_all", "help"),
    CONNECTION: ("url", "key", "ca"),
}
FOLDED_PANELS: Final = ("Triton's ports", "Advanced")
HELP_ALL_FLAG: Final = "--help-all"
NO_LIMIT: Final = 1000  # characters of a description
# Typer's names of types, such as <list[str]> and <int range>.
TYPE_NAME: Final = re.compile(r"<(?:list\[)?(\w+)(?:\]| range)>")

START_HERE: Final = """\
Start here:
  triton-gateway up                   start the demonstration, or: up model.onnx
  triton-gateway models               list the models
  triton-gateway infer MODEL 'text'   send a text, or: infer MODEL photo.jpg
  triton-gateway infer --help         show the options of a command"""
SYNONYMS: Final = {
    **dict.fromkeys(("list", "ls", "ps"), ("models",)),
    "run": ("infer", "up"),
    "start": ("up", "serve"),
    "predict": ("infer",),
    "upload": ("push",),
    "download": ("pull",),
    "delete": ("rm",),
    "status": ("ready", "replicas"),
}


class RootGroup(TyperGroup):
    """The commands; without one, the lines for a start precede their list."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args and not ctx.resilient_parsing:
            typer.echo(START_HERE)
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0]
        if name in SYNONYMS and not ctx.resilient_parsing:
            meant = " or ".join(map(repr, SYNONYMS[name]))
            ctx.fail(f"No such command {name!r}. Did you mean {meant}?")
        return super().resolve_command(ctx, args)


def show_complete_help(context: typer.Context, wanted: bool) -> None:
    if wanted:
        context.meta[HELP_ALL_FLAG] = True
        typer.echo(context.get_help())
        raise typer.Exit


HelpAllOption = Annotated[
    bool,
    typer.Option(
        HELP_ALL_FLAG,
        callback=show_complete_help,
        is_eager=True,
        help="Show every option and exit.",
    ),
]


def arrange_help(group: Any) -> None:
    """Let each command below a group print its options with `write_options`.

    A table, which is Typer's default, cuts the names of options in a narrow terminal.
    """
    for command in group.commands.values():
        command.rich_markup_mode = None
        command.format_options = OptionWriter(command)
        if isinstance(command, TyperGroup):
            arrange_help(command)


class OptionWriter:
    """Writes the arguments and options of a command in panels, and the commands of a group."""

    def __init__(self, command: Any) -> None:
        self._command = command

    def __call__(self, context: Any, formatter: Any) -> None:
        shows_all = HELP_ALL_FLAG in context.meta
        for title, parameters in group_parameters(self._command.get_params(context)).items():
            if title in FOLDED_PANELS and not shows_all:
                flags = ", ".join(parameter.opts[0] for parameter in parameters)
                formatter.write_paragraph()
                write_wrapped(f"{title} ({HELP_ALL_FLAG} explains them): {flags}", formatter)
                continue
            rows = [parameter.get_help_record(context) for parameter in parameters]
            rows = [(TYPE_NAME.sub(r"<\1>", name), text) for name, text in rows]
            with formatter.section(title):
                if title == CONNECTION:
                    formatter.write_dl(rows)
                else:
                    write_in_lines(rows, formatter)
        if isinstance(self._command, TyperGroup):
            commands = self._command.commands.items()
            with formatter.section("Commands"):
                formatter.write_dl(
                    [(name, each.get_short_help_str(NO_LIMIT)) for name, each in commands]
                )


def group_parameters(parameters: list[Any]) -> dict[str, list[Any]]:
    """Return the parameters by panel. A command without --help-all has few, and needs no panels."""
    has_panels = any(each.name == "help_all" for each in parameters)
    # Arguments come first in their panel.
    parameters = sorted(parameters, key=lambda each: each.param_type_name)
    panels: dict[str, list[Any]] = {title: [] for title in ("Arguments", *PANELS)}
    for parameter in parameters:
        title = "Arguments" if parameter.param_type_name == "argument" else "Options"
        known = (each for each, names in PANELS.items() if parameter.name in names)
        if has_panels or parameter.name in PANELS[CONNECTION]:
            title = next(known, "Advanced")
        panels[title].append(parameter)
    return {title: listed for title, listed in panels.items() if listed}


def write_in_lines(rows: list[tuple[str, str]], formatter: Any) -> None:
    for name, text in rows:
        write_wrapped(name, formatter)
        with formatter.indentation(), formatter.indentation():
            write_wrapped(text, formatter)


def write_wrapped(text: str, formatter: Any) -> None:
    """Write lines that break at blanks only: the formatter's own break within names of options."""
    indent = " " * formatter.current_indent
    lines = textwrap.fill(
        text,
        formatter.width,
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    formatter.write(f"{lines}\n")
