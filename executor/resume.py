"""Which checkpoint a run goes on from: found, every byte of it checked, and whether it is of the same training."""

import hashlib
import re
import shutil
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from simulator.errors import SpecError
from simulator.specs.checkpoint import CheckpointFile, CheckpointManifest
from simulator.specs.decision import PlanFile
from simulator.specs.files import read_manifest
from simulator.specs.plan import Plan

AUTO = "auto"
MANIFEST = "manifest.json"
_FOLDER = "checkpoints"
_NAME = re.compile(r"step(\d{8,})")
_MOST_TOLD = 3  # differences in one sentence
# Settings of [train] that say how a run is watched and kept, and change no loss.
_WITHOUT_EFFECT_ON_LOSSES = frozenset(
    {
        "evaluate_every_steps",
        "trace_steps",
        "compile_dense",
        "checkpoint_every_steps",
        "num_checkpoints_kept",
        "asynchronous_checkpoints",
        "collective_timeout_seconds",
        "cpu_affinity",
    }
)
# Choices of a plan that change what is learned, beside its batches.
_PLAN_FIELDS_OF_LOSSES = ("precision", "exchange_precision", "gradient_compression", "between_edges")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint on disk, and what its manifest says."""

    path: Path
    manifest: CheckpointManifest


def checkpoints_folder(out: Path) -> Path:
    """Return the folder of a run's checkpoints, in that of its results."""
    return out / _FOLDER


def checkpoint_name(num_steps_done: int) -> str:
    """Return the name of the folder of a checkpoint."""
    return f"step{num_steps_done:08d}"


def checkpoint_paths(out: Path) -> list[Path]:
    """Return the checkpoints of a run, those of fewer steps first; a name appears when all of it is on disk."""
    found = [path for path in checkpoints_folder(out).glob("step*") if _NAME.fullmatch(path.name)]
    return sorted(found, key=_num_steps_done)


def remove_unfinished_checkpoints(out: Path) -> None:
    """Remove what a run that was ended in the middle of writing left behind."""
    for path in checkpoints_folder(out).glob(".step*.tmp"):
        shutil.rmtree(path, ignore_errors=True)


