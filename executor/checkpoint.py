"""Checkpoints by torch.distributed.checkpoint: written while training goes on, whole or not at all, and restored."""

import datetime
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from executor.compat import ignore_lone_process_warnings
from executor.history import History
from executor.mesh import Place
from executor.resume import MANIFEST, Checkpoint, checkpoint_name, checkpoint_paths, checkpoints_folder, file_entry
from executor.train import Trainer
from simulator.errors import RunError, SpecError
from simulator.specs.checkpoint import CheckpointManifest
from simulator.specs.files import write_manifest

logger = logging.getLogger(__name__)

# Ranks that have written their file wait so long for the slowest one.
_WRITE_SECONDS = 600.0
# A run that failed waits so long for the checkpoint under way; a lost peer ends the wait before.
_LAST_WRITE_SECONDS = 30.0


class CheckpointWriter:
    """Writes checkpoints of a run; every rank calls each method, at the same steps.

    All ranks write tensors into a folder under another name. Rank 0 adds a manifest with the checksums of all files,
    renames the folder once all of it is on disk, and removes what is older than the ones to keep.

    Args:
        out: folder of the run.
        num_kept: how many of the newest checkpoints stay.
        asynchronous: write in a thread, from a copy in the host's memory.
        calibration: a file to be kept beside the tensors; None if the run knows none.
    """

    def __init__(
        self, out: Path, place: Place, *, num_kept: int, asynchronous: bool, calibration: Path | None = None
    ) -> None:
        self._out, self._place, self._num_kept, self._calibration = out, place, num_kept, calibration
        self._asynchronous = asynchronous
        self._group: dist.ProcessGroup | None = None
        if place.world is not None:
            # Its own, since collectives of the thread must not come between those of the steps; on GPUs gloo too.
            self._group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=_WRITE_SECONDS))
        self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        ignore_lone_process_warnings()

    def __enter__(self) -> "CheckpointWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._pending is not None:  # only after an error; what is under way may still become whole
            wait([self._pending], timeout=_LAST_WRITE_SECONDS)
        self._threads.shutdown(wait=False)

    @property
    def is_writing(self) -> bool:
        """Whether a checkpoint is under way in the thread."""
        return self._pending is not None and not self._pending.done()

    def write(self, state: dict[str, Any], manifest: CheckpointManifest) -> None:
        """Begin a checkpoint once the one before is whole; return when training may change the state again.

        Args:
            state: nested tables of tensors, alike on all ranks but for tables that are a single rank's.
            manifest: of this checkpoint, files left out.

        Raises:
            RunError: if files cannot be written, be it those of the checkpoint before.
        """
        self.wait()
        staging = checkpoints_folder(self._out) / f".{checkpoint_name(manifest.num_steps_done)}.tmp"
        storage, alone = FileSystemWriter(staging), self._group is None
        with self._told_errors():
            if self._asynchronous:
                written = async_save(state, storage_writer=storage, process_group=self._group, no_dist=alone)
                assert isinstance(written, Future), written  # by default torch has copied the state when it returns
                self._pending = self._threads.submit(self._publish, written, staging, manifest)
            else:
                done: Future[Metadata] = Future()
                done.set_result(save(state, storage_writer=storage, process_group=self._group, no_dist=alone))
                self._publish(done, staging, manifest)

    def wait(self) -> None:
        """Return when no checkpoint is under way.

        Raises:
            RunError: if the one under way could not be written.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            with self._told_errors():
                pending.result()

    def _publish(self, written: Future[Metadata], staging: Path, manifest: CheckpointManifest) -> None:
        """Wait for the tensors of all ranks, add the manifest and rename the folder; remove what is too old."""
        metadata = written.result()
        if self._place.rank > 0:
            return
        _require_files(staging, metadata)
        if self._calibration is not None:
            shutil.copyfile(self._calibration, staging / self._calibration.name)
        files = tuple(file_entry(path) for path in sorted(staging.iterdir()))
        write_manifest(staging / MANIFEST, replace(manifest, files=files))
        _sync_folder(staging)
        staging.rename(checkpoints_folder(self._out) / checkpoint_name(manifest.num_steps_done))
        _sync_folder(staging.parent)
        for path in checkpoint_paths(self._out)[: -self._num_kept]:
            shutil.rmtree(path.rename(path.with_name(f".{path.name}.old.tmp")))

    @contextmanager
    def _told_errors(self) -> Iterator[None]:
        """Turn errors of files into those of the run; torch gives every rank those of all."""
        where = checkpoints_folder(self._out)
        try:
            yield
        except CheckpointException as error:
            rank, (cause, _) = min(error.failures.items())
            raise RunError(f"{where}: rank {rank} cannot write its part of a checkpoint: {_reason(cause)}") from None
        except (OSError, SpecError) as error:
            raise RunError(f"{where}: a checkpoint cannot be written: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return (str(error) or type(error).__name__).splitlines()[0]


def _require_files(folder: Path, metadata: Metadata) -> None:
    """Refuse a checkpoint whose files lie on several hosts.

    Raises:
        RunError: naming a file that is not here.
    """
    for name in sorted({stored.relative_path for stored in (metadata.storage_data or {}).values()}):
        if not (folder / name).exists():
            raise RunError(
                f"{folder.parent}: must lie on storage that all hosts share, but {name}, which another host wrote, is "
                "not there; write elsewhere with --out"
            )


def _sync_folder(folder: Path) -> None:
    """Bring the names in a folder to disk."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


