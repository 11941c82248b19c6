"""Batches to time the making of: clusters and sampled neighbourhoods of graphs at random."""

import itertools

import numpy as np
import torch

from executor.data import RankData, build_rank_data, build_sampled_data, prepare_attention
from executor.measure.case import TASK_NAME, Case
from executor.record import Recorder
from executor.sampling.neighbourhood import NeighbourhoodSampler
from executor.train import TORCH_DTYPES
from simulator.readers.graphs import Graph
from simulator.specs.plan import Exchange
from simulator.specs.program import Phase, TaskKind
from simulator.specs.units import Dtype

# Fan-outs, and nodes of the graph over rows: a batch that meets nearly all nodes of a small graph has some four edges a
# row, on a large graph one. Rows have more edges than are kept.
_MANY_EDGES, _FEW_EDGES, _SAMPLED_DEGREE = ((8, 4), 1.05), ((3, 2), 4.0), 24


def build_batch_case(kind: TaskKind, shape: tuple[int, ...], dtype: Dtype, device: torch.device) -> Case:
    """Return a runnable making of a batch of about a shape, until the device has it; the case tells the exact one."""
    first, rows, edges, features = shape
    generator = np.random.default_rng(0)
    torch_dtype = TORCH_DTYPES[dtype]
    if kind is TaskKind.CLUSTER_BATCH:
        mine = np.sort(generator.permutation(first)[:rows])
        graph = _graph(first, mine, edges // rows, features // rows, generator)
        owner_N = np.full(first, -1, dtype=np.int64)
        owner_N[mine] = 0

        def make() -> RankData:
            return build_rank_data(
                graph,
                None,
                owner_N,
                graph_rank=0,
                exchanges=frozenset({Exchange.NONE}),
                degree_buckets=False,
                group=None,
                num_ranks=1,
                num_train_rows_of_step=rows,
                for_one_step=True,
                dtype=torch_dtype,
                device=device,
            )
    else:
        fan_outs, nodes_per_row = _MANY_EDGES if edges > 2 * rows else _FEW_EDGES
        num_nodes = int(nodes_per_row * rows)
        graph = _graph(num_nodes, np.arange(num_nodes), _SAMPLED_DEGREE, features // rows, generator)
        sampler, steps = NeighbourhoodSampler(graph, fan_outs, seed=0), itertools.count()
        seeds = np.sort(generator.permutation(num_nodes)[:first])

        def make() -> RankData:
            return build_sampled_data(
                graph,
                None,
                sampler.sample(seeds, next(steps)),
                degree_buckets=False,
                num_train_rows_of_step=first,
                dtype=torch_dtype,
                device=device,
            )

    found = make().batch_shape(graph.num_nodes)

    def run(recorder: Recorder) -> None:
        with recorder.task(TASK_NAME, kind, Phase.FORWARD, found):
            prepare_attention(make())
            if device.type == "cuda":
                torch.cuda.synchronize(device)

    return Case(kind=kind, dtype=dtype, shape=found, run=run)


def _graph(num_nodes: int, mine: np.ndarray, degree: int, num_features: int, generator: np.random.Generator) -> Graph:
    """Return a graph in which some nodes have so many edges each, all from one another, and the others none."""
    degree_N = np.zeros(num_nodes, dtype=np.int64)
    degree_N[mine] = degree
    flags_N = np.ones(num_nodes, dtype=np.bool_)
    return Graph(
        indptr_N=np.concatenate([[0], np.cumsum(degree_N)]),
        source_E=mine[generator.integers(0, len(mine), degree * len(mine))].astype(np.int32),
        features=generator.standard_normal((num_nodes, max(num_features, 1)), dtype=np.float32),
        labels_N=np.zeros(num_nodes, dtype=np.int64),
        train_mask_N=flags_N,
        val_mask_N=~flags_N,
        test_mask_N=~flags_N,
    )
