"""Plans of every kind on made graphs, and one really executed step of each on every rank."""

import contextlib
import dataclasses
import os
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import scipy.sparse
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # not in __all__

from executor.batches import sampled_works
from executor.launch import launch, meet
from executor.mesh import joined_mesh, mesh_choices
from executor.record import Recorder
from executor.train import Inputs, Trainer
from planner.hosts import host_rows
from planner.neighbourhoods import expected_batches
from planner.partition import part_specs
from planner.shares import part_shares
from simulator.constraints import violations
from simulator.readers.generators import materialise
from simulator.readers.graphs import Graph, read_graph, write_store
from simulator.readers.partitions import parts_sha256
from simulator.specs.cluster import NVLINK4, ClusterSpec, DeviceKind, DeviceSpec
from simulator.specs.gradients import CompressionKind, GradientCompression
from simulator.specs.graph import CommunityGraph, GraphFile, GraphSpec
from simulator.specs.model import EdgeBias, ModelSpec
from simulator.specs.plan import (
    Exchange,
    ExchangePayload,
    Offload,
    ParameterSharding,
    PartitionMethod,
    PartitionSpec,
    PipelineSchedule,
    Plan,
    Recompute,
    SampledBatches,
)
from simulator.specs.program import Task
from simulator.specs.train import TrainSpec
from simulator.specs.units import GB, GIB, KIB, MIB, TERA, Dtype
from simulator.workload import lower
from tests.conformance.observe import ObservedStep, observe_step

