"""Exercises every torch, Triton and NCCL API in use on one or two GPUs; most of its minutes compile kernels.

    python -m tests.smoke_gpu

Runs plans of every kind on a small graph, with tracing, and checks that plans of one batch kind learn alike.
Continuous integration has no GPU, so this is run first whenever one is at hand.
"""

import contextlib
import json
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from executor.dry_run import dry_run
from executor.environment import environment, local_cluster
from executor.run import PlanRun, run_plans
from simulator.readers.generators import materialise
from simulator.readers.graphs import read_graph
from simulator.specs.cluster import DeviceKind
from simulator.specs.files import read_trace
from simulator.specs.gradients import CompressionKind, GradientCompression
from simulator.specs.graph import CommunityGraph
from simulator.specs.model import EdgeBias, ModelSpec
from simulator.specs.plan import Exchange, ExchangePayload, Offload, ParameterSharding, Recompute, StepMode
from simulator.specs.train import TrainSpec
from simulator.specs.units import KIB, Dtype
from tests.plans import Choices, plan_file_of, plan_of

MODEL = ModelSpec(
    width=64,
    num_heads=4,
    num_layers=2,
    feed_forward_width=128,
    dropout_ratio=0.1,
    edge_bias=EdgeBias.DEGREE,
    random_walk_encodings=4,
)
TRAIN = TrainSpec(num_steps=12, learning_rate=0.003, evaluate_every_steps=6, trace_steps=2, checkpoint_every_steps=5)
GRAPH = CommunityGraph(num_nodes=6001, num_edges=40_000, num_classes=8)

