"""What the commands share: a progress bar with the time left, and the exit code of one that was interrupted."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

INTERRUPTED = 130  # the shell's code for a program ended by Ctrl-C


def progress_on(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
        console=console, transient=True,
    )  # fmt: skip