def file_entry(path: Path) -> CheckpointFile:
    """Return size and checksum of a file as a manifest holds them."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
        return CheckpointFile(name=path.name, num_bytes=file.tell(), sha256=digest.hexdigest())


def checkpoint_to_resume(resume: str, out: Path, file: PlanFile) -> Checkpoint | None:
    """Return the checkpoint that a run goes on from, each of its bytes checked; None to start afresh.

    Args:
        resume: path of a checkpoint, or "auto" for the newest one in `out`, if there is any.
        out: folder of the run.
        file: the plan that is to be run.

    Raises:
        SpecError: if it is corrupt, or of another graph, model or seed; if `out` holds checkpoints of later steps.
    """
    paths = checkpoint_paths(out)
    if resume == AUTO:
        if not paths:
            return None
        path = paths[-1]
    else:
        path = Path(resume)
        _require_checkpoint(path)
    try:
        checkpoint = Checkpoint(path=path, manifest=whole_manifest(path))
    except SpecError as error:
        raise SpecError(f"{error}; {_way_round(path, paths, resume)}") from None
    _require_same_training(checkpoint, file)
    if paths and _num_steps_done(paths[-1]) > checkpoint.manifest.num_steps_done:
        raise SpecError(
            f"{paths[-1]} is of more steps than {path}, from which the run is to go on: remove it, or write elsewhere "
            "with --out"
        )
    return checkpoint


def require_no_checkpoints(out: Path) -> None:
    """Refuse to mix the checkpoints of a run that starts afresh with those of another one.

    Raises:
        SpecError: if there are any.
    """
    if paths := checkpoint_paths(out):
        raise SpecError(
            f"{paths[-1]} is of an earlier run: go on from it with --resume auto, remove {paths[-1].parent}, or write "
            "elsewhere with --out"
        )


def whole_manifest(path: Path) -> CheckpointManifest:
    """Return the manifest of a checkpoint after comparing every file with it.

    Raises:
        SpecError: if a file is missing or changed.
    """
    manifest = read_manifest(path / MANIFEST)
    for entry in manifest.files:
        where = path / entry.name
        rule = f"{where}: sha256 must be {entry.sha256}, as {MANIFEST} says"
        try:
            found = file_entry(where)
        except OSError as error:
            raise SpecError(f"{rule}, got no file ({error.strerror}): the checkpoint is corrupt") from None
        if found != entry:
            raise SpecError(f"{rule}, got {found.sha256} in {found.num_bytes:,} bytes: the checkpoint is corrupt")
    return manifest


def unchecked(path: Path) -> Checkpoint:
    """Return a checkpoint that was checked before the ranks were started."""
    return Checkpoint(path=path, manifest=read_manifest(path / MANIFEST))


def resume_hint(out: Path) -> str:
    """Return how to go on after a failure, in words; empty if nothing was kept."""
    paths = checkpoint_paths(out)
    return f"go on from {paths[-1]} with --resume auto" if paths else ""


def changes_of_losses(checkpoint: Checkpoint, file: PlanFile) -> list[str]:
    """Say what makes the losses go on otherwise than they would have without a stop, one sentence each."""
    before = checkpoint.manifest.plan_file
    found = [
        f"{name} was {old} and is {new}"
        for name, old, new in _differences("train", before.train, file.train)
        if name.removeprefix("train.") not in _WITHOUT_EFFECT_ON_LOSSES
    ]
    for name in _PLAN_FIELDS_OF_LOSSES:
        old, new = getattr(before.plan, name), getattr(file.plan, name)
        if old != new:
            found.append(f"plan.{name} was {old} and is {new}")
    if _batches(before.plan) != _batches(file.plan):
        found.append("the plans put other nodes together in a batch")
    return found


def _batches(plan: Plan) -> object:
    """Return what the batches of a plan depend on."""
    if plan.is_full_graph:
        return None
    if plan.sampled is not None:
        return plan.sampled.fan_outs, plan.sampled.seeds_per_batch, plan.data_parallel_degree
    return plan.partition.sha256, plan.parts_per_batch, plan.data_parallel_degree


def _require_checkpoint(path: Path) -> None:
    if (path / MANIFEST).exists():
        return
    inside = [*checkpoint_paths(path), *checkpoint_paths(path.parent)]
    fix = f"; did you mean {inside[-1]}?" if inside and path not in inside else ""
    found = "a folder without" if path.is_dir() else "nothing there"
    raise SpecError(f"{path}: --resume must name auto or a checkpoint, a folder with {MANIFEST}, got {found}{fix}")


def _way_round(path: Path, paths: list[Path], resume: str) -> str:
    """Return how to go on if a checkpoint is corrupt, as the end of a message."""
    for earlier in reversed([other for other in paths if _num_steps_done(other) < _num_steps_done(path)]):
        try:
            whole_manifest(earlier)
        except SpecError:
            continue
        return f"to go on from the one before, {earlier}, remove {path} and use --resume auto"
    return "there is none before it: remove it to start afresh" if resume == AUTO else "give another one"


def _num_steps_done(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else 0


def _require_same_training(checkpoint: Checkpoint, file: PlanFile) -> None:
    """Refuse a checkpoint from which the losses could not go on.

    Raises:
        SpecError: naming each field with both values.
    """
    before, where = checkpoint.manifest.plan_file, checkpoint.path
    found = [
        difference
        for difference in _differences("graph", before.graph, file.graph)
        if difference[0] != "graph.source.path"  # a store may be moved; its arrays' hash tells whether it is the same
    ]
    found += _differences("model", before.model, file.model)
    if before.train.seed != file.train.seed:
        found.append(("train.seed", before.train.seed, file.train.seed))
    if found:
        told = "; ".join(
            f"{name} must be {old} as in the checkpoint, got {new}" for name, old, new in found[:_MOST_TOLD]
        )
        more = f"; and {len(found) - _MOST_TOLD} fields more" if len(found) > _MOST_TOLD else ""
        raise SpecError(f"{where}: {told}{more}; plan for the checkpoint's, or start afresh in another folder")
    done, wanted = checkpoint.manifest.num_steps_done, file.train.num_steps
    if done >= wanted:
        raise SpecError(f"{where}: train.num_steps must exceed the {done} steps that were done, got {wanted}; raise it")


def _differences(name: str, before: Any, now: Any) -> list[tuple[str, Any, Any]]:
    """Return the fields in which two specs of a class differ, by their names, with both values."""
    found = []
    for field in fields(before):
        old, new = getattr(before, field.name), getattr(now, field.name)
        if hasattr(old, "__dataclass_fields__") and type(old) is type(new):
            found += _differences(f"{name}.{field.name}", old, new)
        elif old != new:
            found.append((f"{name}.{field.name}", old, new))
    return found
