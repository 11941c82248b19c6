"""Plans of every kind on made graphs, and one really executed step of each on every rank."""

import contextlib
import dataclasses
import os
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import scipy.sparse
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # not in __all__

from executor.batches import sampled_works
from executor.launch import launch, meet
from executor.mesh import joined_mesh
from executor.record import Recorder
from executor.train import Inputs, Trainer
from planner.neighbourhoods import expected_batches
from planner.partition import part_specs
from simulator.constraints import violations
from simulator.readers.generators import materialise
from simulator.readers.graphs import Graph, read_graph, write_store
from simulator.readers.partitions import parts_sha256
from simulator.specs.cluster import NVLINK4, ClusterSpec, DeviceKind, DeviceSpec
from simulator.specs.graph import CommunityGraph, GraphFile, GraphSpec
from simulator.specs.model import EdgeBias, ModelSpec
from simulator.specs.plan import Exchange, PartitionMethod, PartitionSpec, Plan, Recompute, SampledBatches
from simulator.specs.program import Task
from simulator.specs.train import TrainSpec
from simulator.specs.units import GB, GIB, KIB, MIB, TERA, Dtype
from simulator.workload import lower
from tests.conformance.observe import ObservedStep, observe_step

# No two counts of a shape are alike, so that none can stand for another.
MODEL = ModelSpec(width=24, num_heads=3, num_layers=2, feed_forward_width=40)
DROPOUT = dataclasses.replace(MODEL, dropout_ratio=0.3)
ENCODED = dataclasses.replace(MODEL, laplacian_encodings=2, random_walk_encodings=3)
EVERYTHING = dataclasses.replace(ENCODED, dropout_ratio=0.3, edge_bias=EdgeBias.DEGREE, num_layers=3)
TRAIN = TrainSpec(num_steps=10, learning_rate=0.01, seed=5)
GRAPH = CommunityGraph(num_nodes=700, num_edges=4000, num_classes=7, num_features=11)
NUM_SPARSE_FEATURES, DENSITY = 60, 0.1


@dataclass(frozen=True, kw_only=True)
class Case:
    """A plan and the step of it that is looked at.

    Attributes:
        num_parts: parts of the graph, of unequal sizes; 0 for one a rank of the graph group.
        parts_per_batch: 0 for one a rank of the graph group.
        is_sparse: whether the graph's features are sparse.
        has_empty_part: whether the last part owns no node.
        fan_outs, seeds_per_batch: of sampled neighbourhoods; empty and 0 for batches of parts.
        between_edges, keep_batches, prefetch_batches: as in `Plan`.
    """

    data_parallel_degree: int = 1
    graph_parallel_degree: int = 1
    num_parts: int = 0
    parts_per_batch: int = 0
    exchange: tuple[Exchange, ...] = (Exchange.NONE, Exchange.NONE)
    recompute: tuple[Recompute, ...] = (Recompute.NONE, Recompute.NONE)
    precision: Dtype = Dtype.FLOAT32
    gradient_bucket_bytes: int = 25 * MIB
    model: ModelSpec = MODEL
    is_sparse: bool = False
    has_empty_part: bool = False
    fan_outs: tuple[int, ...] = ()
    seeds_per_batch: int = 0
    between_edges: bool = True
    keep_batches: bool = False
    prefetch_batches: int = 0
    step: int = 1


