"""Progress bars on standard error, which show nothing if that is not a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich import progress
from rich.console import Console


def create_bar(*columns: progress.ProgressColumn) -> progress.Progress:
    return progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        *columns,
        progress.TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        refresh_per_second=4,  # more would take the interpreter from the requests
        disable=not sys.stderr.isatty(),
    )


def create_transfer_bar() -> progress.Progress:
    return create_bar(progress.DownloadColumn(), progress.TransferSpeedColumn())


@contextmanager
def show_counts(total: int | None) -> Iterator[Callable[[int, int], None]]:
    """Yield a function that shows how many inputs are done, and how many of them failed."""
    with create_bar(progress.MofNCompleteColumn()) as bar:
        task = bar.add_task("", total=total)

        def show(done: int, failed: int) -> None:
            bar.update(task, completed=done, description=f"{failed} failed" if failed else "")

        yield show
