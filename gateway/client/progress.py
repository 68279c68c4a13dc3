"""A progress bar on standard error, if that is a terminal."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Final

REFRESH_INTERVAL_S: Final = 0.25


class ProgressBar:
    """Shows the counts (done, failed) of `get_counts`. Requires a running event loop."""

    def __init__(self, get_counts: Callable[[], tuple[int, int]], total: int | None) -> None:
        self._get_counts = get_counts
        self._total = total
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> ProgressBar:
        if sys.stderr.isatty():
            self._task = asyncio.create_task(self._refresh_bar())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})  # the bar is removed before messages follow

    async def _refresh_bar(self) -> None:
        from rich import progress
        from rich.console import Console

        columns = (
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TextColumn("{task.fields[rate]}"),
            progress.TimeRemainingColumn(),
            progress.TextColumn("[red]{task.fields[failed]}"),
        )
        # Refreshed by this task: a refresh thread would compete with the requests for the GIL.
        bar = progress.Progress(
            *columns, console=Console(stderr=True), auto_refresh=False, transient=True
        )
        with bar:
            task = bar.add_task("", total=self._total, rate="", failed="")
            while True:
                done, failed = self._get_counts()
                bar.update(task, completed=done, failed=f"{failed} failed" if failed else "")
                bar.update(task, rate=f"{bar.tasks[0].speed or 0:.0f}/s")
                bar.refresh()
                await asyncio.sleep(REFRESH_INTERVAL_S)