HALO, GATHER = Exchange.HALO, Exchange.ALL_GATHER
KEEP, AGAIN = Recompute.NONE, Recompute.LAYER
CASES = {
    "full graph": Case(),
    "dropout and encodings": Case(model=dataclasses.replace(ENCODED, dropout_ratio=0.3)),
    "recomputed": Case(recompute=(AGAIN, AGAIN), model=DROPOUT),
    "one layer recomputed, edge bias": Case(
        recompute=(KEEP, AGAIN), model=dataclasses.replace(MODEL, edge_bias=EdgeBias.DEGREE)
    ),
    "sparse features": Case(is_sparse=True),
    "sparse features, encodings, bf16": Case(is_sparse=True, model=ENCODED, precision=Dtype.BFLOAT16),
    "cluster batches": Case(num_parts=5, parts_per_batch=2, step=2),
    "halo": Case(graph_parallel_degree=2, exchange=(HALO, HALO), model=DROPOUT),
    "all-gather": Case(graph_parallel_degree=2, exchange=(GATHER, GATHER)),
    "mixed exchanges, everything": Case(
        graph_parallel_degree=2,
        exchange=(HALO, GATHER, HALO),
        recompute=(AGAIN, AGAIN, KEEP),
        model=EVERYTHING,
        is_sparse=True,
        gradient_bucket_bytes=8 * KIB,
    ),
    "halo, bf16, recomputed": Case(
        graph_parallel_degree=2, exchange=(HALO, HALO), recompute=(KEEP, AGAIN), precision=Dtype.BFLOAT16
    ),
    "clusters on two": Case(data_parallel_degree=2, num_parts=4, gradient_bucket_bytes=4 * KIB, model=DROPOUT),
    "clusters on two, one without a batch": Case(data_parallel_degree=2, num_parts=3),
    "cluster batches shared by two": Case(graph_parallel_degree=2, num_parts=6, exchange=(GATHER, HALO), step=2),
    "isolated clusters": Case(num_parts=5, parts_per_batch=3, between_edges=False, step=1, model=DROPOUT),
    "isolated clusters, sparse, on two": Case(
        data_parallel_degree=2, num_parts=6, parts_per_batch=2, between_edges=False, is_sparse=True, model=ENCODED
    ),
    "kept clusters": Case(num_parts=4, keep_batches=True),
    "clusters made ahead": Case(data_parallel_degree=2, num_parts=7, prefetch_batches=2),
    "sampled": Case(fan_outs=(4, 3), seeds_per_batch=90, recompute=(AGAIN, KEEP)),
    "sampled on two, everything": Case(
        data_parallel_degree=2,
        num_parts=2,
        fan_outs=(2, 40, 5),
        seeds_per_batch=70,
        exchange=(Exchange.NONE,) * 3,
        recompute=(KEEP, AGAIN, KEEP),
        model=EVERYTHING,
        is_sparse=True,
    ),
    "sampled, bf16": Case(fan_outs=(3, 3), seeds_per_batch=60, precision=Dtype.BFLOAT16, model=DROPOUT),
    "a rank without nodes": Case(
        graph_parallel_degree=2, exchange=(HALO, GATHER), recompute=(KEEP, AGAIN), has_empty_part=True
    ),
}