FULL_GRAPH = {
    "full graph": Choices(),
    "full graph, layers recomputed": Choices(recompute=Recompute.LAYER),
    "full graph, recomputed and on the host": Choices(
        recompute=(Recompute.SELECTIVE, Recompute.ATTENTION),
        offload=Offload.ACTIVATIONS,
        offload_min_bytes=1,
        offload_optimizer=True,
    ),
    "replayed, dense recomputed": Choices(step_mode=StepMode.CUDA_GRAPH, recompute=Recompute.DENSE),
    "overlapped halo, recomputed and on the host": Choices(
        graph_parallel_degree=2,
        recompute=(Recompute.DENSE, Recompute.ATTENTION),
        overlap_exchange=True,
        offload=Offload.ACTIVATIONS,
        offload_min_bytes=1,
    ),
    "replayed": Choices(step_mode=StepMode.CUDA_GRAPH),
    "replayed, layers recomputed": Choices(step_mode=StepMode.CUDA_GRAPH, recompute=Recompute.LAYER),
    "replayed, dense parts compiled": Choices(step_mode=StepMode.CUDA_GRAPH),
    "halo": Choices(graph_parallel_degree=2),
    "replayed on two": Choices(graph_parallel_degree=2, step_mode=StepMode.CUDA_GRAPH),
    "replayed on two, overlapped halo": Choices(
        graph_parallel_degree=2, step_mode=StepMode.CUDA_GRAPH, overlap_exchange=True
    ),
    "replayed on two, heads, dense parts compiled": Choices(
        graph_parallel_degree=2, step_mode=StepMode.CUDA_GRAPH, exchange=Exchange.HEAD_ALL_TO_ALL
    ),
    "all-gather": Choices(graph_parallel_degree=2, exchange=Exchange.ALL_GATHER),
    "overlapped halo": Choices(graph_parallel_degree=2, overlap_exchange=True),
    "overlapped halo and all-gather of rows, recomputed": Choices(
        graph_parallel_degree=2,
        exchange=(Exchange.HALO, Exchange.ALL_GATHER),
        recompute=(Recompute.LAYER, Recompute.NONE),
        overlap_exchange=True,
        exchange_payload=ExchangePayload.ROWS,
    ),
    "heads, chunks": Choices(
        graph_parallel_degree=2, exchange=Exchange.HEAD_ALL_TO_ALL, exchange_chunk_bytes=256 * KIB
    ),
    "both exchanges, recomputed, buckets": Choices(
        graph_parallel_degree=2,
        exchange=(Exchange.HALO, Exchange.ALL_GATHER),
        recompute=(Recompute.LAYER, Recompute.NONE),
        gradient_bucket_bytes=64 * 1024,
    ),
    "buckets beside the backward pass": Choices(
        graph_parallel_degree=2,
        recompute=(Recompute.LAYER, Recompute.NONE),
        gradient_bucket_bytes=64 * 1024,
        overlap_gradients=True,
    ),
    "two stages": Choices(pipeline_parallel_degree=2, stages=(1, 1)),
    "a part on two": Choices(graph_parallel_degree=2, part_ranks=(2,), recompute=(Recompute.LAYER, Recompute.NONE)),
    "a part on two, replayed": Choices(graph_parallel_degree=2, part_ranks=(2,), step_mode=StepMode.CUDA_GRAPH),
    "parts on two and one": Choices(graph_parallel_degree=3, part_ranks=(2, 1)),
    "heads on two": Choices(tensor_parallel_degree=2),
    "heads on two, layers recomputed, replayed": Choices(
        tensor_parallel_degree=2, recompute=Recompute.LAYER, step_mode=StepMode.CUDA_GRAPH
    ),
    "halo, parameters shared out": Choices(graph_parallel_degree=2, shard_parameters=ParameterSharding.ZERO3),
    "overlapped halo, parameters shared out and kept, recomputed": Choices(
        graph_parallel_degree=2,
        overlap_exchange=True,
        recompute=(Recompute.LAYER, Recompute.NONE),
        shard_parameters=ParameterSharding.ZERO2,
    ),
    "two graph ranks of two with half the heads, shared out": Choices(
        graph_parallel_degree=2, tensor_parallel_degree=2, shard_parameters=ParameterSharding.ZERO3
    ),
    "all entries of gradients beside the backward pass": Choices(
        graph_parallel_degree=2,
        gradient_bucket_bytes=64 * 1024,
        overlap_gradients=True,
        gradient_compression=GradientCompression(kind=CompressionKind.TOP_K, kept_ratio=1.0),
    ),
}
OTHERS = {
    "full graph, bf16, recomputed and on the host": Choices(
        precision=Dtype.BFLOAT16,
        recompute=(Recompute.ATTENTION, Recompute.SELECTIVE),
        offload=Offload.ACTIVATIONS,
        offload_min_bytes=1,
        offload_optimizer=True,
    ),
    "full graph, bf16": Choices(precision=Dtype.BFLOAT16),
    "replayed, bf16": Choices(step_mode=StepMode.CUDA_GRAPH, precision=Dtype.BFLOAT16),
    "overlapped halo in bf16, chunks": Choices(
        graph_parallel_degree=2,
        overlap_exchange=True,
        exchange_precision=Dtype.BFLOAT16,
        exchange_chunk_bytes=64 * KIB,
    ),
    "overlapped halo, bf16": Choices(graph_parallel_degree=2, overlap_exchange=True, precision=Dtype.BFLOAT16),
    "heads, bf16": Choices(graph_parallel_degree=2, exchange=Exchange.HEAD_ALL_TO_ALL, precision=Dtype.BFLOAT16),
    "a part on two, bf16": Choices(graph_parallel_degree=2, part_ranks=(2,), precision=Dtype.BFLOAT16),
    "heads on two, bf16": Choices(tensor_parallel_degree=2, precision=Dtype.BFLOAT16),
    "halo, bf16, parameters shared out": Choices(
        graph_parallel_degree=2, precision=Dtype.BFLOAT16, shard_parameters=ParameterSharding.ZERO3
    ),
    "halo, bf16": Choices(graph_parallel_degree=2, precision=Dtype.BFLOAT16),
    **{
        f"gradients by {how}{', beside' * overlap}": Choices(
            graph_parallel_degree=2,
            gradient_bucket_bytes=64 * 1024,
            overlap_gradients=overlap,
            gradient_compression=how,
        )
        for how in (
            GradientCompression(kind=CompressionKind.BF16),
            GradientCompression(kind=CompressionKind.TOP_K, kept_ratio=0.1),
            GradientCompression(kind=CompressionKind.POWER_SGD, matrix_rank=2),
        )
        for overlap in (False, True)
    },
    "clusters": Choices(num_parts=4),
    "clusters, kept": Choices(num_parts=4, keep_batches=True),
    "clusters, made ahead": Choices(num_parts=4, prefetch_batches=2),
    "isolated clusters": Choices(num_parts=6, parts_per_batch=2, between_edges=False, prefetch_batches=2),
    "clusters on two": Choices(data_parallel_degree=2, num_parts=5),
    "sampled": Choices(fan_outs=(8, 4), seeds_per_batch=1000),
    "sampled, made ahead": Choices(fan_outs=(8, 4), seeds_per_batch=1000, prefetch_batches=2),
    "sampled on two, made ahead": Choices(
        data_parallel_degree=2, num_parts=2, fan_outs=(8, 4), seeds_per_batch=500, prefetch_batches=2
    ),
    "sampled, bf16": Choices(fan_outs=(8, 4), seeds_per_batch=1000, precision=Dtype.BFLOAT16, prefetch_batches=1),
}
# Runs that differ in where and when their batches are made alone.
ALIKE = {
    "clusters, kept": "clusters",
    "clusters, made ahead": "clusters",
    "sampled, made ahead": "sampled",
    "sampled on two, made ahead": "sampled",
}


