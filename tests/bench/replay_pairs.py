"""Records training steps of the executor in several settings, so that one can be predicted from another.

    python -m tests.bench.replay_pairs --out traces/replay_h200x2_202612          # one or two GPUs, some minutes
    python -m tests.bench.replay_pairs --out pairs --device cpu                   # tiny: checks the logic

Every setting is a training by `run_plans`, eager, of whose last steps each is kept as the file of torch's profiler for
each rank (five megabytes in all, gzipped), beside `settings.json`, which says what each setting is. Three things keep a
recording to what a change can describe (`traces/replay_h200x2_202611` had none of them): parts stay on the device, else
a step is the making of its batch on the host; several steps are kept, as the host takes up to a third longer for the
same launches from one to the next, and the one with the profiler's first use is not; and the graph is large enough for
the device to be what a step takes, in bf16 too. Then

    python -m tests.bench.replay --pairs FOLDER

predicts the step of one setting from the recording of another, and compares. Predictions need no GPU and see the file
of the source alone.
"""

import argparse
import json
import shutil
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from executor.environment import environment, local_cluster
from executor.run import PlanRun, run_plans
from simulator.errors import SpecError
from simulator.readers.generators import materialise
from simulator.readers.graphs import read_graph
from simulator.specs.cluster import DeviceKind
from simulator.specs.graph import CommunityGraph
from simulator.specs.model import ModelSpec
from simulator.specs.train import TrainSpec
from simulator.specs.units import Dtype
from simulator.workload import num_parameters
from tests.plans import Choices, plan_file_of, plan_of

