"""A progress bar with the time left, for a person who waits at a terminal. Never writes to a pipe or a log."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Step = Callable[[float], None]


class Bars:
    """One bar for each piece of work, in order. Silent, it hands out no steps, so that nobody computes them."""

    def __init__(self, progress: object | None) -> None:
        self._progress = progress

    def bar(self, name: str, total: float) -> Step | None:
        """A bar that stands at nothing; call the step with how much of `total` is done. None where nobody looks."""
        from rich.progress import Progress

        progress = self._progress
        if not isinstance(progress, Progress):
            return None
        for before in progress.task_ids:
            progress.update(before, visible=False)
        task = progress.add_task(name, total=max(total, 1e-9))
        return lambda done: progress.update(task, completed=min(done, total))


@contextmanager
def bars(*, quiet: bool = False) -> Iterator[Bars]:
    """Bars on stderr while the block runs, gone when it ends. Silent if `quiet`, or if stderr is no terminal."""
    if quiet or not sys.stderr.isatty():
        yield Bars(None)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        yield Bars(progress)
