"""The help of the commands: plain text of 80 columns, with the commands under titles."""

from __future__ import annotations

from typing import Any, Final

import typer
from typer.core import TyperGroup

START_HERE: Final = """\b
Start here:
  triton-gateway up                   start the demonstration, or: up model.onnx
  triton-gateway models               list the models
  triton-gateway infer MODEL 'text'   send a text, or: infer MODEL photo.jpg
  triton-gateway infer --help         show the options of a command"""
MAX_SUMMARY_CHARS: Final = 100


class CommandGroup(TyperGroup):
    """A group whose help lists the commands under the titles of their panels."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        panels: dict[str, list[tuple[str, str]]] = {}
        for name in self.list_commands(ctx):
            command: Any = self.commands[name]
            title = command.rich_help_panel or "Commands"
            summary = command.get_short_help_str(MAX_SUMMARY_CHARS)
            panels.setdefault(title, []).append((name, summary))
        for title, rows in panels.items():
            with formatter.section(title):
                formatter.write_dl(rows)


def create_cli(**options: Any) -> typer.Typer:
    """Return a group of commands that shows its help if none is given."""
    return typer.Typer(
        cls=CommandGroup,
        no_args_is_help=True,
        context_settings={"help_option_names": ["-h", "--help"]},
        rich_markup_mode=None,
        **options,
    )
