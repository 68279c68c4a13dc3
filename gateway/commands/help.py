"""The help of the commands: options in two lines each, in panels, some of which only --help-all shows."""

from __future__ import annotations

import re
import textwrap
from functools import partial
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
# Typer's labels of variables and defaults, without which an option of the connection fits in a line.
LABEL: Final = re.compile(r"env var: |default: | (?= )")
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
    **dict.fromkeys(("remove", "delete"), ("rm",)),
    "download": ("pull",),
    "predict": ("infer",),
    "run": ("infer", "up"),
    "start": ("up", "serve"),
    "status": ("ready", "replicas"),
    "upload": ("push",),
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
        command.format_options = partial(write_options, command)
        if isinstance(command, TyperGroup):
            arrange_help(command)


def write_options(command: Any, context: Any, formatter: Any) -> None:
    """Write the arguments and options of a command in panels, and the commands of a group."""
    # Arguments come first in their panel.
    parameters = sorted(command.get_params(context), key=lambda each: each.param_type_name)
    is_long = any(each.name == "help_all" for each in parameters)
    for title in ("Arguments", *PANELS):
        members = [each for each in parameters if find_panel(each, is_long=is_long) == title]
        if title in FOLDED_PANELS and HELP_ALL_FLAG not in context.meta and members:
            flags = ", ".join(each.opts[0] for each in members)
            formatter.write_paragraph()
            write_wrapped(f"{title} ({HELP_ALL_FLAG} explains them): {flags}", formatter)
        elif members:
            write_panel(title, [each.get_help_record(context) for each in members], formatter)
    if isinstance(command, TyperGroup):
        rows = [(name, each.get_short_help_str(100)) for name, each in command.commands.items()]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def find_panel(parameter: Any, *, is_long: bool) -> str:
    """Return the panel of a parameter. A command without --help-all is short, and needs few panels."""
    for title, names in PANELS.items():
        if parameter.name in names and (is_long or title == CONNECTION):
            return title
    if is_long:
        return "Advanced"
    return "Arguments" if parameter.param_type_name == "argument" else "Options"


def write_panel(title: str, rows: list[tuple[str, str]], formatter: Any) -> None:
    with formatter.section(title):
        if title == CONNECTION:
            formatter.write_dl([(name, LABEL.sub("", text)) for name, text in rows])
            return
        for name, text in rows:
            write_wrapped(TYPE_NAME.sub(r"<\1>", name), formatter)
            with formatter.indentation(), formatter.indentation():
                write_wrapped(text, formatter)


def write_wrapped(text: str, formatter: Any) -> None:
    """Write lines that break at blanks only: the formatter's own break within names of options."""
    lines = textwrap.wrap(text, formatter.width - formatter.current_indent, break_on_hyphens=False)
    formatter.write("".join(f"{'':{formatter.current_indent}}{line}\n" for line in lines))