def cluster_of(kind: DeviceKind) -> ClusterSpec:
    """Return a host with two devices; what is lowered depends on their kind alone."""
    device = DeviceSpec(
        kind=kind,
        name="any",
        memory_bytes=16 * GIB,
        memory_bandwidth_bytes_per_second=10 * GB,
        fp32_flops_per_second=TERA,
        bf16_flops_per_second=TERA,
    )
    return ClusterSpec(
        name="two", num_hosts=1, devices_per_host=2, device=device, device_link=NVLINK4, host_link=NVLINK4
    )


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A case with its arrays, ready to run on `kind`."""

    name: str
    case: Case
    kind: DeviceKind
    spec: GraphSpec
    plan: Plan
    inputs: Inputs

    def lowered(self) -> tuple[tuple[Task, ...], ...]:
        """Return the tasks of each rank in the step that is looked at."""
        cluster, step, seed = cluster_of(self.kind), self.case.step, TRAIN.seed
        works = sampled_works(self.plan, self.inputs, step=step, seed=seed) if self.plan.sampled is not None else None
        return lower(self.plan, self.spec, self.case.model, cluster, step=step, seed=seed, works=works).tasks


# Each case by name, with what each of its ranks did.
Observed: TypeAlias = dict[str, tuple[Prepared, tuple[ObservedStep, ...]]]


def prepare(folder: Path, kind: DeviceKind, names: Sequence[str] = tuple(CASES)) -> list[Prepared]:
    """Return cases with their graphs, whose stores are written to `folder`."""
    graphs = {is_sparse: _graph(folder, is_sparse=is_sparse) for is_sparse in (False, True)}
    found = []
    for name in names:
        case = CASES[name]
        spec, graph = graphs[case.is_sparse]
        num_parts = case.num_parts or case.graph_parallel_degree
        part_N = _parts(graph.num_nodes, num_parts, has_empty_part=case.has_empty_part)
        plan = _plan(case, graph, part_N, num_parts)
        assert not violations(plan, spec, case.model, cluster_of(kind)), name
        encodings = None
        if case.model.num_encodings:
            shape = (graph.num_nodes, case.model.num_encodings)
            encodings = np.random.default_rng(2).standard_normal(shape, dtype=np.float32)
        inputs = Inputs(graph=graph, part_N=part_N, encodings=encodings)
        found.append(Prepared(name=name, case=case, kind=kind, spec=spec, plan=plan, inputs=inputs))
    return found


def _graph(folder: Path, *, is_sparse: bool) -> tuple[GraphSpec, Graph]:
    spec, graph = read_graph(materialise(GRAPH, folder), base=folder)
    if not is_sparse:
        return spec, graph
    features = scipy.sparse.random_array(
        (graph.num_nodes, NUM_SPARSE_FEATURES), density=DENSITY, rng=np.random.default_rng(0), dtype=np.float32
    )
    store = folder / "sparse"
    write_store(dataclasses.replace(graph, features=features.tocsr()), store)
    return read_graph(GraphFile(path=str(store), add_self_loops=False), base=folder)


def _parts(num_nodes: int, num_parts: int, *, has_empty_part: bool) -> np.ndarray:
    """Return a part for each node at random; the first part has about twice the nodes of any other."""
    shares = np.ones(num_parts)
    shares[0] = 2
    shares[-1] *= not has_empty_part
    part_N = np.random.default_rng(1).choice(num_parts, size=num_nodes, p=shares / shares.sum())
    return part_N.astype(np.int32)


def _plan(case: Case, graph: Graph, part_N: np.ndarray, num_parts: int) -> Plan:
    partition = PartitionSpec(
        method=PartitionMethod.STRIPES if num_parts > 1 else PartitionMethod.SINGLE,
        seed=0,
        path="",
        sha256=parts_sha256(part_N),
        parts=part_specs(graph, part_N, num_parts),
    )
    return Plan(
        data_parallel_degree=case.data_parallel_degree,
        graph_parallel_degree=case.graph_parallel_degree,
        partition=partition,
        parts_per_batch=num_parts if case.fan_outs else case.parts_per_batch or case.graph_parallel_degree,
        exchange=case.exchange,
        recompute=case.recompute,
        precision=case.precision,
        gradient_bucket_bytes=case.gradient_bucket_bytes,
        between_edges=case.between_edges,
        sampled=_sampled(case, graph),
        keep_batches=case.keep_batches,
        prefetch_batches=case.prefetch_batches,
    )


def _sampled(case: Case, graph: Graph) -> SampledBatches | None:
    if not case.fan_outs:
        return None
    return expected_batches(
        graph,
        case.fan_outs,
        seeds_per_batch=case.seeds_per_batch,
        data_parallel_degree=case.data_parallel_degree,
    )


def run_cases(cases: Sequence[Prepared], folder: Path) -> Observed:
    """Return cases with what each rank did in the step that is looked at; one launch runs them all.

    Args:
        folder: gets a file for each case and rank.
    """
    num_ranks = max(prepared.plan.num_ranks for prepared in cases)
    launch(_run_as_rank, (list(cases), folder), num_ranks=num_ranks, folder=folder)
    return {
        prepared.name: (
            prepared,
            tuple(pickle.loads(_path(folder, index, rank).read_bytes()) for rank in range(prepared.plan.num_ranks)),
        )
        for index, prepared in enumerate(cases)
    }


def _path(folder: Path, index: int, rank: int) -> Path:
    return folder / f"observed{index}-rank{rank}.pickle"


def _run_as_rank(argument: tuple[list[Prepared], Path], store: Store, rank: int) -> None:
    cases, folder = argument
    for index, prepared in enumerate(cases):
        case_store = PrefixStore(f"case{index}", store)
        takes_part = rank < prepared.plan.num_ranks
        if takes_part:
            observed = _run_case(prepared, case_store, rank)
            _path(folder, index, rank).write_bytes(pickle.dumps(observed))
        meet(case_store, "done", prepared.plan.num_ranks, arrive=takes_part)


def _run_case(prepared: Prepared, store: Store, rank: int) -> ObservedStep:
    """Train up to the step that is looked at, and look."""
    case, plan = prepared.case, prepared.plan
    with joined_mesh(
        prepared.kind,
        store,
        rank=rank,
        local_rank=int(os.environ.get("LOCAL_RANK", rank)),
        data_parallel_degree=plan.data_parallel_degree,
        graph_parallel_degree=plan.graph_parallel_degree,
    ) as place:
        recorder = Recorder(annotate=True, precision=plan.precision)
        trainer = Trainer(plan, prepared.spec, case.model, TRAIN, prepared.inputs, place, recorder)
        for step in range(case.step):
            trainer.step(step, trainer.batch(step))
        # Its times are those of the best of three: one interruption outside of a task outlasts a step of a millisecond.
        with contextlib.closing(trainer):
            observed = [observe_step(trainer, case.step) for _ in range(3)]
        best = max(observed, key=lambda seen: seen.named_seconds / seen.busy_seconds)
        return dataclasses.replace(observed[0], busy_seconds=best.busy_seconds, named_seconds=best.named_seconds)