AS_THEY_ARE = GradientCompression()
# No two counts of a shape are alike, so that none can stand for another.
MODEL = ModelSpec(width=24, num_heads=3, num_layers=2, feed_forward_width=40)
DROPOUT = dataclasses.replace(MODEL, dropout_ratio=0.3)
ENCODED = dataclasses.replace(MODEL, laplacian_encodings=2, random_walk_encodings=3)
EVERYTHING = dataclasses.replace(ENCODED, dropout_ratio=0.3, edge_bias=EdgeBias.DEGREE, num_layers=3)
# Seven heads do not divide by two ranks; fewer on a rank could stand for a pair of keys and values.
SEVEN_HEADS: dict[str, Any] = {"width": 28, "num_heads": 7}
# For ranks that share heads and feed-forward columns.
FOUR_HEADS = ModelSpec(width=40, num_heads=4, num_layers=2, feed_forward_width=56)
ALL_OF_FOUR_HEADS = dataclasses.replace(FOUR_HEADS, dropout_ratio=0.3, edge_bias=EdgeBias.DEGREE, num_layers=3)
SIX_HEADS = ModelSpec(width=36, num_heads=6, num_layers=2, feed_forward_width=50)
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
        overlaps, payload, wire, chunk_bytes: how rows travel, as in the plan.
        fan_outs, seeds_per_batch: of sampled neighbourhoods; empty and 0 for batches of parts.
        between_edges, keep_batches, prefetch_batches: as in `Plan`.
        offload, offload_optimizer: as in `Plan`; tensors of any size go to the host.
        ranks_per_host: for hierarchical exchanges; None for one host.
        part_ranks: ranks that serve each part; empty for one each.
    """

    data_parallel_degree: int = 1
    graph_parallel_degree: int = 1
    tensor_parallel_degree: int = 1
    shard_parameters: ParameterSharding = ParameterSharding.NONE
    pipeline_parallel_degree: int = 1
    stages: tuple[int, ...] = ()
    pipeline_schedule: PipelineSchedule = PipelineSchedule.ONE_F_ONE_B
    num_micro_batches: int = 1
    num_parts: int = 0
    parts_per_batch: int = 0
    exchange: tuple[Exchange, ...] = (Exchange.NONE, Exchange.NONE)
    recompute: tuple[Recompute, ...] = (Recompute.NONE, Recompute.NONE)
    precision: Dtype = Dtype.FLOAT32
    gradient_bucket_bytes: int = 25 * MIB
    overlap_gradients: bool = False
    gradient_compression: GradientCompression = AS_THEY_ARE
    model: ModelSpec = MODEL
    is_sparse: bool = False
    has_empty_part: bool = False
    overlaps: bool = False
    payload: ExchangePayload = ExchangePayload.KEYS_AND_VALUES
    wire: Dtype | None = None
    chunk_bytes: int | None = None
    fan_outs: tuple[int, ...] = ()
    seeds_per_batch: int = 0
    between_edges: bool = True
    keep_batches: bool = False
    prefetch_batches: int = 0
    ranks_per_host: int | None = None
    part_ranks: tuple[int, ...] = ()
    offload: tuple[Offload, ...] = ()
    offload_optimizer: bool = False
    step: int = 1


HALO, GATHER, HEADS = Exchange.HALO, Exchange.ALL_GATHER, Exchange.HEAD_ALL_TO_ALL
HIERARCHICAL = Exchange.HIERARCHICAL_HALO
ROWS, HALF = ExchangePayload.ROWS, Dtype.BFLOAT16
KEEP, AGAIN = Recompute.NONE, Recompute.LAYER
LADDER = (Recompute.SELECTIVE, Recompute.DENSE, Recompute.ATTENTION)
IN_BF16 = GradientCompression(kind=CompressionKind.BF16)
TOP_K = GradientCompression(kind=CompressionKind.TOP_K, kept_ratio=0.1)
POWER_SGD = GradientCompression(kind=CompressionKind.POWER_SGD, matrix_rank=2)
AWAY = (Offload.ACTIVATIONS,) * 3
ON_THE_HOST: dict[str, dict[str, Any]] = {
    "everything": {
        "exchange": (Exchange.NONE,) * 3,
        "recompute": (KEEP,) * 3,
        "model": EVERYTHING,
        "is_sparse": True,
    },
    "bf16": {"exchange": (Exchange.NONE,) * 2, "model": DROPOUT, "precision": HALF},
    "recomputed in three ways": {"exchange": (Exchange.NONE,) * 3, "recompute": LADDER, "model": EVERYTHING},
    "sampled on two, recomputed in three ways": {
        "data_parallel_degree": 2,
        "num_parts": 2,
        "fan_outs": (2, 40, 5),
        "seeds_per_batch": 70,
        "exchange": (Exchange.NONE,) * 3,
        "recompute": (KEEP, Recompute.SELECTIVE, Recompute.ATTENTION),
        "model": EVERYTHING,
    },
    **{
        f"{name}{how}": {
            "graph_parallel_degree": 2,
            "exchange": exchange,
            "recompute": recompute,
            "model": dataclasses.replace(EVERYTHING, **SEVEN_HEADS),
            **choices,
        }
        for name, exchange, choices in (
            ("halo and all-gather", (HALO, GATHER, HALO), {}),
            ("overlapped", (HALO, GATHER, HALO), {"overlaps": True}),
            ("of rows", (HALO, GATHER, HALO), {"payload": ROWS, "has_empty_part": True}),
            (
                "overlapped, of rows, bf16",
                (HALO, GATHER, GATHER),
                {"overlaps": True, "payload": ROWS, "precision": HALF},
            ),
            ("heads", (HEADS, HEADS, HEADS), {"num_parts": 6, "step": 2}),
        )
        for how, recompute in {"": (KEEP,) * 3, ", recomputed in three ways": LADDER}.items()
    },
}
CASES = {
    "full graph": Case(),
    "dropout and encodings": Case(model=dataclasses.replace(ENCODED, dropout_ratio=0.3)),
    "recomputed": Case(recompute=(AGAIN, AGAIN), model=DROPOUT),
    "one layer recomputed, edge bias": Case(
        recompute=(KEEP, AGAIN), model=dataclasses.replace(MODEL, edge_bias=EdgeBias.DEGREE)
    ),
    "recomputed in three ways, everything": Case(
        exchange=(Exchange.NONE,) * 3, recompute=LADDER, model=EVERYTHING, is_sparse=True
    ),
    "recomputed in three ways, bf16": Case(
        exchange=(Exchange.NONE,) * 3,
        recompute=LADDER,
        model=dataclasses.replace(DROPOUT, num_layers=3),
        precision=Dtype.BFLOAT16,
    ),
    "recomputed in three ways, halo": Case(
        graph_parallel_degree=2, exchange=(HALO, HALO, HALO), recompute=LADDER, model=EVERYTHING
    ),
    "recomputed in three ways, all-gather": Case(
        graph_parallel_degree=2,
        exchange=(GATHER, GATHER, GATHER),
        recompute=LADDER,
        model=EVERYTHING,
        chunk_bytes=20 * KIB,
        wire=HALF,
    ),
    "recomputed in three ways, of rows": Case(
        graph_parallel_degree=2, exchange=(HALO, GATHER, GATHER), recompute=LADDER, model=EVERYTHING, payload=ROWS
    ),
    "recomputed in three ways, overlapped": Case(
        graph_parallel_degree=2,
        exchange=(HALO, HALO, GATHER),
        recompute=LADDER,
        model=EVERYTHING,
        overlaps=True,
        gradient_bucket_bytes=4 * KIB,
        overlap_gradients=True,
    ),
    "recomputed in three ways, overlapped, bf16": Case(
        graph_parallel_degree=2,
        exchange=(GATHER, GATHER, HALO),
        recompute=LADDER,
        model=dataclasses.replace(DROPOUT, num_layers=3),
        overlaps=True,
        precision=Dtype.BFLOAT16,
    ),
    "recomputed in three ways, of rows, overlapped, a rank without nodes": Case(
        graph_parallel_degree=2,
        exchange=(GATHER, HALO, HALO),
        recompute=LADDER,
        model=EVERYTHING,
        overlaps=True,
        payload=ROWS,
        has_empty_part=True,
    ),
    "recomputed in three ways, heads": Case(
        graph_parallel_degree=2,
        exchange=(HEADS, HEADS, HEADS),
        recompute=LADDER,
        model=dataclasses.replace(EVERYTHING, **SEVEN_HEADS),
    ),
    "recomputed in three ways, clusters": Case(
        num_parts=5, parts_per_batch=2, exchange=(Exchange.NONE,) * 3, recompute=LADDER, model=EVERYTHING, step=2
    ),
    "recomputed in three ways, sampled": Case(
        data_parallel_degree=2,
        num_parts=2,
        fan_outs=(2, 40, 5),
        seeds_per_batch=70,
        exchange=(Exchange.NONE,) * 3,
        recompute=LADDER,
        model=EVERYTHING,
        is_sparse=True,
    ),
    **{
        f"{name}, on the host": Case(**{**choices, "offload": AWAY[: len(choices["exchange"])]})
        for name, choices in ON_THE_HOST.items()
    },
    "optimizer on the host": Case(offload_optimizer=True, recompute=(Recompute.SELECTIVE, KEEP), model=DROPOUT),
    "optimizer and a layer on the host, buckets beside the backward pass": Case(
        data_parallel_degree=2,
        num_parts=4,
        offload=(Offload.NONE, Offload.ACTIVATIONS),
        offload_optimizer=True,
        gradient_bucket_bytes=4 * KIB,
        overlap_gradients=True,
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
    "sampled, buckets beside the backward pass": Case(
        data_parallel_degree=2,
        num_parts=2,
        fan_outs=(4, 3),
        seeds_per_batch=80,
        recompute=(KEEP, AGAIN),
        model=DROPOUT,
        gradient_bucket_bytes=4 * KIB,
        overlap_gradients=True,
    ),
    "isolated clusters made ahead, PowerSGD beside the backward pass": Case(
        data_parallel_degree=2,
        num_parts=6,
        parts_per_batch=2,
        between_edges=False,
        prefetch_batches=1,
        gradient_bucket_bytes=8 * KIB,
        overlap_gradients=True,
        gradient_compression=POWER_SGD,
    ),
    "overlapped, of rows, clusters made ahead, buckets beside the backward pass": Case(
        graph_parallel_degree=2,
        num_parts=6,
        exchange=(HALO, GATHER),
        overlaps=True,
        payload=ROWS,
        chunk_bytes=20 * KIB,
        prefetch_batches=2,
        gradient_bucket_bytes=4 * KIB,
        overlap_gradients=True,
        model=DROPOUT,
        step=2,
    ),
    "heads and halo, clusters, everything": Case(
        graph_parallel_degree=2,
        num_parts=6,
        exchange=(HEADS, HALO, HEADS),
        recompute=(AGAIN, KEEP, KEEP),
        model=dataclasses.replace(EVERYTHING, **SEVEN_HEADS),
        is_sparse=True,
        overlaps=True,
        step=2,
    ),
    "a rank without nodes": Case(
        graph_parallel_degree=2, exchange=(HALO, GATHER), recompute=(KEEP, AGAIN), has_empty_part=True
    ),
    "halo and all-gather of rows": Case(
        graph_parallel_degree=2, exchange=(HALO, GATHER), payload=ROWS, recompute=(AGAIN, KEEP)
    ),
    "overlapped": Case(graph_parallel_degree=2, exchange=(HALO, GATHER), overlaps=True, model=DROPOUT),
    "overlapped, of rows, everything": Case(
        graph_parallel_degree=2,
        exchange=(HALO, GATHER, HALO),
        recompute=(AGAIN, AGAIN, KEEP),
        model=EVERYTHING,
        overlaps=True,
        payload=ROWS,
    ),
    "overlapped, chunks, everything": Case(
        graph_parallel_degree=2,
        exchange=(HALO, GATHER, HALO),
        recompute=(KEEP, KEEP, AGAIN),
        model=EVERYTHING,
        overlaps=True,
        chunk_bytes=20 * KIB,
    ),
    "chunks": Case(graph_parallel_degree=2, exchange=(HALO, GATHER), chunk_bytes=30 * KIB),
    "overlapped, exchange in bf16, of rows": Case(
        graph_parallel_degree=2, exchange=(HALO, GATHER), overlaps=True, wire=HALF, payload=ROWS
    ),
    "exchange in bf16, chunks": Case(
        graph_parallel_degree=2, exchange=(HALO, GATHER), wire=HALF, chunk_bytes=20 * KIB, recompute=(AGAIN, KEEP)
    ),
    "overlapped, cluster batches shared by two": Case(
        graph_parallel_degree=2, num_parts=6, exchange=(GATHER, HALO), overlaps=True, step=2
    ),
    "overlapped, a rank without nodes": Case(
        graph_parallel_degree=2, exchange=(HALO, GATHER), overlaps=True, has_empty_part=True
    ),
    "heads": Case(graph_parallel_degree=2, exchange=(HEADS, HEADS), model=dataclasses.replace(DROPOUT, **SEVEN_HEADS)),
    "heads and halo, everything": Case(
        graph_parallel_degree=2,
        exchange=(HEADS, HALO, HEADS),
        recompute=(AGAIN, KEEP, KEEP),
        model=dataclasses.replace(EVERYTHING, **SEVEN_HEADS),
        overlaps=True,
        chunk_bytes=40 * KIB,
    ),
    "heads, bf16": Case(
        graph_parallel_degree=2,
        exchange=(HEADS, HEADS),
        precision=HALF,
        model=dataclasses.replace(MODEL, **SEVEN_HEADS),
    ),
    "heads, exchange in bf16": Case(
        graph_parallel_degree=2, exchange=(HEADS, HEADS), wire=HALF, model=dataclasses.replace(MODEL, **SEVEN_HEADS)
    ),
    "more ranks than heads": Case(
        graph_parallel_degree=2,
        exchange=(HEADS, HEADS),
        # Wide, since on a rank without heads the few operators outside of tasks would be 4 to 6 % of a narrow model.
        model=dataclasses.replace(MODEL, num_heads=1, edge_bias=EdgeBias.DEGREE, feed_forward_width=160),
    ),
    "heads, cluster batches shared by two": Case(
        graph_parallel_degree=2,
        num_parts=6,
        exchange=(HEADS, HEADS),
        step=2,
        model=dataclasses.replace(MODEL, **SEVEN_HEADS),
    ),
    "heads, a rank without nodes": Case(
        graph_parallel_degree=2,
        exchange=(HEADS, HEADS),
        has_empty_part=True,
        model=dataclasses.replace(MODEL, **SEVEN_HEADS),
    ),
    "parts on 1 and 2 ranks": Case(
        graph_parallel_degree=3,
        part_ranks=(1, 2),
        exchange=(HALO, HALO),
        model=dataclasses.replace(MODEL, **SEVEN_HEADS),
    ),
    "parts on 2 and 1 ranks, everything": Case(
        graph_parallel_degree=3,
        part_ranks=(2, 1),
        exchange=(HALO, HALO, HALO),
        recompute=(AGAIN, KEEP, AGAIN),
        model=dataclasses.replace(EVERYTHING, **SEVEN_HEADS),
        is_sparse=True,
        gradient_bucket_bytes=8 * KIB,
    ),
    "parts on 2, 1 and 1 ranks, bf16": Case(
        graph_parallel_degree=4,
        part_ranks=(2, 1, 1),
        exchange=(HALO, HALO),
        recompute=(KEEP, AGAIN),
        precision=Dtype.BFLOAT16,
        model=dataclasses.replace(DROPOUT, **SEVEN_HEADS),
    ),
    "parts on 1 and 3 ranks, buckets beside": Case(
        graph_parallel_degree=4,
        part_ranks=(1, 3),
        exchange=(HALO, HALO),
        model=dataclasses.replace(MODEL, **SEVEN_HEADS, edge_bias=EdgeBias.DEGREE),
        gradient_bucket_bytes=4 * KIB,
        overlap_gradients=True,
    ),
    "parts on 1 and 2 ranks, activations on the host": Case(
        graph_parallel_degree=3,
        part_ranks=(1, 2),
        exchange=(HALO, HALO),
        model=dataclasses.replace(DROPOUT, **SEVEN_HEADS, edge_bias=EdgeBias.DEGREE),
        offload=(Offload.ACTIVATIONS, Offload.ACTIVATIONS),
    ),
    "parts on 1, 1 and 2 ranks, the last without nodes": Case(
        graph_parallel_degree=4,
        part_ranks=(1, 1, 2),
        exchange=(HALO, HALO),
        has_empty_part=True,
        model=dataclasses.replace(MODEL, **SEVEN_HEADS),
    ),
    "parts on 2 and 2 ranks, shared out": Case(
        graph_parallel_degree=4,
        part_ranks=(2, 2),
        exchange=(HALO, HALO),
        shard_parameters=ParameterSharding.ZERO3,
        model=FOUR_HEADS,
    ),
    "hierarchical": Case(graph_parallel_degree=3, exchange=(HIERARCHICAL, HALO), model=DROPOUT, ranks_per_host=2),
    "hierarchical, overlapped, of rows, everything": Case(
        graph_parallel_degree=3,
        exchange=(HIERARCHICAL, GATHER, HIERARCHICAL),
        recompute=(AGAIN, KEEP, KEEP),
        model=EVERYTHING,
        overlaps=True,
        payload=ROWS,
        ranks_per_host=2,
    ),
    "hierarchical, exchange in bf16": Case(
        graph_parallel_degree=3,
        exchange=(HIERARCHICAL, HIERARCHICAL),
        recompute=(AGAIN, KEEP),
        wire=HALF,
        ranks_per_host=2,
    ),
    "hierarchical, overlapped, exchange in bf16, a rank without nodes": Case(
        graph_parallel_degree=4,
        exchange=(HIERARCHICAL, HIERARCHICAL),
        overlaps=True,
        wire=HALF,
        has_empty_part=True,
        ranks_per_host=2,
    ),
    "hierarchical, hosts of one rank": Case(
        graph_parallel_degree=2, exchange=(HIERARCHICAL, HIERARCHICAL), overlaps=True, ranks_per_host=1
    ),
    "buckets beside the backward pass, everything": Case(
        graph_parallel_degree=2,
        exchange=(HALO, GATHER, HALO),
        recompute=(AGAIN, AGAIN, KEEP),
        model=EVERYTHING,
        is_sparse=True,
        gradient_bucket_bytes=4 * KIB,
        overlap_gradients=True,
    ),
    "one bucket beside the backward pass, bf16": Case(
        graph_parallel_degree=2, exchange=(HALO, HALO), precision=Dtype.BFLOAT16, overlap_gradients=True
    ),
    "buckets beside the backward pass, bf16, a rank without nodes": Case(
        graph_parallel_degree=2,
        exchange=(HALO, HALO),
        precision=Dtype.BFLOAT16,
        recompute=(KEEP, AGAIN),
        has_empty_part=True,
        gradient_bucket_bytes=4 * KIB,
        overlap_gradients=True,
    ),
    "gradients in bf16": Case(
        data_parallel_degree=2, num_parts=4, gradient_bucket_bytes=8 * KIB, gradient_compression=IN_BF16
    ),
    "top-k": Case(data_parallel_degree=2, num_parts=4, gradient_bucket_bytes=8 * KIB, gradient_compression=TOP_K),
    "PowerSGD": Case(
        data_parallel_degree=2, num_parts=4, gradient_bucket_bytes=8 * KIB, gradient_compression=POWER_SGD
    ),
    "gradients in bf16 beside the backward pass": Case(
        graph_parallel_degree=2,
        exchange=(HALO, HALO),
        gradient_bucket_bytes=8 * KIB,
        overlap_gradients=True,
        gradient_compression=IN_BF16,
    ),
    "top-k beside the backward pass": Case(
        graph_parallel_degree=2,
        exchange=(GATHER, HALO),
        recompute=(AGAIN, KEEP),
        gradient_bucket_bytes=8 * KIB,
        overlap_gradients=True,
        gradient_compression=TOP_K,
    ),
    "PowerSGD beside the backward pass": Case(
        graph_parallel_degree=2,
        exchange=(HALO, GATHER),
        gradient_bucket_bytes=8 * KIB,
        overlap_gradients=True,
        gradient_compression=POWER_SGD,
    ),
    "tensor": Case(tensor_parallel_degree=2, model=FOUR_HEADS),
    "tensor, one layer recomputed": Case(
        tensor_parallel_degree=2,
        recompute=(KEEP, AGAIN),
        model=dataclasses.replace(FOUR_HEADS, edge_bias=EdgeBias.DEGREE),
        is_sparse=True,
    ),
    "tensor of four, recomputed with dropout": Case(
        tensor_parallel_degree=4,
        recompute=(AGAIN, AGAIN),
        model=dataclasses.replace(FOUR_HEADS, dropout_ratio=0.3),
        precision=Dtype.BFLOAT16,
    ),
    "tensor, clusters on two": Case(
        data_parallel_degree=2,
        tensor_parallel_degree=2,
        num_parts=4,
        model=FOUR_HEADS,
        gradient_bucket_bytes=4 * KIB,
        overlap_gradients=True,
    ),
    "tensor, samples": Case(
        tensor_parallel_degree=2, fan_outs=(5, 4), seeds_per_batch=60, model=FOUR_HEADS, num_parts=2
    ),
    "tensor, halo": Case(
        graph_parallel_degree=2,
        tensor_parallel_degree=2,
        exchange=(HALO, GATHER),
        model=dataclasses.replace(FOUR_HEADS, dropout_ratio=0.3),
        gradient_bucket_bytes=4 * KIB,
        overlap_gradients=True,
    ),
    "tensor, heads": Case(
        graph_parallel_degree=2, tensor_parallel_degree=2, exchange=(HEADS, HEADS), wire=HALF, model=SIX_HEADS
    ),
    "tensor, rows": Case(
        graph_parallel_degree=2,
        tensor_parallel_degree=2,
        exchange=(HALO, GATHER),
        payload=ROWS,
        recompute=(AGAIN, KEEP),
        model=FOUR_HEADS,
    ),
    "tensor, overlapped": Case(
        graph_parallel_degree=2, tensor_parallel_degree=2, exchange=(HALO, GATHER), overlaps=True, model=FOUR_HEADS
    ),
    "tensor, overlapped rows": Case(
        graph_parallel_degree=2,
        tensor_parallel_degree=2,
        exchange=(HALO, GATHER),
        overlaps=True,
        payload=ROWS,
        wire=HALF,
        chunk_bytes=30 * KIB,
        model=dataclasses.replace(FOUR_HEADS, edge_bias=EdgeBias.DEGREE),
    ),
    "shared out, clusters on two": Case(
        data_parallel_degree=2, num_parts=4, model=DROPOUT, shard_parameters=ParameterSharding.ZERO3
    ),
    "shared out, kept for the backward pass": Case(
        graph_parallel_degree=2,
        exchange=(HALO, GATHER),
        recompute=(KEEP, AGAIN),
        model=DROPOUT,
        shard_parameters=ParameterSharding.ZERO2,
    ),
    "shared out, three layers": Case(
        graph_parallel_degree=2,
        exchange=(HALO, GATHER, HALO),
        recompute=(AGAIN, KEEP, AGAIN),
        model=EVERYTHING,
        precision=Dtype.BFLOAT16,
        is_sparse=True,
        shard_parameters=ParameterSharding.ZERO3,
    ),
    "shared out by three": Case(
        data_parallel_degree=3,
        num_parts=3,
        model=EVERYTHING,
        shard_parameters=ParameterSharding.ZERO3,
        exchange=(Exchange.NONE,) * 3,
        recompute=(KEEP,) * 3,
    ),
    "shared out, tensor": Case(
        data_parallel_degree=2,
        tensor_parallel_degree=2,
        num_parts=4,
        model=FOUR_HEADS,
        shard_parameters=ParameterSharding.ZERO3,
    ),
    "shared out, tensor, halo": Case(
        graph_parallel_degree=2,
        tensor_parallel_degree=2,
        exchange=(HALO, HALO),
        overlaps=True,
        model=FOUR_HEADS,
        shard_parameters=ParameterSharding.ZERO2,
    ),
    "micro-batches": Case(num_parts=7, parts_per_batch=2, num_micro_batches=3, recompute=(KEEP, AGAIN), model=DROPOUT),
    "micro-batches, samples on two": Case(
        data_parallel_degree=2, num_parts=2, num_micro_batches=2, fan_outs=(4, 3), seeds_per_batch=40, is_sparse=True
    ),
    "two stages, full graph": Case(pipeline_parallel_degree=2, stages=(1, 1)),
    "two stages, GPipe": Case(
        pipeline_parallel_degree=2,
        stages=(1, 1),
        pipeline_schedule=PipelineSchedule.GPIPE,
        num_micro_batches=3,
        num_parts=4,
        model=DROPOUT,
        gradient_bucket_bytes=4 * KIB,
    ),
    "two stages, 1F1B, everything": Case(
        pipeline_parallel_degree=2,
        stages=(2, 1),
        num_micro_batches=3,
        num_parts=4,
        exchange=(Exchange.NONE,) * 3,
        recompute=(AGAIN, KEEP, AGAIN),
        model=EVERYTHING,
        is_sparse=True,
        prefetch_batches=1,
    ),
    "two stages, interleaved": Case(
        pipeline_parallel_degree=2,
        stages=(1, 1, 1, 1),
        pipeline_schedule=PipelineSchedule.INTERLEAVED,
        num_micro_batches=2,
        num_parts=5,
        exchange=(Exchange.NONE,) * 4,
        recompute=(KEEP, AGAIN, KEEP, KEEP),
        model=dataclasses.replace(MODEL, num_layers=4),
    ),
    "three stages, samples, bf16": Case(
        pipeline_parallel_degree=3,
        stages=(1, 1, 1),
        num_micro_batches=3,
        fan_outs=(3, 3, 3),
        seeds_per_batch=40,
        exchange=(Exchange.NONE,) * 3,
        recompute=(KEEP, KEEP, AGAIN),
        precision=Dtype.BFLOAT16,
        model=dataclasses.replace(DROPOUT, num_layers=3),
    ),
    "two stages of two graph ranks": Case(
        pipeline_parallel_degree=2,
        stages=(1, 1),
        graph_parallel_degree=2,
        num_micro_batches=2,
        num_parts=6,
        exchange=(HALO, GATHER),
        overlaps=True,
        model=DROPOUT,
    ),
    "two replicas of two stages": Case(
        data_parallel_degree=2,
        pipeline_parallel_degree=2,
        stages=(1, 1),
        num_micro_batches=2,
        num_parts=5,
        gradient_compression=IN_BF16,
    ),
    "two stages of two tensor ranks": Case(
        pipeline_parallel_degree=2,
        stages=(1, 1),
        tensor_parallel_degree=2,
        num_micro_batches=2,
        num_parts=3,
        recompute=(AGAIN, KEEP),
        model=FOUR_HEADS,
    ),
    "tensor, recomputed in three ways": Case(
        tensor_parallel_degree=2, exchange=(Exchange.NONE,) * 3, recompute=LADDER, model=ALL_OF_FOUR_HEADS
    ),
    "tensor, recomputed in three ways, on the host": Case(
        tensor_parallel_degree=2,
        exchange=(Exchange.NONE,) * 3,
        recompute=LADDER,
        offload=AWAY,
        model=ALL_OF_FOUR_HEADS,
        precision=HALF,
    ),
    "tensor, on the host without dropout": Case(tensor_parallel_degree=2, offload=AWAY[:2], model=FOUR_HEADS),
    "tensor, halo and all-gather, recomputed in three ways, on the host": Case(
        graph_parallel_degree=2,
        tensor_parallel_degree=2,
        exchange=(GATHER, HALO, GATHER),
        recompute=LADDER,
        offload=AWAY,
        model=ALL_OF_FOUR_HEADS,
    ),
    "tensor, overlapped, recomputed in three ways, on the host": Case(
        graph_parallel_degree=2,
        tensor_parallel_degree=2,
        exchange=(GATHER, HALO, GATHER),
        recompute=LADDER,
        overlaps=True,
        offload=AWAY,
        model=ALL_OF_FOUR_HEADS,
        precision=HALF,
    ),
    "shared out, recomputed in three ways": Case(
        data_parallel_degree=2,
        num_parts=4,
        exchange=(Exchange.NONE,) * 3,
        recompute=LADDER,
        model=EVERYTHING,
        shard_parameters=ParameterSharding.ZERO3,
    ),
    "shared out, recomputed in three ways, on the host": Case(
        graph_parallel_degree=2,
        exchange=(HALO, GATHER, HALO),
        recompute=LADDER,
        overlaps=True,
        offload=AWAY,
        model=EVERYTHING,
        precision=HALF,
        shard_parameters=ParameterSharding.ZERO3,
    ),
    "shared out, kept for the backward pass, on the host": Case(
        data_parallel_degree=2,
        num_parts=4,
        exchange=(Exchange.NONE,) * 3,
        recompute=(KEEP, Recompute.ATTENTION, AGAIN),
        offload=(*AWAY[:2], Offload.NONE),
        model=EVERYTHING,
        shard_parameters=ParameterSharding.ZERO2,
    ),
    "shared out, tensor, recomputed in three ways, on the host": Case(
        data_parallel_degree=2,
        tensor_parallel_degree=2,
        num_parts=4,
        exchange=(Exchange.NONE,) * 3,
        recompute=LADDER,
        offload=AWAY,
        model=ALL_OF_FOUR_HEADS,
        shard_parameters=ParameterSharding.ZERO3,
    ),
}


def cluster_of(kind: DeviceKind, *, num_hosts: int = 1, devices_per_host: int = 2) -> ClusterSpec:
    """Return hosts, one with two devices unless told otherwise; what is lowered depends on their kind alone."""
    device = DeviceSpec(
        kind=kind,
        name="any",
        memory_bytes=16 * GIB,
        memory_bandwidth_bytes_per_second=10 * GB,
        fp32_flops_per_second=TERA,
        bf16_flops_per_second=TERA,
    )
    return ClusterSpec(
        name="made",
        num_hosts=num_hosts,
        devices_per_host=devices_per_host,
        device=device,
        device_link=NVLINK4,
        host_link=NVLINK4,
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

    def lowered(self) -> Sequence[tuple[Task, ...]]:
        """Return the tasks of each rank in the step that is looked at."""
        cluster, step, seed = cluster_of(self.kind), self.case.step, TRAIN.seed
        works = (
            sampled_works(self.plan, self.case.model, self.inputs, step=step, seed=seed)
            if self.plan.sampled is not None
            else None
        )
        return lower(self.plan, self.spec, self.case.model, cluster, step=step, seed=seed, works=works).tasks


# Each case by name, with what each of its ranks did.
ObservedCase: TypeAlias = tuple[Prepared, tuple[ObservedStep, ...]]
Observed: TypeAlias = dict[str, ObservedCase]


def prepare(folder: Path, kind: DeviceKind, names: Sequence[str] = tuple(CASES)) -> list[Prepared]:
    """Return cases with their graphs, whose stores are written to `folder`."""
    graphs = {is_sparse: _graph(folder, is_sparse=is_sparse) for is_sparse in (False, True)}
    found = []
    for name in names:
        case = CASES[name]
        spec, graph = graphs[case.is_sparse]
        num_parts = case.num_parts or len(case.part_ranks) or case.graph_parallel_degree
        part_N = _parts(graph.num_nodes, num_parts, has_empty_part=case.has_empty_part)
        plan = _plan(case, graph, part_N, num_parts)
        per_host = case.ranks_per_host or plan.num_ranks
        cluster = cluster_of(kind, num_hosts=-(-plan.num_ranks // per_host), devices_per_host=per_host)
        assert not violations(plan, spec, case.model, cluster), name
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
        hosts=None
        if case.ranks_per_host is None
        else host_rows(graph, part_N, num_parts, ranks_per_host=case.ranks_per_host),
        shares=part_shares(graph, part_N, case.part_ranks) if case.part_ranks else None,
    )
    return Plan(
        data_parallel_degree=case.data_parallel_degree,
        graph_parallel_degree=case.graph_parallel_degree,
        tensor_parallel_degree=case.tensor_parallel_degree,
        shard_parameters=case.shard_parameters,
        pipeline_parallel_degree=case.pipeline_parallel_degree,
        stages=case.stages,
        pipeline_schedule=case.pipeline_schedule,
        num_micro_batches=case.num_micro_batches,
        partition=partition,
        parts_per_batch=num_parts
        if case.fan_outs or case.part_ranks
        else case.parts_per_batch or case.graph_parallel_degree,
        exchange=case.exchange,
        recompute=case.recompute,
        precision=case.precision,
        gradient_bucket_bytes=case.gradient_bucket_bytes,
        overlap_gradients=case.overlap_gradients,
        gradient_compression=case.gradient_compression,
        overlap_exchange=case.overlaps,
        exchange_payload=case.payload,
        exchange_precision=case.wire,
        exchange_chunk_bytes=case.chunk_bytes,
        between_edges=case.between_edges,
        sampled=_sampled(case, graph),
        keep_batches=case.keep_batches,
        prefetch_batches=case.prefetch_batches,
        offload=case.offload,
        offload_min_bytes=1,
        offload_optimizer=case.offload_optimizer,
    )


def _sampled(case: Case, graph: Graph) -> SampledBatches | None:
    if not case.fan_outs:
        return None
    return expected_batches(
        graph,
        case.fan_outs,
        seeds_per_batch=case.seeds_per_batch,
        data_parallel_degree=case.data_parallel_degree * case.num_micro_batches,
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
        **mesh_choices(plan),
    ) as place:
        recorder = Recorder(annotate=True, precision=plan.precision)
        trainer = Trainer(plan, prepared.spec, case.model, TRAIN, prepared.inputs, place, recorder)
        for step in range(case.step):
            trainer.step(step, *trainer.micro_batches(step))
        # Its times are those of the best of three: one interruption outside of a task outlasts a step of a millisecond.
        with contextlib.closing(trainer):
            observed = [observe_step(trainer, case.step) for _ in range(3)]
        best = max(observed, key=lambda seen: seen.named_seconds / seen.busy_seconds)
        return dataclasses.replace(observed[0], busy_seconds=best.busy_seconds, named_seconds=best.named_seconds)
