"""How far replays are from what was recorded: as recorded, and from one setting to another.

    python -m tests.bench.replay --json figures.json                       # samples of others, and the H200 trace
    python -m tests.bench.replay --pairs traces/replay_h200x2_202612       # settings of our own (replay_pairs.py)

As recorded, every piece keeps its own time, so the error says whether what waits for what was rebuilt without
contradiction, and, for several ranks, whether cost and waiting of collectives were told apart. Two harder figures stand
beside it: with every short latency at its median, and every step from the pieces of the other steps of its trace. What
no dependency explains is printed as a share of the step.

Between settings, the median of what the steps of one predict is compared with the median of the steps of the other. A
pair whose steps make their batch on the host is printed, and left out of the mean that has a bar, with the reason: no
change says how long that takes.
"""

import argparse
import bisect
import os
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from executor.environment import environment
from simulator.readers.traces import read_recordings
from simulator.replay.apply import apply_change
from simulator.replay.changes import Change, parse_change
from simulator.replay.latencies import UNEXPLAINED_SECONDS
from simulator.replay.nodes import Piece, PieceKind
from simulator.replay.run import Run, errors_as_recorded, rebuild, replay
from simulator.specs.cluster import BUILT_IN_CLUSTERS, DeviceKind
from simulator.specs.recording import Recording
from tests.bench.replay_pairs import NUM_HEADS, Setting, read_settings, recorded_steps
from tests.bench.result import Better, Figure, print_figures, write_figures

