"""Progress of ranks: a bar on a terminal, plain lines elsewhere, always on standard error."""

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class CountProgress:
    """Shows how much of a count is done while it is open.

    Args:
        title: what is being done.
        noun: what is counted.
        total: how many there are.
        lines: how often to print where there is no terminal: at every such share of the total; 0 for every call.
        quiet: show nothing, as on all ranks but the first.
    """

    def __init__(self, title: str, noun: str, total: int, *, lines: int = 0, quiet: bool = False) -> None:
        self._noun, self._total, self._lines = noun, total, lines
        self._done = 0
        self._console = Console(stderr=True, quiet=quiet, highlight=False, soft_wrap=True, markup=False)
        self._bar: Progress | None = None
        if self._console.is_terminal and not quiet:
            self._bar = Progress(
                TextColumn(title),
                BarColumn(bar_width=16),
                MofNCompleteColumn(),
                TextColumn("{task.fields[status]}", markup=False),
                TimeRemainingColumn(),
                console=self._console,
                auto_refresh=False,  # a thread that draws would disturb what is being measured
            )
            self._task = self._bar.add_task(title, total=total, status="")

    def __enter__(self) -> "CountProgress":
        if self._bar is not None:
            self._bar.start()
            self._console.show_cursor()  # it was hidden, and a rank that is ended from outside could not bring it back
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, done: int, status: str) -> None:
        """Show that so many are done, and what is to be said of the last one."""
        before, self._done = self._done, done
        if self._bar is not None:
            self._bar.update(self._task, completed=done, status=status, refresh=True)
        elif not self._lines or done * self._lines // self._total > before * self._lines // self._total:
            self._console.print(f"{self._noun} {done} of {self._total}: {status}")

    def advance(self, status: str) -> None:
        """Show that one more is done."""
        self.show(self._done + 1, status)
