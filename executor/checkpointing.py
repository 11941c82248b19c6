"""When a run is saved: every so many steps, and before it ends on a signal."""

import contextlib
import time
from pathlib import Path
from types import TracebackType

from torch.distributed import Store  # type: ignore[attr-defined]  # not in __all__

from executor.checkpoint import CheckpointWriter, checkpoint_state
from executor.environment import environment
from executor.history import History
from executor.launch import Interrupted, meet
from executor.progress import CountProgress
from executor.resume import checkpoint_name, checkpoints_folder
from executor.stopping import Stopping
from executor.train import Trainer
from simulator.specs.checkpoint import CheckpointManifest
from simulator.specs.cluster import DeviceKind
from simulator.specs.decision import PlanFile


class Checkpointing:
    """Saves a run as its `TrainSpec` says; every rank calls each method, at the same steps.

    Without `checkpoint_every_steps` nothing is saved, and signals end the process at once.

    Args:
        store: through which the ranks of the plan meet.
        out: folder of the run.
        plan_file: what is run.
        first_step: from which this process trains.
        patience_seconds: longest wait for rank 0 to come to a step.
        calibration: that priced the plan, to be kept too; None if the run knows none.
    """

    def __init__(
        self,
        trainer: Trainer,
        history: History,
        store: Store,
        progress: CountProgress,
        *,
        out: Path,
        plan_file: PlanFile,
        first_step: int,
        calibration: Path | None = None,
        patience_seconds: float,
    ) -> None:
        self._trainer, self._history, self._store, self._progress = trainer, history, store, progress
        self._out, self._plan_file, self._calibration = out, plan_file, calibration
        self._num_saved_steps, self._patience_seconds = first_step, patience_seconds
        self._open = contextlib.ExitStack()
        self._writer: CheckpointWriter | None = None
        self._stopping: Stopping | None = None
        self.seconds = 0.0  # for which training stood still

    def __enter__(self) -> "Checkpointing":
        train, place = self._trainer.train_spec, self._trainer.place
        if train.checkpoint_every_steps > 0:
            writer = CheckpointWriter(
                self._out,
                place,
                num_kept=train.num_checkpoints_kept,
                asynchronous=train.asynchronous_checkpoints,
                calibration=self._calibration,
            )
            self._writer = self._open.enter_context(writer)
            stopping = Stopping(
                self._store, rank=place.rank, num_ranks=place.num_ranks, patience_seconds=self._patience_seconds
            )
            self._stopping = self._open.enter_context(stopping)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._open.__exit__(kind, error, traceback)

    @property
    def is_writing(self) -> bool:
        """Whether a checkpoint is being written beside the training."""
        return self._writer is not None and self._writer.is_writing

    def before_step(self, step: int, *, is_traced: bool) -> None:
        """Save and end the run if a signal came; let no traced step share the machine with a checkpoint.

        Raises:
            Interrupted: once the run is saved.
        """
        if self._stopping is not None:
            with self._trainer.recorder.position.waiting("the decision whether to stop"):
                is_due = self._stopping.is_due(step)
            if is_due:
                self._save(step)
                self._wait()
                self._end(step, self._stopping.signal_number)
        if is_traced:
            self._wait()

    def after_step(self, step: int) -> None:
        """Save the run if it is time to; after its last step, wait for what is under way."""
        train = self._trainer.train_spec
        if step == train.num_steps - 1:
            self._wait()
        elif train.checkpoint_every_steps and (step + 1) % train.checkpoint_every_steps == 0:
            self._save(step + 1)

    def _save(self, num_steps_done: int) -> None:
        assert self._writer is not None
        if num_steps_done == self._num_saved_steps:
            return
        started = time.perf_counter()
        position = self._trainer.recorder.position
        position.reach(f"the checkpoint after step {num_steps_done}")
        with position.waiting("losses"):
            self._history.read_losses()
        manifest = CheckpointManifest(
            num_steps_done=num_steps_done,
            plan_file=self._plan_file,
            evaluations=self._history.evaluated_steps(),
            environment=environment(DeviceKind(self._trainer.place.device.type)),
            files=(),
        )
        self._writer.write(checkpoint_state(self._trainer, self._history), manifest)
        self._num_saved_steps = num_steps_done
        self.seconds += time.perf_counter() - started

    def _wait(self) -> None:
        if self._writer is not None:
            started = time.perf_counter()
            self._writer.wait()
            self.seconds += time.perf_counter() - started

    def _end(self, num_steps_done: int, signal_number: int) -> None:
        """Leave once rank 0 has published the checkpoint: torchrun ends all others as soon as one rank has left."""
        with self._trainer.recorder.position.waiting("the last checkpoint"):
            meet(self._store, "saved", self._trainer.place.num_ranks)
        if self._num_saved_steps > 0:
            path = checkpoints_folder(self._out) / checkpoint_name(self._num_saved_steps)
            self._progress.show(num_steps_done, f"ended by a signal; to go on from {path}, add --resume auto")
        raise Interrupted(signal_number)
