"""Progress bars on standard error, which show nothing if that is not a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from rich import progress
from rich.console import Console

REFRESH_INTERVAL_S: Final = 0.25


def create_bar(*columns: progress.ProgressColumn, auto_refresh: bool = True) -> progress.Progress:
    return progress.Progress(
        *columns,
        console=Console(stderr=True),
        auto_refresh=auto_refresh,
        transient=True,
        disable=not sys.stderr.isatty(),
    )


def create_transfer_bar() -> progress.Progress:
    return create_bar(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )


@contextmanager
def show_counts(total: int | None) -> Iterator[Callable[[int, int], None]]:
    """Yield a function that shows how many inputs are done, and how many of them failed."""
    bar = create_bar(
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TextColumn("{task.fields[rate]}"),
        progress.TimeRemainingColumn(),
        progress.TextColumn("[red]{task.fields[failed]}"),
        auto_refresh=False,  # a refresh thread would compete with the requests for the GIL
    )
    task = bar.add_task("", total=total, rate="0/s", failed="")
    shown_at = 0.0

    def show(done: int, failed: int) -> None:
        nonlocal shown_at
        if time.monotonic() - shown_at >= REFRESH_INTERVAL_S:
            shown_at = time.monotonic()
            bar.update(task, completed=done, failed=f"{failed} failed" if failed else "")
            bar.update(task, rate=f"{bar.tasks[0].speed or 0:.0f}/s", refresh=True)

    with bar:
        yield show
