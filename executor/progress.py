"""Progress of a run: a bar on a terminal, plain lines elsewhere."""

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from executor.train import Evaluation
from simulator.specs.decision import PlanFile


class RunProgress:
    """Shows steps, loss and accuracy of a run while it is open.

    Args:
        quiet: show nothing, as on all ranks but the first.
    """

    def __init__(self, file: PlanFile, *, quiet: bool) -> None:
        self._num_steps = file.train.num_steps
        self._console = Console(stderr=True, quiet=quiet)
        self._bar: Progress | None = None
        if self._console.is_terminal and not quiet:
            self._bar = Progress(
                TextColumn("training"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[status]}"),
                TimeRemainingColumn(),
                console=self._console,
            )
            self._task = self._bar.add_task("train", total=self._num_steps, status="")

    def __enter__(self) -> "RunProgress":
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, step: int, loss: float, evaluation: Evaluation) -> None:
        """Show where the run stands after a step."""
        status = f"loss {loss:.4f}, validation accuracy {evaluation.val_accuracy_ratio:.3f}"
        if self._bar is not None:
            self._bar.update(self._task, completed=step + 1, status=status)
        else:
            self._console.print(f"step {step + 1} of {self._num_steps}: {status}", highlight=False)