# No length of a dimension that changes is one that stays: those of heads and widths are powers of 2, from 8.
NUM_CLASSES, NUM_FEATURES, NUM_LAYERS, NUM_HEADS = 10, 100, 3, 4
NUM_STEPS, NUM_TRACED_STEPS = 10, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a training step is made of.

    Attributes:
        num_nodes, num_edges: of the graph, self loops not counted.
        num_parts: of the graph; a step of a rank is one part.
        num_elements: of all parameters; 0 before it is known.
        kept_edges: into the nodes of a batch, self loops counted, of the first part where there are several; 0 before
            they are known.
    """

    name: str
    width: int
    num_nodes: int
    num_edges: int
    precision: Dtype = Dtype.FLOAT32
    num_ranks: int = 1
    num_parts: int = 1
    num_elements: int = 0
    kept_edges: int = 0

    @property
    def model(self) -> ModelSpec:
        """The model that it trains."""
        return ModelSpec(
            width=self.width, num_heads=NUM_HEADS, num_layers=NUM_LAYERS, feed_forward_width=2 * self.width
        )


def settings(kind: DeviceKind, num_devices: int) -> list[Setting]:
    """Return the settings to record; on CPUs tiny ones."""
    on_gpu = kind is DeviceKind.CUDA
    nodes, edges, width = (400_000, 8_000_000, 128) if on_gpu else (1_500, 15_000, 32)
    base = Setting(name="base", width=width, num_nodes=nodes, num_edges=edges)
    found = [
        base,
        replace(base, name="wide", width=2 * width),
        replace(base, name="edges", num_edges=2 * edges),
        replace(base, name="wide-edges", width=2 * width, num_edges=2 * edges),
        replace(base, name="part", num_parts=2),
        replace(base, name="wide-part", width=2 * width, num_parts=2),
    ]
    if on_gpu:
        found += [
            replace(base, name="bf16", precision=Dtype.BFLOAT16),
            replace(base, name="wide-bf16", width=2 * width, precision=Dtype.BFLOAT16),
        ]
    if num_devices > 1:
        found += [
            replace(base, name="two", num_parts=2, num_ranks=2),
            replace(base, name="wide-two", width=2 * width, num_parts=2, num_ranks=2),
        ]
    return found


def record(kind: DeviceKind, out: Path, num_devices: int) -> list[Setting]:
    """Train every setting and keep its files; return the settings with what was counted.

    Raises:
        SpecError: if the folder holds recordings already.
    """
    if (out / "settings.json").exists():
        raise SpecError(f"{out}: must hold no recordings yet; name a new folder, as one is never edited after the fact")
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder_name:
        folder = Path(folder_name)
        prepared = [_prepared(setting, kind, folder, out) for setting in settings(kind, num_devices)]
        run_plans([run for _, run in prepared])
    found = [setting for setting, _ in prepared]
    for setting in found:
        shutil.rmtree(recorded_steps(out / setting.name)[0])  # with the profiler's first use
    content = {"settings": [asdict(one) for one in found], "environment": dict(environment(kind))}
    (out / "settings.json").write_text(json.dumps(content, indent=1) + "\n")
    return found


def _prepared(setting: Setting, kind: DeviceKind, folder: Path, out: Path) -> tuple[Setting, PlanRun]:
    """Return a setting with its counts, and its plan on disk."""
    source = CommunityGraph(
        num_nodes=setting.num_nodes,
        num_edges=setting.num_edges,
        num_features=NUM_FEATURES,
        num_classes=NUM_CLASSES,
    )
    spec, graph = read_graph(materialise(source, folder / "graphs"), base=folder)
    home = folder / setting.name
    home.mkdir()
    choices = Choices(
        data_parallel_degree=setting.num_ranks,
        num_parts=setting.num_parts if setting.num_parts > 1 else 0,
        precision=setting.precision,
        keep_batches=setting.num_parts > 1,
    )
    plan = plan_of(choices, graph, setting.model, home)
    train = TrainSpec(
        num_steps=NUM_STEPS, learning_rate=1e-3, evaluate_every_steps=NUM_STEPS, trace_steps=NUM_TRACED_STEPS
    )
    file = plan_file_of(plan, spec, setting.model, local_cluster(kind), train, home / "plan.json")
    run = PlanRun(plan_path=home / "plan.json", out=home, quiet=True, kineto=out / setting.name)
    counted = replace(
        setting,
        num_elements=num_parameters(file.graph, setting.model),
        kept_edges=plan.partition.parts[0].edges_from[0],
    )
    return counted, run


def recorded_steps(folder: Path) -> list[Path]:
    """Return the folders of a setting's steps, in their order; the folder itself where it holds one step's files."""
    steps = sorted(folder.glob("step*"), key=lambda step: int(step.name.removeprefix("step")))
    return steps or [folder]


def read_settings(folder: Path) -> list[Setting]:
    """Return the settings that a folder holds recordings of.

    Raises:
        SpecError: if it holds none.
    """
    path = folder / "settings.json"
    try:
        rows = json.loads(path.read_text())["settings"]
        return [Setting(**{**row, "precision": Dtype(row["precision"])}) for row in rows]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise SpecError(f"{path}: must be what tests.bench.replay_pairs wrote, got {error!r}; record again") from error


def main(arguments: list[str] | None = None) -> int:
    """Record; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=list(DeviceKind), default=DeviceKind.CUDA, type=DeviceKind)
    parser.add_argument("--devices", type=int, help="use so many; all by default, two at most")
    parser.add_argument("--out", type=Path, required=True, help="new folder for the recordings")
    chosen = parser.parse_args(arguments)
    started = time.perf_counter()
    available = torch.cuda.device_count() if chosen.device is DeviceKind.CUDA else local_cluster().devices_per_host
    if available < 1:
        parser.error("--device cuda needs a GPU, and this machine has none: use --device cpu")
    found = record(chosen.device, chosen.out, min(chosen.devices or available, available, 2))
    size = sum(file.stat().st_size for file in chosen.out.rglob("*.gz"))
    print(f"{len(found)} settings, {size / 1e6:.1f} MB, {time.perf_counter() - started:.0f} s: {chosen.out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