@contextlib.contextmanager
def _told(names: Mapping[Path, str]) -> Iterator[None]:
    """Print the name of each run when its result is there."""
    done, started = threading.Event(), time.perf_counter()

    def tell() -> None:
        left = dict(names)
        while not done.wait(0.2):
            for out in [out for out in left if (out / "result.json").exists()]:
                print(f"{time.perf_counter() - started:5.0f} s  {left.pop(out)} is done", flush=True)

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def main() -> int:
    """Run everything; return the exit status."""
    started = time.perf_counter()
    if not torch.cuda.is_available():
        print("smoke_gpu needs a CUDA device, and this machine has none", file=sys.stderr)
        return 5
    print(*(f"{name} {value}" for name, value in environment(DeviceKind.CUDA)), sep="\n")
    cluster = local_cluster(DeviceKind.CUDA)
    failures: list[str] = []
    with tempfile.TemporaryDirectory() as folder_name:
        folder = Path(folder_name)
        spec, graph = read_graph(materialise(GRAPH, folder), base=folder)
        choices = {
            name: found for name, found in (FULL_GRAPH | OTHERS).items() if found.num_ranks <= cluster.num_devices
        }
        runs = []
        for index, (name, found) in enumerate(choices.items()):
            train = replace(TRAIN, compile_dense="compiled" in name)
            out = folder / f"run{index}"
            out.mkdir()
            plan = plan_of(found, graph, MODEL, out)
            plan_file_of(plan, spec, MODEL, cluster, train, out / "plan.json")
            runs.append(PlanRun(plan_path=out / "plan.json", out=out, quiet=True))
        for name, run in zip(choices, runs, strict=True):
            failures += [f"{name}, dry: {sentence}" for sentence in dry_run(run).findings]
        with _told({run.out: name for name, run in zip(choices, runs, strict=True)}):
            run_plans(runs)
        losses = {}
        # Each goes on from where one rank was after five steps: replayed or not, on one rank or two.
        checkpoint = runs[0].out / "checkpoints/step00000005"
        resumed = [replace(run, out=run.out / "resumed", resume=str(checkpoint)) for run in runs]
        run_plans(resumed[: len(FULL_GRAPH.keys() & choices.keys())])
        for (name, _), run in zip(choices.items(), runs, strict=True):
            if (run.out / "resumed").exists():
                again = json.loads((run.out / "resumed/result.json").read_text())["losses"]
                first = json.loads((runs[0].out / "result.json").read_text())["losses"]
                error = max(abs(a / b - 1) for a, b in zip(again, first, strict=True))
                print(f"{name:40} goes on from one rank with losses that differ by at most {error:.1e}")
                if error > 1e-4:
                    failures.append(f"{name} does not go on from a checkpoint")
            result = json.loads((run.out / "result.json").read_text())
            trace = read_trace(run.out / "measured.json")
            losses[name] = result["losses"]
            kernels = sum(span.duration_seconds for span in trace.spans) / len(trace.traced_step_seconds)
            print(
                f"{name:40} loss {losses[name][0]:.5f} -> {losses[name][-1]:.5f}, step "
                f"{1e3 * trace.median_step_seconds:.2f} ms, kernels {1e3 * kernels / trace.num_ranks:.2f} ms a rank, "
                f"{len(trace.spans)} spans, peak {max(trace.peak_memory_bytes) / 2**20:.0f} MiB"
            )
            if not losses[name][-1] < losses[name][0]:
                failures.append(f"{name} did not learn")
            if kernels == 0:
                failures.append(f"{name} traced no kernels")
    for name in FULL_GRAPH:
        if name in losses:
            error = max(abs(a / b - 1) for a, b in zip(losses[name], losses["full graph"], strict=True))
            print(f"{name:40} differs from one rank by at most {error:.1e} in {TRAIN.num_steps} losses")
            if error > 1e-4:
                failures.append(f"{name} learns otherwise than one rank")
    for name, other in ALIKE.items():
        if name in losses:
            error = max(abs(a / b - 1) for a, b in zip(losses[name], losses[other], strict=True))
            print(f"{name:40} differs from {other} by at most {error:.1e} in {TRAIN.num_steps} losses")
            if error > 1e-4:
                failures.append(f"{name} learns otherwise than {other}")
    error = max(abs(a / b - 1) for a, b in zip(losses["replayed, bf16"], losses["full graph, bf16"], strict=True))
    print(f"{'replayed, bf16':40} differs from eager by at most {error:.1e} in {TRAIN.num_steps} losses")
    if error > 1e-2:
        failures.append("replayed, bf16 learns otherwise than eager")
    print(f"{time.perf_counter() - started:.0f} s;", "; ".join(failures) or "all fine")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