# --- What the tensors of a checkpoint are called.


def checkpoint_state(trainer: Trainer, history: History) -> dict[str, Any]:
    """Return the tensors of a checkpoint in nested tables, those of the trainer as they are in use.

    Raises:
        RunError: if parameters are infinite or not a number.
    """
    state = trainer.state_dict()
    _require_finite(trainer.parameters.own, len(history.losses))
    state["losses"] = torch.tensor(history.losses, dtype=torch.float64)
    if history.best_weights:
        state["best"] = history.best_weights
    if mine := _held_tensors(trainer):
        state[f"rank{trainer.place.rank}"] = mine
    return state


def restore(trainer: Trainer, history: History, checkpoint: Checkpoint) -> None:
    """Put a trainer and a history where a checkpoint was made; no collective is called.

    State of single ranks is restored on as many ranks with the same layers, else it starts afresh, with a warning.

    Raises:
        SpecError: if this version of torch cannot read the files.
    """
    path, manifest = checkpoint.path, checkpoint.manifest
    reader = FileSystemReader(path)
    stored = reader.read_metadata().state_dict_metadata
    state = trainer.state_dict()
    random = state.pop("random")  # a checkpoint of GPUs may go on on cores, and the other way round
    if kept := {key: value for key, value in random.items() if _is_stored(f"random.{key}", value, stored)}:
        state["random"] = kept
    state["losses"] = torch.empty(manifest.num_steps_done, dtype=torch.float64)
    if manifest.evaluations:
        state["best"] = {name: torch.empty(shape) for name, shape in trainer.parameters.shapes.items()}
    if ours := _rank_states(trainer, checkpoint, stored):
        state[f"rank{trainer.place.rank}"] = ours
    ignore_lone_process_warnings()
    try:
        load(state, storage_reader=reader, no_dist=True)
    except CheckpointException as error:
        _, (cause, _) = min(error.failures.items())
        versions = dict(manifest.environment)
        raise SpecError(
            f"{path}: cannot be read by torch {torch.__version__}: {_reason(cause)}; it was written by torch "
            f"{versions.get('torch', 'unknown')}"
        ) from error
    trainer.load_state_dict(state)
    for name, tensors in ours.items():
        trainer.rank_states[name].load_state_dict(tensors)
    history.restore(state["losses"].tolist(), manifest.evaluations, state.get("best", {}))


def _held_tensors(trainer: Trainer) -> dict[str, dict[str, Tensor]]:
    """Return the tensors of this rank alone, by what holds them; what holds none is left out."""
    found = {name: held.state_dict() for name, held in trainer.rank_states.items()}
    return {name: tensors for name, tensors in found.items() if tensors}


def _rank_states(trainer: Trainer, checkpoint: Checkpoint, stored: Mapping[str, Any]) -> dict[str, dict[str, Tensor]]:
    """Return this rank's own tensors that a checkpoint has in the same form, by what holds them."""
    place, saved_plan = trainer.place, checkpoint.manifest.plan_file.plan
    num_ranks, has_same_layers = saved_plan.num_ranks, saved_plan.stages == trainer.plan.stages
    found = {}
    for name, tensors in _held_tensors(trainer).items():
        prefix = f"rank{place.rank}.{name}"
        fits = all(_is_stored(f"{prefix}.{key}", value, stored) for key, value in tensors.items())
        if num_ranks == place.num_ranks and has_same_layers and fits:
            found[name] = tensors
        elif place.rank == 0:
            logger.warning(
                "%s: the state of %s on each rank starts afresh, since the checkpoint has none like it for %d ranks",
                checkpoint.path,
                name,
                place.num_ranks,
            )
    return found


def _is_stored(name: str, tensor: Tensor, stored: Mapping[str, Any]) -> bool:
    """Return whether a checkpoint holds a tensor of this name and shape."""
    found = stored.get(name)
    return isinstance(found, TensorStorageMetadata) and found.size == tensor.size()


def _require_finite(parameters: Mapping[str, Tensor], num_steps_done: int) -> None:
    """Refuse to keep what no training can go on from; with a single wait for the device."""
    if not bool(torch.stack([value.isfinite().all() for value in parameters.values()]).all()):
        raise RunError(
            f"parameters are infinite or not a number after step {num_steps_done}: lower train.learning_rate or "
            "train.max_gradient_norm, or train in fp32"
        )