SHARED = Path(os.environ.get("GRAPHPILOT_SHARED", Path(__file__).parents[3] / "shared"))
# Every Kineto file at hand that holds a whole step, and the rank of the one that does not say it.
SAMPLES: dict[str, tuple[str, tuple[int, ...]]] = {
    "A100, 16 ranks, rank 0, 5 steps": ("samples/kineto/a100_80gb_16ranks_a2a_rs_ag_rank0.json.gz", ()),
    "A100, AlexNet, one GPU": ("samples/kineto/a100_alexnet_single_gpu.json.gz", ()),
    "A100, DDP, rank 0 of 2, 3 steps": ("samples/kineto/a100_ddp_2ranks_nccl_meta_rank0.json.gz", ()),
    "V100, DLRM, all 8 ranks": ("samples/kineto/dlrm_8ranks", ()),
    "CPU, gloo, rank 34 of 300": ("samples/kineto/gloo_300ranks_cpu_only_rank34.json.gz", ()),
    "RTX 2080 Ti, 39 steps": ("samples/kineto/linear_kineto.json.gz", ()),
    "MI250, 2 steps": ("samples/kineto/mi250_single_gpu.json.gz", ()),
    "A100, host alone": ("samples/kineto/no_distributed_info.json.gz", (0,)),
    "A100, sampled kernels, rank 0 of 128, 2 steps": ("samples/kineto/sampled_128ranks_rank0.json.gz", ()),
    "H200, DDP, rank 0 of 2, 4 steps": ("measured/h200x2/kineto_ddp_rank0.json.gz", ()),
}
BAR_PERCENT = 2.0
PAIRS_BAR_PERCENT = 8.0
# A step that makes its batch for longer than this is one of making batches.
MAX_BATCH_RATIO = 0.1
# From which setting to which; the change follows from both.
PAIRS = (
    ("base", "wide"),
    ("wide", "base"),
    ("edges", "wide-edges"),
    ("base", "edges"),
    ("edges", "base"),
    ("wide", "wide-edges"),
    ("base", "bf16"),
    ("wide", "wide-bf16"),
    ("wide-bf16", "bf16"),
    ("part", "two"),
    ("two", "part"),
    ("wide-part", "wide-two"),
    ("part", "wide-two"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AsRecorded:
    """Errors of one sample's replay, as ratios.

    Attributes:
        step_error: of the mean step.
        single_error: mean absolute error of single steps.
        typical_error: of the mean step with short latencies at their median.
        other_steps_error: median absolute error of steps played with the pieces of the others; None for a single step.
        unexplained_ratio: latencies that nothing explains, on the busiest rank's streams, over the step.
    """

    step_error: float
    single_error: float
    typical_error: float
    other_steps_error: float | None
    unexplained_ratio: float


def as_recorded(run: Run) -> AsRecorded:
    """Return how far replays of a run are from its recording."""
    step_error, single_error = errors_as_recorded(run, replay(run))
    typical_error, _ = errors_as_recorded(run, replay(with_typical_latencies(run)))
    unexplained = max(rank.unexplained_seconds for rank in run.ranks) / run.num_steps
    return AsRecorded(
        step_error=step_error,
        single_error=single_error,
        typical_error=typical_error,
        other_steps_error=other_steps_error(run) if run.num_steps > 1 else None,
        unexplained_ratio=unexplained / run.recorded_step_seconds,
    )


def with_typical_latencies(run: Run) -> Run:
    """Return a run whose short latencies, of launches and within streams, have their median."""
    ranks = []
    for rank in run.ranks:
        found: dict[bool, list[float]] = defaultdict(list)
        for piece in rank.pieces:
            if _is_short_latency(piece):
                found[piece.stream.startswith("launches")].append(piece.duration_seconds)
        medians = {is_launch: statistics.median(seconds) for is_launch, seconds in found.items()}
        ranks.append(
            replace(
                rank,
                pieces=tuple(
                    replace(piece, duration_seconds=medians[piece.stream.startswith("launches")])
                    if _is_short_latency(piece)
                    else piece
                    for piece in rank.pieces
                ),
            )
        )
    return replace(run, ranks=tuple(ranks))


def _is_short_latency(piece: Piece) -> bool:
    return piece.kind is PieceKind.LATENCY and piece.duration_seconds <= UNEXPLAINED_SECONDS


def other_steps_error(run: Run) -> float:
    """Return the median absolute error of steps whose pieces take the median time of like pieces in the other steps.

    Like are pieces of one kind, name and stream that come at the same place of their step; a piece that no other step
    has keeps its time.
    """
    errors = []
    for left_out in range(run.num_steps):
        ranks = []
        for rank in run.ranks:
            keys = _places(rank.pieces, rank.recorded_boundaries)
            alike: dict[tuple[str, ...], list[float]] = defaultdict(list)
            for piece, (step, key) in zip(rank.pieces, keys, strict=True):
                if step != left_out:
                    alike[key].append(piece.duration_seconds)
            pieces = tuple(
                replace(piece, duration_seconds=statistics.median(alike[key]))
                if step == left_out and key in alike
                else piece
                for piece, (step, key) in zip(rank.pieces, keys, strict=True)
            )
            ranks.append(replace(rank, pieces=pieces))
        boundaries = replay(replace(run, ranks=tuple(ranks))).boundary_seconds
        for rank, replayed in zip(run.ranks, boundaries, strict=True):
            recorded = rank.recorded_boundaries[left_out + 1] - rank.recorded_boundaries[left_out]
            errors.append(abs((replayed[left_out + 1] - replayed[left_out]) / recorded - 1))
    return statistics.median(errors)


def _places(pieces: Sequence[Piece], boundaries: Sequence[float]) -> list[tuple[int, tuple[str, ...]]]:
    """Return the step of each piece, and what it has in common with like pieces of other steps."""
    counts: Counter[tuple[int, str, str, str]] = Counter()
    found: list[tuple[int, tuple[str, ...]]] = []
    for piece in pieces:
        if piece.operation is not None:  # launched at a boundary: of the step that begins
            step = min(bisect.bisect_right(boundaries, piece.order), len(boundaries) - 1) - 1
        else:  # ended at a boundary: of the step that ends
            step = bisect.bisect_left(boundaries, piece.recorded_end_seconds) - 1
        key = (step, piece.kind.value, piece.name, piece.stream)
        counts[key] += 1
        found.append((step, (*key[1:], str(counts[key]))))
    return found


def change_between(old: Setting, new: Setting) -> str:
    """Return the change that leads from one setting to another, as `graphpilot replay --change` takes it."""
    sizes: dict[int, int] = {}
    if old.width != new.width:
        for times in (1, 2, 3, 4, 6):
            sizes[times * old.width] = times * new.width
        sizes[old.width // NUM_HEADS] = new.width // NUM_HEADS
        sizes[old.num_elements] = new.num_elements
    parts = [f"size:{length}={changed}" for length, changed in sizes.items() if length != changed]
    if old.kept_edges != new.kept_edges:
        parts.append(f"edges:{old.kept_edges}={new.kept_edges}")
    if old.precision is not new.precision:
        parts.append(f"precision={new.precision}")
    if old.num_ranks != new.num_ranks:
        parts.append(f"ranks={new.num_ranks}")
    if old.num_ranks == 1 < new.num_ranks:
        parts.append(f"all_reduce={4 * new.num_elements} B")
    return ", ".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairResult:
    """What the recording of one setting predicts for another.

    Attributes:
        predicted_seconds, recorded_seconds: of a step, medians over steps.
        predicted_work_seconds, recorded_work_seconds: of a step, sum of a rank's kernels, collectives left out.
        left_out: why it says nothing of the prediction; empty if it does.
    """

    predicted_seconds: float
    recorded_seconds: float
    predicted_work_seconds: float
    recorded_work_seconds: float
    left_out: str = ""

    @property
    def error_ratio(self) -> float:
        """Predicted against recorded."""
        return self.predicted_seconds / self.recorded_seconds - 1

    @property
    def work_error_ratio(self) -> float:
        """The device's work predicted against recorded."""
        return self.predicted_work_seconds / self.recorded_work_seconds - 1 if self.recorded_work_seconds else 0.0


def predict_pairs(folder: Path) -> dict[str, PairResult]:
    """Return the results by pair; predictions see the source's recording alone."""
    known = {setting.name: setting for setting in read_settings(folder)}
    recordings = {name: [read_recordings([step]) for step in recorded_steps(folder / name)] for name in known}
    runs = {name: [rebuild(step) for step in steps] for name, steps in recordings.items()}
    shares = {name: max(map(batch_share, steps)) for name, steps in recordings.items()}
    found = {}
    for source, target in PAIRS:
        if source not in known or target not in known:
            continue
        change = parse_change(change_between(known[source], known[target]))
        changed = [_changed(run, change) for run in runs[source]]
        making = [f"{name} {100 * shares[name]:.0f} %" for name in (source, target) if shares[name] > MAX_BATCH_RATIO]
        found[f"{source} to {target}"] = PairResult(
            predicted_seconds=statistics.median(replay(run).step_seconds for run in changed),
            recorded_seconds=statistics.median(run.recorded_step_seconds for run in runs[target]),
            predicted_work_seconds=statistics.median(map(_work_seconds, changed)),
            recorded_work_seconds=statistics.median(map(_work_seconds, runs[target])),
            left_out=f"the host makes the batch within the step, which takes so much of it: {', '.join(making)}"
            if making
            else "",
        )
    return found


def _changed(run: Run, change: Change) -> Run:
    recorded_on = None if run.device_name else BUILT_IN_CLUSTERS["h200x8"]
    return apply_change(run, change, recorded_on).run


def _work_seconds(run: Run) -> float:
    """Return the sum of a rank's kernels in a step, collectives left out: what neither hosts nor other ranks change."""
    operations = [(p.duration_seconds, p.operation) for rank in run.ranks for p in rank.pieces]
    own = [seconds for seconds, operation in operations if operation is not None and operation.message is None]
    return sum(own) / len(run.ranks) / run.num_steps


def batch_share(recordings: Sequence[Recording]) -> float:
    """Return the share of a step in which the host makes its batch, on the rank that takes longest."""
    shares = [0.0]
    for recording in recordings:
        ranges = [one for one in recording.operators if one.is_annotation]
        making = sum(one.duration_seconds for one in ranges if one.name == "batch")
        steps = sum(one.duration_seconds for one in ranges if one.name.startswith("ProfilerStep"))
        shares.append(making / steps if steps else 0.0)
    return max(shares)


def figures_of_samples(shared: Path) -> list[Figure]:
    """Return the figures of every sample."""
    figures = []
    for name, (path, ranks) in SAMPLES.items():
        found = as_recorded(rebuild(read_recordings([shared / path], ranks=ranks)))
        figures += [
            _figure(f"{name}: step as recorded", 100 * abs(found.step_error), BAR_PERCENT),
            _figure(f"{name}: single steps as recorded", 100 * found.single_error, BAR_PERCENT),
            _figure(f"{name}: step with typical latencies", 100 * abs(found.typical_error), None),
        ]
        if found.other_steps_error is not None:
            figures.append(_figure(f"{name}: steps from the other steps", 100 * found.other_steps_error, None))
        figures.append(_figure(f"{name}: unexplained, of the step", 100 * found.unexplained_ratio, None))
    return figures


def figures_of_pairs(results: Mapping[str, PairResult]) -> list[Figure]:
    """Return the error of each pair of settings, and their mean: of those that count, and of all."""
    figures = [
        _figure(f"{name}: step{' (left out of the mean)' if one.left_out else ''}", 100 * abs(one.error_ratio), None)
        for name, one in results.items()
    ]
    figures += [
        _figure(f"{name}: work of the device", 100 * abs(one.work_error_ratio), None) for name, one in results.items()
    ]
    counted = [abs(one.error_ratio) for one in results.values() if not one.left_out]
    if counted:
        figures.append(_figure(f"mean of {len(counted)} pairs", 100 * statistics.mean(counted), PAIRS_BAR_PERCENT))
    if 0 < len(results) != len(counted):
        mean = statistics.mean(abs(one.error_ratio) for one in results.values())
        figures.append(_figure(f"mean of all {len(results)} pairs", 100 * mean, None))
    return figures


def _figure(name: str, percent: float, bar: float | None) -> Figure:
    return Figure(name=name, value=percent, unit="%", bar=bar, better=Better.LOWER)


def main(arguments: list[str] | None = None) -> int:
    """Replay and report; return the exit status, 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--pairs", type=Path, help="folder of tests.bench.replay_pairs; its pairs instead of the samples"
    )
    parser.add_argument("--shared", type=Path, default=SHARED, help="folder with samples and measured")
    parser.add_argument("--json", type=Path, help="write the figures here")
    chosen = parser.parse_args(arguments)
    results = predict_pairs(chosen.pairs) if chosen.pairs else {}
    figures = figures_of_pairs(results) if chosen.pairs else figures_of_samples(chosen.shared)
    print_figures(figures, title="errors of replays")
    for name, result in results.items():
        if result.left_out:
            print(f"left out of the mean: {name}: {result.left_out}")
    if chosen.json:
        write_figures(chosen.json, figures, dict(environment(DeviceKind.CPU)))
    return 0 if all(figure.holds for figure in figures) else 1


if __name__ == "__main__":
    raise SystemExit(main())
