"""Plans of every kind on awkward graphs, each to be compared with `dense_reference.py`."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from executor.attention.graph import EdgeGraph
from executor.keyed import Stream, stream_bits
from executor.sampling.candidates import prepare_candidates
from executor.sampling.sampler import NeighbourSampler, SamplerInputs
from executor.train import Inputs
from planner.neighbourhoods import expected_batches
from simulator.readers.graphs import Graph
from simulator.readers.orders import order_sha256
from simulator.specs.gradients import CompressionKind, GradientCompression
from simulator.specs.graph import GraphSpec
from simulator.specs.model import EdgeBias, ModelSpec
from simulator.specs.order import NodeOrder, OrderSpec
from simulator.specs.plan import (
    Exchange,
    ExchangePayload,
    Offload,
    ParameterSharding,
    PipelineSchedule,
    Plan,
    Recompute,
    SampledBatches,
    batch_parts,
)
from simulator.specs.sampling import NeighbourKind, NeighbourSpec
from simulator.specs.train import TrainSpec
from simulator.specs.units import MIB, Dtype
from simulator.workload import parameter_shapes
from tests.executor.dense_reference import Parameters, Problem, SampledStep, Step
from tests.executor.made_graphs import CUTS, GRAPHS, partition_of, spec_of

NUM_STEPS = 20
MOST_RANKS = 4
NONE, HALO, HIERARCHICAL, ALL_GATHER, HEADS = Exchange
ROWS = ExchangePayload.ROWS
KEEP, SELECTIVE, DENSE, ATTENTION, AGAIN = Recompute
AS_THEY_ARE = GradientCompression()
IN_BF16 = GradientCompression(kind=CompressionKind.BF16)
ALL_ENTRIES = GradientCompression(kind=CompressionKind.TOP_K, kept_ratio=1.0)
SMALL_BUCKETS = 1024  # bytes; the model's gradients fill about ten of them


@dataclass(frozen=True, kw_only=True)
class ParityCase:
    """A plan on a graph, with a model.

    Attributes:
        graph_name: key of `GRAPHS`.
        cut: key of `CUTS`.
        num_parts: 0 for one part a rank of the graph group, so for the full graph.
        parts_per_batch: 0 for one part a rank of the graph group.
        extras: dropout, edge bias and encodings are in the model.
        ordered: ranks hold their nodes in another order than the graph has them.
        overlaps, payload, wire, chunk_bytes: how rows travel, as in the plan.
        num_heads: of the model.
        between_edges: edges between the parts of a batch are kept.
        fan_outs: of sampled neighbourhoods; empty for batches of parts.
        seeds_per_batch: of a replica, where neighbourhoods are sampled.
        keep_batches, prefetch_batches: as in `Plan`.
        ranks_per_host: for hierarchical exchanges.
        part_ranks: ranks that serve each part; empty for one each.
        offload, offload_optimizer: as in `Plan`; tensors of any size go to the host.
    """

    graph_name: str = "awkward"
    cut: str = "uneven"
    data_parallel_degree: int = 1
    graph_parallel_degree: int = 1
    tensor_parallel_degree: int = 1
    shard_parameters: ParameterSharding = ParameterSharding.NONE
    stages: tuple[int, ...] = ()
    pipeline_parallel_degree: int = 1
    pipeline_schedule: PipelineSchedule = PipelineSchedule.ONE_F_ONE_B
    num_micro_batches: int = 1
    num_parts: int = 0
    parts_per_batch: int = 0
    exchange: tuple[Exchange, ...] = (NONE, NONE)
    recompute: tuple[Recompute, ...] = (KEEP, KEEP)
    precision: Dtype = Dtype.FLOAT32
    gradient_bucket_bytes: int = 25 * MIB
    overlap_gradients: bool = False
    gradient_compression: GradientCompression = AS_THEY_ARE
    extras: bool = False
    ordered: bool = False
    overlaps: bool = False
    payload: ExchangePayload = ExchangePayload.KEYS_AND_VALUES
    wire: Dtype | None = None
    chunk_bytes: int | None = None
    num_heads: int = 2
    between_edges: bool = True
    fan_outs: tuple[int, ...] = ()
    seeds_per_batch: int = 0
    keep_batches: bool = False
    prefetch_batches: int = 0
    ranks_per_host: int | None = None
    part_ranks: tuple[int, ...] = ()
    offload: tuple[Offload, ...] = ()
    offload_optimizer: bool = False

    @property
    def num_ranks(self) -> int:
        """Ranks of the plan."""
        of_stage = self.data_parallel_degree * self.graph_parallel_degree * self.tensor_parallel_degree
        return of_stage * self.pipeline_parallel_degree

    @cached_property
    def graph(self) -> Graph:
        """The graph's arrays."""
        return GRAPHS[self.graph_name]()

    @cached_property
    def graph_spec(self) -> GraphSpec:
        """The graph in numbers."""
        return spec_of(self.graph)

    @cached_property
    def model(self) -> ModelSpec:
        """The model."""
        return ModelSpec(
            width=16,
            num_heads=self.num_heads,
            num_layers=len(self.exchange),
            feed_forward_width=24,
            dropout_ratio=0.3 if self.extras else 0.0,
            edge_bias=EdgeBias.DEGREE if self.extras else EdgeBias.NONE,
            laplacian_encodings=2 if self.extras else 0,
            random_walk_encodings=3 if self.extras else 0,
        )

    @property
    def train(self) -> TrainSpec:
        """The training; early gradients are clipped, later ones are not."""
        return TrainSpec(
            num_steps=NUM_STEPS,
            learning_rate=0.005,
            weight_decay=0.01,
            warmup_steps=3,
            max_gradient_norm=1.5,
            seed=5,
        )

    @cached_property
    def part_N(self) -> np.ndarray:
        """Part of each node."""
        return CUTS[self.cut](self.graph, self._num_parts)

    @cached_property
    def plan(self) -> Plan:
        """The plan."""
        return Plan(
            data_parallel_degree=self.data_parallel_degree,
            graph_parallel_degree=self.graph_parallel_degree,
            tensor_parallel_degree=self.tensor_parallel_degree,
            shard_parameters=self.shard_parameters,
            pipeline_parallel_degree=self.pipeline_parallel_degree,
            stages=self.stages,
            pipeline_schedule=self.pipeline_schedule,
            num_micro_batches=self.num_micro_batches,
            partition=partition_of(
                self.graph,
                self.part_N,
                self._num_parts,
                ranks_per_host=self.ranks_per_host,
                part_ranks=self.part_ranks,
            ),
            parts_per_batch=self._num_parts
            if self.fan_outs or self.part_ranks
            else self.parts_per_batch or self.graph_parallel_degree,
            exchange=self.exchange,
            recompute=self.recompute,
            precision=self.precision,
            gradient_bucket_bytes=self.gradient_bucket_bytes,
            overlap_gradients=self.overlap_gradients,
            gradient_compression=self.gradient_compression,
            order=self.order,
            overlap_exchange=self.overlaps,
            exchange_payload=self.payload,
            exchange_precision=self.wire,
            exchange_chunk_bytes=self.chunk_bytes,
            between_edges=self.between_edges,
            sampled=self._sampled,
            keep_batches=self.keep_batches,
            prefetch_batches=self.prefetch_batches,
            offload=self.offload,
            offload_min_bytes=1,
            offload_optimizer=self.offload_optimizer,
        )

    @property
    def _sampled(self) -> SampledBatches | None:
        if not self.fan_outs:
            return None
        return expected_batches(
            self.graph,
            self.fan_outs,
            seeds_per_batch=self.seeds_per_batch,
            data_parallel_degree=self.data_parallel_degree * self.num_micro_batches,
        )

    @cached_property
    def order_N(self) -> np.ndarray | None:
        """The nodes in the plan's order, an arbitrary one."""
        if not self.ordered:
            return None
        return np.random.default_rng(9).permutation(self.graph.num_nodes).astype(np.int32)

    @property
    def order(self) -> OrderSpec:
        """That order; its array lies in no file."""
        if self.order_N is None:
            return OrderSpec()
        return OrderSpec(kind=NodeOrder.METIS, path="nowhere", sha256=order_sha256(self.order_N))

    @property
    def encodings(self) -> np.ndarray | None:
        """Numbers in the place of positional encodings, which `test_encodings.py` tests."""
        if self.model.num_encodings == 0:
            return None
        shape = (self.graph.num_nodes, self.model.num_encodings)
        return np.random.default_rng(3).normal(size=shape).astype(np.float32)

    @property
    def inputs(self) -> Inputs:
        """What the executor reads from files."""
        return Inputs(graph=self.graph, part_N=self.part_N, encodings=self.encodings, order_N=self.order_N)

    @property
    def problem(self) -> Problem:
        """What the reference trains."""
        return Problem(graph=self.graph, encodings=self.encodings, model=self.model, train=self.train)

    @property
    def initial(self) -> Parameters:
        """Parameters to start from, none of them zero or one throughout as those that a run draws."""
        generator = torch.Generator().manual_seed(11)
        found = {}
        for name, shape in parameter_shapes(self.graph_spec, self.model):
            drawn = torch.randn(shape, generator=generator)
            is_norm_weight = "norm.weight" in name
            found[name] = 1 + 0.2 * drawn if is_norm_weight else drawn * (shape[-1] ** -0.5)
        return found

    def step(self, step: int) -> Step:
        """Return what a step trains on, as the reference knows it."""
        return self._sampled_step(step) if self.fan_outs else self._blocks(step)

    def _blocks(self, step: int) -> np.ndarray:
        """Return for each node the replica that trains on it in a step, or the part between whose nodes edges stay."""
        plan, part_N = self.plan, self.part_N
        block_N = np.full(len(part_N), -1)
        batches = [
            parts
            for micro_batch in range(self.num_micro_batches)
            for parts in batch_parts(plan, step=step, seed=self.train.seed, micro_batch=micro_batch)
        ]
        for block, parts in enumerate(batches):
            is_mine_N = np.isin(part_N, parts)
            block_N[is_mine_N] = block if self.between_edges else part_N[is_mine_N]
        return block_N

    def _sampled_step(self, step: int) -> SampledStep:
        """Return what the sampler of whole graphs gives all nodes in a step, and the seeds by their keys."""
        graph, seed = self.graph, self.train.seed
        edges = EdgeGraph(
            indptr_N1=torch.from_numpy(graph.indptr_N.copy()),
            source_E=torch.from_numpy(graph.source_E.copy()),
            num_sources=graph.num_nodes,
        )
        candidates = prepare_candidates(edges)
        inputs = SamplerInputs(seed=seed, num_nodes=graph.num_nodes)
        found = []
        for layer, fan_out in enumerate(self.fan_outs):
            sampler = NeighbourSampler([NeighbourSpec(kind=NeighbourKind.UNIFORM, fan_out=fan_out)], candidates, inputs)
            drawn = sampler.sample(torch.tensor([seed, step * len(self.fan_outs) + layer])).graph
            found.append((drawn.target_E.numpy(), drawn.source_E.numpy()))
        nodes = np.flatnonzero(graph.train_mask_N)
        num_steps = self.plan.steps_per_epoch
        key = torch.tensor([seed, step // num_steps])
        bits = stream_bits(torch.from_numpy(nodes), key, Stream.SEEDS).tolist()
        in_order = [node for _, node in sorted(zip(bits, nodes.tolist(), strict=True))]
        first, end = (len(nodes) * place // num_steps for place in (step % num_steps, step % num_steps + 1))
        return SampledStep(edges_by_layer=tuple(found), seeds=np.array(in_order[first:end], dtype=np.int64))

    @property
    def _num_parts(self) -> int:
        return self.num_parts or len(self.part_ranks) or self.graph_parallel_degree


def _one_rank() -> dict[str, ParityCase]:
    return {
        "full graph": ParityCase(),
        "full graph, all extras": ParityCase(extras=True, recompute=(AGAIN, KEEP)),
        "full graph, sparse": ParityCase(graph_name="sparse", recompute=(AGAIN, AGAIN)),
        "full graph, sparse, all extras": ParityCase(graph_name="sparse", extras=True),
        "full graph without edges": ParityCase(graph_name="edgeless"),
        "clusters": ParityCase(num_parts=5, parts_per_batch=2, extras=True, cut="lonely last"),
        "clusters without labels": ParityCase(num_parts=3, cut="unlabelled last"),
        "full graph, ordered, all extras": ParityCase(extras=True, recompute=(KEEP, AGAIN), ordered=True),
        "clusters, ordered": ParityCase(
            graph_name="sparse", num_parts=5, parts_per_batch=2, extras=True, cut="lonely last", ordered=True
        ),
    }


def _graph_parallel(ranks: int) -> dict[str, ParityCase]:
    halo = ParityCase(graph_parallel_degree=ranks, exchange=(HALO, HALO))
    gather = replace(halo, exchange=(ALL_GATHER, ALL_GATHER))
    mixed = replace(halo, exchange=(HALO, ALL_GATHER))
    return {
        "halo": halo,
        "all-gather": gather,
        "mixed": replace(mixed, gradient_bucket_bytes=SMALL_BUCKETS),
        "mixed, all extras": replace(
            halo,
            exchange=(ALL_GATHER, HALO),
            extras=True,
            recompute=(KEEP, AGAIN),
            gradient_bucket_bytes=SMALL_BUCKETS,
        ),
        "halo, sparse, all extras": replace(halo, graph_name="sparse", extras=True, recompute=(AGAIN, AGAIN)),
        "all-gather, sparse": replace(gather, graph_name="sparse", recompute=(AGAIN, KEEP)),
        "halo, a part without edges": replace(halo, cut="lonely last"),
        "mixed, a part without labels": replace(mixed, cut="unlabelled last", extras=True),
        "halo, no edges": replace(halo, graph_name="edgeless"),
        "mixed, clusters": replace(mixed, num_parts=2 * ranks + 1, extras=True, recompute=(AGAIN, KEEP)),
        "mixed, ordered, all extras": replace(mixed, extras=True, recompute=(AGAIN, KEEP), ordered=True),
        "halo, ordered, sparse": replace(halo, graph_name="sparse", cut="lonely last", ordered=True),
    }


# Three ranks share heads and rows less evenly than two, so they try all.
ON_TWO_RANKS = ("halo of rows", "halo of rows, overlapped", "halo, overlapped", "heads, all extras", "one head")


def _exchange_choices(ranks: int) -> dict[str, ParityCase]:
    """Return every exchange with every way in which rows travel."""
    extras: dict[str, Any] = {"extras": True, "recompute": (KEEP, AGAIN)}
    found: dict[str, ParityCase] = {}
    for name, exchange in {"halo": HALO, "all-gather": ALL_GATHER}.items():
        plain = ParityCase(graph_parallel_degree=ranks, exchange=(exchange, exchange))
        found |= {
            f"{name} of rows": replace(plain, payload=ROWS, **extras),
            f"{name}, overlapped": replace(plain, overlaps=True),
            f"{name} of rows, overlapped": replace(plain, payload=ROWS, overlaps=True, **extras),
            f"{name}, chunks": replace(plain, chunk_bytes=1000, graph_name="sparse", **extras),
            f"{name} of rows, overlapped, chunks": replace(
                plain, payload=ROWS, overlaps=True, chunk_bytes=300, ordered=True, **extras
            ),
            f"{name}, overlapped, a part without edges": replace(plain, overlaps=True, cut="lonely last"),
            f"{name} of rows, overlapped, no edges": replace(plain, payload=ROWS, overlaps=True, graph_name="edgeless"),
        }
    heads = ParityCase(graph_parallel_degree=ranks, exchange=(HEADS, HEADS), num_heads=4)
    return found | {
        "heads": heads,
        "heads, all extras": replace(heads, ordered=True, **extras),
        "heads, chunks": replace(heads, chunk_bytes=2000, graph_name="sparse", **extras),
        "heads, a part without edges": replace(heads, cut="lonely last"),
        "heads, no edges": replace(heads, graph_name="edgeless"),
        "one head": replace(heads, num_heads=1, **extras),
        "heads and halo, overlapped": replace(heads, exchange=(HEADS, HALO), overlaps=True, payload=ROWS, **extras),
        "heads, clusters": replace(heads, num_parts=2 * ranks + 1, **extras),
        "halo and all-gather, overlapped, clusters": replace(
            heads, exchange=(HALO, ALL_GATHER), overlaps=True, num_parts=2 * ranks + 1, chunk_bytes=1000, **extras
        ),
    }


def _data_parallel(ranks: int) -> dict[str, ParityCase]:
    return {
        "one part each": ParityCase(data_parallel_degree=ranks, num_parts=2 * ranks + 1, cut="lonely last"),
        "two parts each": ParityCase(
            data_parallel_degree=ranks,
            num_parts=2 * ranks + 1,
            parts_per_batch=2,
            extras=True,
            recompute=(AGAIN, KEEP),
            gradient_bucket_bytes=SMALL_BUCKETS,
        ),
        "two parts each, ordered": ParityCase(
            data_parallel_degree=ranks, num_parts=2 * ranks + 1, parts_per_batch=2, extras=True, ordered=True
        ),
        "one part each, sparse": ParityCase(
            graph_name="sparse", data_parallel_degree=ranks, num_parts=ranks + 1, cut="unlabelled last"
        ),
    }


def _loaded(ranks: int) -> dict[str, ParityCase]:
    """Return cases of batches that are made for a step, ahead of it or in it, or kept."""
    clusters = ParityCase(data_parallel_degree=ranks, num_parts=3 * ranks + 1)
    sampled = ParityCase(data_parallel_degree=ranks, num_parts=ranks, fan_outs=(3, 2), seeds_per_batch=5)
    return {
        "one part each, kept": replace(clusters, keep_batches=True, cut="lonely last"),
        "one part each, made ahead": replace(clusters, prefetch_batches=2, extras=True),
        "three parts each, edges between them dropped": replace(
            clusters, parts_per_batch=3, between_edges=False, extras=True, prefetch_batches=1
        ),
        "two parts each, edges between them dropped, sparse": replace(
            clusters, graph_name="sparse", parts_per_batch=2, between_edges=False, recompute=(AGAIN, KEEP)
        ),
        "sampled": sampled,
        "sampled, all extras, made ahead": replace(
            sampled, fan_outs=(2, 70), extras=True, recompute=(AGAIN, KEEP), prefetch_batches=2
        ),
        "sampled, sparse, ordered": replace(
            sampled, graph_name="sparse", fan_outs=(1, 4), extras=True, ordered=True, prefetch_batches=1
        ),
        "sampled, more replicas than seeds or not": replace(sampled, graph_name="two nodes", cut="by node"),
        "sampled, no edges": replace(sampled, graph_name="edgeless", seeds_per_batch=2),
    }


def _several_ranks() -> dict[str, ParityCase]:
    found: dict[str, ParityCase] = {f"1 replica, {name}": case for name, case in _loaded(1).items()}
    found |= {f"4 replicas, {name}": case for name, case in _loaded(4).items()}
    found |= {f"2 replicas, {name}": case for name, case in _loaded(2).items()}
    few = ("sampled, all extras, made ahead", "three parts each, edges between them dropped")
    found |= {f"3 replicas, {name}": _loaded(3)[name] for name in few}
    for ranks in (2, 3):
        found |= {f"{ranks} graph ranks, {name}": case for name, case in _graph_parallel(ranks).items()}
        found |= {f"{ranks} replicas, {name}": case for name, case in _data_parallel(ranks).items()}
    found |= {f"3 graph ranks, {name}": case for name, case in _exchange_choices(3).items()}
    found |= {f"2 graph ranks, {name}": case for name, case in _exchange_choices(2).items() if name in ON_TWO_RANKS}
    tiny = ParityCase(graph_name="two nodes", cut="by node", graph_parallel_degree=3)
    return found | {
        "3 graph ranks on two nodes, halo": replace(tiny, exchange=(HALO, HALO)),
        "3 graph ranks on two nodes, all-gather": replace(tiny, exchange=(ALL_GATHER, ALL_GATHER), extras=True),
        "3 replicas on two nodes": replace(tiny, graph_parallel_degree=1, data_parallel_degree=3, num_parts=4),
        "2 replicas of 2 graph ranks": ParityCase(
            data_parallel_degree=2,
            graph_parallel_degree=2,
            num_parts=5,
            exchange=(HALO, ALL_GATHER),
            recompute=(KEEP, AGAIN),
            extras=True,
            gradient_bucket_bytes=SMALL_BUCKETS,
        ),
        "4 graph ranks": ParityCase(graph_parallel_degree=4, exchange=(ALL_GATHER, HALO), graph_name="sparse"),
        "3 graph ranks on two nodes, overlapped": replace(
            tiny, exchange=(HALO, ALL_GATHER), overlaps=True, extras=True
        ),
        "3 graph ranks on two nodes, heads": replace(tiny, exchange=(HEADS, HEADS), extras=True),
        "2 replicas of 2 graph ranks, overlapped": ParityCase(
            data_parallel_degree=2,
            graph_parallel_degree=2,
            num_parts=5,
            exchange=(HALO, ALL_GATHER),
            recompute=(KEEP, AGAIN),
            overlaps=True,
            payload=ROWS,
            extras=True,
        ),
        "2 replicas of 2 graph ranks, heads": ParityCase(
            data_parallel_degree=2, graph_parallel_degree=2, num_parts=4, exchange=(HEADS, HEADS), num_heads=1
        ),
        "4 graph ranks, overlapped": ParityCase(
            graph_parallel_degree=4, exchange=(HALO, HALO), overlaps=True, recompute=(AGAIN, AGAIN), extras=True
        ),
        "4 graph ranks, heads": ParityCase(graph_parallel_degree=4, exchange=(HEADS, HEADS), extras=True),
    }


def _hierarchical() -> dict[str, ParityCase]:
    """Return hierarchical exchanges on hosts of equal and unequal numbers of ranks."""
    extras: dict[str, Any] = {"extras": True, "recompute": (KEEP, AGAIN)}
    two_hosts = ParityCase(graph_parallel_degree=4, exchange=(HIERARCHICAL, HIERARCHICAL), ranks_per_host=2)
    uneven = replace(two_hosts, graph_parallel_degree=3)
    hosts_of_one = replace(uneven, ranks_per_host=1)
    return {
        "2 hosts of 2 ranks, hierarchical": two_hosts,
        "2 hosts of 2 ranks, hierarchical, all extras": replace(two_hosts, graph_name="sparse", ordered=True, **extras),
        "2 hosts of 2 ranks, hierarchical, overlapped": replace(two_hosts, overlaps=True),
        "2 hosts of 2 ranks, hierarchical, overlapped, again": replace(two_hosts, overlaps=True),
        "2 hosts of 2 ranks, hierarchical of rows": replace(two_hosts, payload=ROWS, **extras),
        "2 hosts of 2 ranks, hierarchical of rows, overlapped": replace(
            two_hosts, payload=ROWS, overlaps=True, **extras
        ),
        "2 hosts of 2 ranks, hierarchical and halo, buckets beside": replace(
            two_hosts,
            exchange=(HALO, HIERARCHICAL),
            overlaps=True,
            overlap_gradients=True,
            gradient_bucket_bytes=SMALL_BUCKETS,
        ),
        "2 hosts of 2 ranks, hierarchical, a part without edges": replace(two_hosts, cut="lonely last", overlaps=True),
        "2 hosts of 2 ranks, hierarchical, no edges": replace(two_hosts, graph_name="edgeless"),
        "2 hosts of 2 ranks on two nodes, hierarchical": replace(two_hosts, graph_name="two nodes", cut="by node"),
        "hosts of 2 ranks and 1, hierarchical": uneven,
        "hosts of 2 ranks and 1, hierarchical of rows, overlapped": replace(
            uneven, payload=ROWS, overlaps=True, **extras
        ),
        "hosts of 3 ranks and 1, hierarchical and all-gather": replace(
            two_hosts, exchange=(HIERARCHICAL, ALL_GATHER), ranks_per_host=3, ordered=True, **extras
        ),
        "3 hosts of 1 rank, hierarchical": hosts_of_one,
        "3 hosts of 1 rank, hierarchical, overlapped": replace(hosts_of_one, overlaps=True, **extras),
    }


def _beside_the_backward_pass() -> dict[str, ParityCase]:
    halo = ParityCase(
        graph_parallel_degree=2, exchange=(HALO, HALO), overlap_gradients=True, gradient_bucket_bytes=SMALL_BUCKETS
    )
    both = replace(halo, data_parallel_degree=2, num_parts=5, exchange=(ALL_GATHER, HALO), extras=True)
    return {
        "2 graph ranks, buckets beside": halo,
        "2 graph ranks, one bucket beside": replace(halo, gradient_bucket_bytes=25 * MIB),
        "2 graph ranks, buckets beside, sparse, all extras": replace(
            halo, graph_name="sparse", extras=True, recompute=(AGAIN, AGAIN), exchange=(HALO, ALL_GATHER)
        ),
        "3 graph ranks on two nodes, buckets beside": replace(
            halo, graph_name="two nodes", cut="by node", graph_parallel_degree=3
        ),
        "3 replicas, buckets beside": ParityCase(
            data_parallel_degree=3,
            num_parts=7,
            cut="lonely last",
            extras=True,
            recompute=(KEEP, AGAIN),
            gradient_bucket_bytes=SMALL_BUCKETS,
            overlap_gradients=True,
        ),
        "2 replicas of 2 graph ranks, buckets beside": replace(both, recompute=(AGAIN, KEEP)),
        "2 graph ranks, all entries": replace(halo, overlap_gradients=False, gradient_compression=ALL_ENTRIES),
        "2 replicas of 2 graph ranks, all entries beside": replace(both, gradient_compression=ALL_ENTRIES),
    }


def _loaded_and_beside() -> dict[str, ParityCase]:
    """Return batches made for a step whose exchanges, or reductions of gradients, go on beside other work."""
    buckets: dict[str, Any] = {"overlap_gradients": True, "gradient_bucket_bytes": SMALL_BUCKETS}
    shared = ParityCase(graph_parallel_degree=2, num_parts=5, extras=True, recompute=(KEEP, AGAIN), prefetch_batches=2)
    sampled = ParityCase(data_parallel_degree=2, num_parts=2, fan_outs=(3, 2), seeds_per_batch=5, **buckets)
    return {
        "2 replicas of 2 graph ranks, overlapped of rows, made ahead, buckets beside": replace(
            shared,
            data_parallel_degree=2,
            exchange=(HALO, ALL_GATHER),
            overlaps=True,
            payload=ROWS,
            chunk_bytes=300,
            **buckets,
        ),
        "2 graph ranks, heads and halo, overlapped, made ahead": replace(
            shared, exchange=(HEADS, HALO), overlaps=True, graph_name="sparse", cut="lonely last", ordered=True
        ),
        "2 replicas, one part each, kept, buckets beside": ParityCase(
            data_parallel_degree=2, num_parts=6, keep_batches=True, extras=True, **buckets
        ),
        "3 replicas, edges between parts dropped, all entries beside": ParityCase(
            data_parallel_degree=3,
            num_parts=7,
            parts_per_batch=2,
            between_edges=False,
            prefetch_batches=1,
            gradient_compression=ALL_ENTRIES,
            **buckets,
        ),
        "2 replicas, sampled, buckets beside": replace(sampled, extras=True, recompute=(AGAIN, KEEP)),
        "4 replicas, sampled, more than seeds, buckets beside": replace(
            sampled, data_parallel_degree=4, num_parts=4, graph_name="two nodes", cut="by node", prefetch_batches=1
        ),
    }


def _tensor_parallel() -> dict[str, ParityCase]:
    """Return plans whose ranks share heads and feed-forward columns, alone and with every other axis."""
    extras: dict[str, Any] = {"extras": True, "recompute": (KEEP, AGAIN)}
    two = ParityCase(tensor_parallel_degree=2, num_heads=4)
    shared = replace(two, graph_parallel_degree=2, gradient_bucket_bytes=SMALL_BUCKETS)
    beside: dict[str, Any] = {"overlap_gradients": True, "gradient_bucket_bytes": SMALL_BUCKETS}
    replicas = replace(two, data_parallel_degree=2, num_parts=5, cut="lonely last", **extras)
    return {
        "2 tensor ranks": two,
        "2 tensor ranks, all extras": replace(two, **extras),
        "2 tensor ranks, sparse, all recomputed": replace(two, graph_name="sparse", recompute=(AGAIN, AGAIN)),
        "2 tensor ranks, clusters": replace(two, num_parts=5, parts_per_batch=2, extras=True),
        "4 tensor ranks, all extras": replace(two, tensor_parallel_degree=4, **extras),
        "2 replicas of 2 tensor ranks": replicas,
        "2 replicas of 2 tensor ranks, buckets beside": replace(replicas, **beside),
        "2 replicas of 2 tensor ranks, samples": ParityCase(
            data_parallel_degree=2,
            tensor_parallel_degree=2,
            num_parts=2,
            fan_outs=(3, 2),
            seeds_per_batch=5,
            extras=True,
        ),
        "2 graph ranks of 2 tensor ranks, halo": replace(shared, exchange=(HALO, HALO)),
        "2 graph ranks of 2 tensor ranks, all-gather": replace(shared, exchange=(ALL_GATHER, HALO), **extras),
        "2 graph ranks of 2 tensor ranks, heads": replace(shared, exchange=(HEADS, HEADS), **extras),
        "2 graph ranks of 2 tensor ranks, one head each": replace(
            shared, num_heads=2, exchange=(HEADS, HALO), graph_name="sparse", **extras
        ),
        "2 graph ranks of 2 tensor ranks, overlapped": replace(
            shared, exchange=(HALO, ALL_GATHER), overlaps=True, overlap_gradients=True, **extras
        ),
        "2 graph ranks of 2 tensor ranks, rows": replace(shared, exchange=(HALO, ALL_GATHER), payload=ROWS, **extras),
        "2 graph ranks of 2 tensor ranks, rows overlapped, chunks": replace(
            shared, exchange=(HALO, ALL_GATHER), payload=ROWS, overlaps=True, chunk_bytes=600, **extras
        ),
        "2 graph ranks of 2 tensor ranks, clusters": replace(
            shared, exchange=(HALO, ALL_GATHER), num_parts=5, chunk_bytes=1000, **extras
        ),
        "2 graph ranks of 2 tensor ranks, no edges": replace(shared, exchange=(HALO, HEADS), graph_name="edgeless"),
    }


def _shared_out() -> dict[str, ParityCase]:
    """Return plans whose ranks share parameters out, with every other axis."""
    zero2, zero3 = ParameterSharding.ZERO2, ParameterSharding.ZERO3
    extras: dict[str, Any] = {"extras": True, "recompute": (KEEP, AGAIN)}
    replicas = ParityCase(data_parallel_degree=2, num_parts=5, cut="lonely last", num_heads=4, shard_parameters=zero3)
    group = ParityCase(graph_parallel_degree=2, exchange=(HALO, ALL_GATHER), num_heads=4, shard_parameters=zero3)
    return {
        "2 replicas, shared out": replicas,
        "2 replicas, shared out, kept for the backward pass": replace(replicas, shard_parameters=zero2, **extras),
        "2 replicas, shared out, samples": ParityCase(
            data_parallel_degree=2, num_parts=2, fan_outs=(3, 2), seeds_per_batch=5, shard_parameters=zero3
        ),
        "2 graph ranks, shared out": replace(group, **extras),
        "2 graph ranks, shared out, overlapped": replace(group, overlaps=True, graph_name="sparse", extras=True),
        "4 graph ranks, shared out, all recomputed": replace(
            group, graph_parallel_degree=4, exchange=(HEADS, HALO), recompute=(AGAIN, AGAIN)
        ),
        "2 replicas of 2 graph ranks, shared out": replace(
            group, data_parallel_degree=2, num_parts=5, shard_parameters=zero2, **extras
        ),
        "2 replicas of 2 tensor ranks, shared out": replace(replicas, tensor_parallel_degree=2, **extras),
        "2 graph ranks of 2 tensor ranks, shared out": replace(
            group, tensor_parallel_degree=2, shard_parameters=zero2, **extras
        ),
    }


def _served(*part_ranks: int, **choices: Any) -> ParityCase:
    """Return a full graph some of whose parts have several ranks."""
    case = ParityCase(
        graph_parallel_degree=sum(part_ranks), exchange=(HALO, HALO), part_ranks=part_ranks, num_heads=4, cut="uneven"
    )
    return replace(case, **choices)


def _parts_of_several_ranks() -> dict[str, ParityCase]:
    """Return parts that are served by one rank and by several."""
    extras: dict[str, Any] = {"extras": True, "recompute": (KEEP, AGAIN)}
    return {
        "parts on 2 and 1 ranks": _served(2, 1),
        "parts on 1 and 2 ranks": _served(1, 2),
        "parts on 1 and 2 ranks, all extras": _served(1, 2, ordered=True, **extras),
        "parts on 1 and 2 ranks, all recomputed": _served(1, 2, recompute=(AGAIN, AGAIN)),
        "parts on 1 and 2 ranks, sparse": _served(1, 2, graph_name="sparse", extras=True),
        "parts on 1 and 2 ranks, no edges": _served(1, 2, graph_name="edgeless", extras=True),
        "parts on 1 and 2 ranks, the latter without edges": _served(1, 2, cut="lonely last"),
        "parts on 1 and 2 ranks, the latter without labels": _served(1, 2, cut="unlabelled last", **extras),
        "parts on 2 and 1 ranks, two nodes": _served(2, 1, graph_name="two nodes", cut="by node"),
        "parts on 2, 1 and 1 ranks": _served(2, 1, 1),
        "parts on 2, 1 and 1 ranks, all extras": _served(2, 1, 1, graph_name="sparse", ordered=True, **extras),
        "parts on 1, 2 and 1 ranks, buckets beside": _served(
            1, 2, 1, gradient_bucket_bytes=SMALL_BUCKETS, overlap_gradients=True, **extras
        ),
        "parts on 2 and 2 ranks": _served(2, 2, extras=True),
        "parts on 1 and 3 ranks, 4 heads": _served(1, 3, **extras),
        "parts on 3 and 1 ranks, 8 heads, ordered": _served(3, 1, num_heads=8, ordered=True),
        "a part on 2 ranks, all extras": _served(2, ordered=True, **extras),
        "a part on 4 ranks": _served(4, cut="by node", extras=True),
        "parts on 2 and 2 ranks, shared out": _served(
            2, 2, shard_parameters=ParameterSharding.ZERO3, recompute=(KEEP, AGAIN)
        ),
    }


def _pipelines() -> dict[str, ParityCase]:
    """Return plans of stages and micro-batches, alone and with every other axis."""
    g_pipe, one_f_one_b, interleaved = PipelineSchedule
    four: dict[str, Any] = {"exchange": (NONE,) * 4, "recompute": (KEEP,) * 4}
    extras: dict[str, Any] = {"extras": True, "recompute": (KEEP, AGAIN, AGAIN, KEEP)}
    two = ParityCase(pipeline_parallel_degree=2, num_parts=9, stages=(2, 2), num_micro_batches=4, **four)
    halo: dict[str, Any] = {"graph_parallel_degree": 2, "exchange": (HALO, ALL_GATHER, HALO, HALO)}
    found: dict[str, ParityCase] = {}
    for name, schedule in {"GPipe": g_pipe, "1F1B": one_f_one_b, "interleaved": interleaved}.items():
        stages = (1, 1, 1, 1) if schedule is interleaved else (3, 1)
        case = replace(two, pipeline_schedule=schedule, stages=stages)
        replicas = replace(case, data_parallel_degree=2, num_micro_batches=2, **extras)
        shared = replace(case, num_micro_batches=2)
        found |= {
            f"2 stages, {name}": case,
            f"2 stages, {name}, all extras, sparse": replace(case, graph_name="sparse", parts_per_batch=2, **extras),
            f"2 replicas of 2 stages, {name}": replace(replicas, cut="lonely last"),
            f"2 stages of 2 graph ranks, {name}": replace(shared, **halo),
        }
    full = ParityCase(pipeline_parallel_degree=2, stages=(1, 1))
    sampled = replace(two, num_parts=1, fan_outs=(3, 2, 2, 2), seeds_per_batch=4, num_micro_batches=3)
    return found | {
        "2 stages, full graph": replace(full, extras=True, recompute=(AGAIN, KEEP)),
        "2 stages of 2 graph ranks, full graph, overlapped": replace(
            full, graph_parallel_degree=2, exchange=(HALO, ALL_GATHER), overlaps=True, payload=ROWS, chunk_bytes=300
        ),
        "2 stages of 2 tensor ranks": replace(two, tensor_parallel_degree=2, parts_per_batch=2, **extras),
        "2 stages of 2 graph ranks, heads": replace(
            two,
            graph_parallel_degree=2,
            exchange=(HEADS, HALO, HEADS, HEADS),
            num_heads=4,
            num_micro_batches=2,
            **extras,
        ),
        "4 stages, 1F1B": replace(two, pipeline_parallel_degree=4, stages=(1, 1, 1, 1), num_micro_batches=6, **extras),
        "4 stages, GPipe, fewer micro-batches": replace(
            two,
            pipeline_parallel_degree=4,
            stages=(1, 1, 1, 1),
            num_micro_batches=2,
            pipeline_schedule=g_pipe,
            gradient_bucket_bytes=SMALL_BUCKETS,
        ),
        "3 stages, more micro-batches than parts at the end": replace(
            two, pipeline_parallel_degree=3, stages=(1, 2, 1), num_micro_batches=4, cut="unlabelled last"
        ),
        "2 stages, sampled": sampled,
        "2 replicas of 2 stages, sampled, made ahead": replace(
            sampled, data_parallel_degree=2, num_parts=2, prefetch_batches=2, pipeline_schedule=g_pipe, **extras
        ),
        "2 stages, interleaved, sampled, sparse": replace(
            sampled,
            pipeline_schedule=interleaved,
            stages=(1, 1, 1, 1),
            num_micro_batches=2,
            graph_name="sparse",
            ordered=True,
            **extras,
        ),
        "2 stages, kept clusters": replace(two, keep_batches=True, gradient_compression=AS_THEY_ARE),
        "2 replicas of 2 stages, all entries": replace(
            two, data_parallel_degree=2, num_micro_batches=2, gradient_compression=ALL_ENTRIES
        ),
        "2 stages, no edges": replace(two, graph_name="edgeless"),
        "2 replicas of 2 stages on two nodes": replace(
            full, data_parallel_degree=2, graph_name="two nodes", cut="by node", num_micro_batches=2, num_parts=4
        ),
        "3 micro-batches": ParityCase(num_parts=7, num_micro_batches=3, extras=True, recompute=(AGAIN, KEEP)),
        "2 micro-batches, edges between parts dropped": ParityCase(
            num_parts=7, parts_per_batch=3, num_micro_batches=2, between_edges=False, prefetch_batches=1
        ),
        "3 micro-batches, sampled": ParityCase(
            num_parts=1, fan_outs=(3, 2), seeds_per_batch=4, num_micro_batches=3, extras=True
        ),
        "2 replicas of 2 graph ranks, 2 micro-batches": ParityCase(
            data_parallel_degree=2,
            graph_parallel_degree=2,
            num_parts=9,
            num_micro_batches=2,
            exchange=(HALO, ALL_GATHER),
            overlaps=True,
            extras=True,
        ),
        "2 tensor ranks, 2 micro-batches": ParityCase(
            tensor_parallel_degree=2, num_parts=5, parts_per_batch=2, num_micro_batches=2, recompute=(AGAIN, KEEP)
        ),
    }


def _memory() -> dict[str, ParityCase]:
    """Return every way to keep less of a layer with every way in which its attention runs."""
    found: dict[str, ParityCase] = {}
    halo = ParityCase(graph_parallel_degree=2, exchange=(HALO, ALL_GATHER), extras=True)
    ways = {
        "full graph": ParityCase(extras=True),
        "2 graph ranks": halo,
        "2 graph ranks, overlapped": replace(halo, overlaps=True),
        "2 graph ranks of rows": replace(halo, payload=ROWS, graph_name="sparse"),
        "2 graph ranks of rows, overlapped": replace(halo, payload=ROWS, overlaps=True, chunk_bytes=300),
        "2 graph ranks, heads": replace(halo, exchange=(HEADS, HEADS), num_heads=4),
        "3 graph ranks, one head": replace(halo, graph_parallel_degree=3, exchange=(HEADS, HALO), num_heads=1),
        "2 replicas, sampled": ParityCase(
            data_parallel_degree=2, num_parts=2, fan_outs=(3, 2), seeds_per_batch=5, extras=True
        ),
        "clusters": ParityCase(num_parts=5, parts_per_batch=2, extras=True, cut="lonely last"),
        "2 graph ranks, overlapped, no edges": replace(halo, overlaps=True, graph_name="edgeless"),
    }
    for name, case in ways.items():
        for kinds in ((SELECTIVE, DENSE), (ATTENTION, SELECTIVE)):
            found[f"{name}, {kinds[0]} and {kinds[1]} recomputed"] = replace(case, recompute=kinds)
    both = (Offload.ACTIVATIONS, Offload.ACTIVATIONS)
    for name, case in ways.items():
        found[f"{name}, on the host"] = replace(case, offload=both)
    found["full graph, recomputed and on the host"] = replace(
        ways["full graph"], offload=both, recompute=(ATTENTION, SELECTIVE), offload_optimizer=True
    )
    found["2 graph ranks, overlapped, recomputed and on the host"] = replace(
        ways["2 graph ranks, overlapped"], offload=both, recompute=(DENSE, ATTENTION), offload_optimizer=True
    )
    found["2 replicas, sampled, one layer on the host"] = replace(
        ways["2 replicas, sampled"], offload=(Offload.ACTIVATIONS, Offload.NONE), recompute=(SELECTIVE, AGAIN)
    )
    found["2 replicas, sampled, optimizer on the host"] = replace(
        ways["2 replicas, sampled"], offload_optimizer=True, gradient_bucket_bytes=SMALL_BUCKETS, overlap_gradients=True
    )
    mixed: dict[str, Any] = {
        "recompute": (ATTENTION, SELECTIVE),
        "gradient_bucket_bytes": SMALL_BUCKETS,
        "overlap_gradients": True,
    }
    return found | {
        "2 graph ranks, mixed recomputed, buckets beside": replace(halo, **mixed),
        "2 hosts of 2 ranks, hierarchical, overlapped, mixed recomputed": ParityCase(
            graph_parallel_degree=4,
            exchange=(HIERARCHICAL, HIERARCHICAL),
            ranks_per_host=2,
            overlaps=True,
            recompute=(DENSE, ATTENTION),
            extras=True,
        ),
    }


def _memory_of_shares() -> dict[str, ParityCase]:
    """Return ways to keep less of a layer whose heads or parameters ranks share."""
    both = (Offload.ACTIVATIONS, Offload.ACTIVATIONS)
    one = ParityCase(tensor_parallel_degree=2, num_heads=4, extras=True)
    tensor = replace(one, graph_parallel_degree=2, exchange=(HALO, ALL_GATHER))
    group = replace(tensor, tensor_parallel_degree=1, shard_parameters=ParameterSharding.ZERO3)
    replicas = ParityCase(
        data_parallel_degree=2, num_parts=5, num_heads=4, extras=True, shard_parameters=ParameterSharding.ZERO3
    )
    return {
        "2 tensor ranks, dense recomputed": replace(one, recompute=(DENSE, DENSE)),
        "2 tensor ranks, recomputed and on the host": replace(one, recompute=(ATTENTION, SELECTIVE), offload=both),
        "2 graph ranks of 2 tensor ranks, recomputed and on the host": replace(
            tensor, recompute=(DENSE, ATTENTION), offload=both
        ),
        "2 graph ranks of 2 tensor ranks, overlapped, recomputed and on the host": replace(
            tensor, overlaps=True, recompute=(ATTENTION, DENSE), offload=both
        ),
        "2 replicas, shared out, mixed recomputed": replace(replicas, recompute=(ATTENTION, SELECTIVE)),
        "2 graph ranks, shared out, recomputed and on the host": replace(
            group, recompute=(DENSE, ATTENTION), offload=both
        ),
        "2 graph ranks, shared out, overlapped, recomputed and on the host": replace(
            group,
            overlaps=True,
            recompute=(ATTENTION, KEEP),
            offload=both,
            shard_parameters=ParameterSharding.ZERO2,
        ),
        "2 replicas of 2 tensor ranks, shared out, recomputed and on the host": replace(
            replicas, tensor_parallel_degree=2, recompute=(DENSE, ATTENTION), offload=both
        ),
    }


def _bfloat16() -> dict[str, ParityCase]:
    half = Dtype.BFLOAT16
    return {
        "2 replicas, sampled, gradients in bf16 beside": ParityCase(
            data_parallel_degree=2,
            num_parts=2,
            fan_outs=(3, 2),
            seeds_per_batch=20,
            extras=True,
            gradient_bucket_bytes=SMALL_BUCKETS,
            overlap_gradients=True,
            gradient_compression=IN_BF16,
        ),
        "2 graph ranks, exchange in bf16, overlapped, clusters made ahead": ParityCase(
            graph_parallel_degree=2,
            num_parts=5,
            exchange=(HALO, ALL_GATHER),
            wire=half,
            overlaps=True,
            prefetch_batches=1,
            extras=True,
        ),
        "full graph, bf16": ParityCase(precision=half, extras=True),
        "2 graph ranks, bf16": ParityCase(
            graph_parallel_degree=2, exchange=(HALO, ALL_GATHER), precision=half, recompute=(AGAIN, KEEP)
        ),
        "2 replicas, sampled, bf16": ParityCase(
            data_parallel_degree=2, num_parts=2, fan_outs=(3, 2), seeds_per_batch=20, precision=half, extras=True
        ),
        "3 graph ranks, overlapped, bf16": ParityCase(
            graph_parallel_degree=3, exchange=(HALO, ALL_GATHER), overlaps=True, precision=half, extras=True
        ),
        "3 graph ranks, heads, bf16": ParityCase(
            graph_parallel_degree=3, exchange=(HEADS, HEADS), precision=half, payload=ExchangePayload.KEYS_AND_VALUES
        ),
        **{
            f"3 graph ranks, exchange in bf16, {name}": ParityCase(
                graph_parallel_degree=3, exchange=exchange, wire=half, recompute=(AGAIN, KEEP), **choices
            )
            for name, exchange, choices in (
                ("halo and all-gather", (HALO, ALL_GATHER), {}),
                ("halo and all-gather of rows", (HALO, ALL_GATHER), {"payload": ROWS, "chunk_bytes": 300}),
                ("overlapped", (HALO, ALL_GATHER), {"overlaps": True, "chunk_bytes": 600}),
                ("of rows, overlapped", (HALO, ALL_GATHER), {"overlaps": True, "payload": ROWS}),
                ("heads", (HEADS, HEADS), {}),
                ("hierarchical", (HIERARCHICAL, HIERARCHICAL), {"ranks_per_host": 2}),
                ("hierarchical, overlapped", (HIERARCHICAL, HALO), {"ranks_per_host": 2, "overlaps": True}),
            )
        },
        "parts on 1 and 2 ranks, bf16": _served(1, 2, precision=half, recompute=(AGAIN, KEEP)),
        "parts on 2, 1 and 1 ranks, bf16": _served(2, 1, 1, precision=half, extras=True),
        "2 stages of 2 graph ranks, bf16": ParityCase(
            pipeline_parallel_degree=2,
            stages=(1, 1),
            num_micro_batches=2,
            graph_parallel_degree=2,
            num_parts=5,
            exchange=(HALO, ALL_GATHER),
            precision=half,
            recompute=(AGAIN, KEEP),
        ),
        "2 stages, interleaved, bf16, gradients in bf16": ParityCase(
            pipeline_parallel_degree=2,
            stages=(1, 1, 1, 1),
            pipeline_schedule=PipelineSchedule.INTERLEAVED,
            num_micro_batches=2,
            data_parallel_degree=2,
            num_parts=9,
            exchange=(NONE,) * 4,
            recompute=(KEEP,) * 4,
            precision=half,
            gradient_compression=IN_BF16,
        ),
        "2 micro-batches, bf16": ParityCase(num_parts=5, num_micro_batches=2, precision=half, extras=True),
        "2 tensor ranks, bf16": ParityCase(
            tensor_parallel_degree=2, precision=half, extras=True, recompute=(KEEP, AGAIN)
        ),
        "2 graph ranks of 2 tensor ranks, shared out, bf16": ParityCase(
            graph_parallel_degree=2,
            tensor_parallel_degree=2,
            exchange=(HALO, ALL_GATHER),
            shard_parameters=ParameterSharding.ZERO3,
            precision=half,
        ),
        "2 graph ranks of 2 tensor ranks, bf16": ParityCase(
            graph_parallel_degree=2, tensor_parallel_degree=2, exchange=(HALO, ALL_GATHER), precision=half
        ),
        "2 replicas, bf16": ParityCase(graph_name="sparse", data_parallel_degree=2, num_parts=5, precision=half),
        "2 graph ranks, bf16, buckets beside": ParityCase(
            graph_parallel_degree=2,
            exchange=(HALO, ALL_GATHER),
            precision=half,
            recompute=(AGAIN, KEEP),
            gradient_bucket_bytes=SMALL_BUCKETS,
            overlap_gradients=True,
        ),
        "2 graph ranks, gradients in bf16": ParityCase(
            graph_parallel_degree=2, exchange=(HALO, HALO), gradient_compression=IN_BF16
        ),
        "2 replicas of 2 graph ranks, gradients in bf16 beside": ParityCase(
            data_parallel_degree=2,
            graph_parallel_degree=2,
            num_parts=5,
            exchange=(HALO, ALL_GATHER),
            extras=True,
            gradient_bucket_bytes=SMALL_BUCKETS,
            overlap_gradients=True,
            gradient_compression=IN_BF16,
        ),
    }


def _lossy() -> dict[str, ParityCase]:
    """Return plans whose gradients lose what the next steps send."""
    both = ParityCase(
        data_parallel_degree=2,
        graph_parallel_degree=2,
        num_parts=4,
        exchange=(HALO, ALL_GATHER),
        gradient_bucket_bytes=SMALL_BUCKETS,
        overlap_gradients=True,
    )
    top_k = GradientCompression(kind=CompressionKind.TOP_K, kept_ratio=0.2)
    power_sgd = GradientCompression(kind=CompressionKind.POWER_SGD, matrix_rank=2)
    return {
        "2 replicas of 2 graph ranks, top-k beside": replace(both, gradient_compression=top_k),
        "2 replicas of 2 graph ranks, PowerSGD beside": replace(both, gradient_compression=power_sgd),
        "2 graph ranks, PowerSGD": ParityCase(
            graph_parallel_degree=2, exchange=(HALO, HALO), gradient_compression=power_sgd
        ),
    }


EXACT_CASES = {
    **_one_rank(),
    **_several_ranks(),
    **_hierarchical(),
    **_beside_the_backward_pass(),
    **_loaded_and_beside(),
    **_tensor_parallel(),
    **_shared_out(),
    **_parts_of_several_ranks(),
    **_pipelines(),
    **_memory(),
    **_memory_of_shares(),
}
ROUNDED_CASES = _bfloat16()
LOSSY_CASES = _lossy()
CASES = {**EXACT_CASES, **ROUNDED_CASES, **LOSSY_CASES}
