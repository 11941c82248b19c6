"""This rank's batches, as the plan says: the full graph, clusters or sampled neighbourhoods; the graph to evaluate.

What a step trains on follows from plan, seed and step alone, so every rank knows how many rows the loss of all ranks is
over, and all have equal numbers of steps.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist

from executor.data import Inputs, RankData, build_rank_data, build_sampled_data, prepare_attention
from executor.keyed import Stream, stream_bits
from executor.loader import BatchLoader, Making
from executor.mesh import Place
from executor.sampling.neighbourhood import Neighbourhood, NeighbourhoodSampler
from simulator.exchanges import rows_per_message
from simulator.shares import rank_of_nodes
from simulator.specs.model import EdgeBias, ModelSpec
from simulator.specs.plan import Exchange, Plan, batch_parts, seed_ranges
from simulator.workload import RankWork, of_all_ranks, owned_parts, work_of_sample


class Batches:
    """The batches of one rank.

    The full graph, and clusters that the plan keeps, are made once; all others by a loader, for one step each.

    Args:
        dtype: of activations.
        seed: `TrainSpec.seed`.
    """

    def __init__(
        self, plan: Plan, inputs: Inputs, place: Place, model: ModelSpec, *, dtype: torch.dtype, seed: int
    ) -> None:
        self._plan, self._inputs, self._place, self._seed = plan, inputs, place, seed
        self._model, self._dtype = model, dtype
        self._kept: dict[tuple[int, ...], RankData] = {}
        self._whole: RankData | None = None
        self._seeds_of_epoch: tuple[int, np.ndarray] | None = None
        self._sampler: NeighbourhoodSampler | None = None
        self._num_micro_batches = plan.num_micro_batches
        num_nodes = inputs.graph.num_nodes
        self.loader = BatchLoader(
            self._made,
            lambda batches: batch_shape(batches, num_nodes),
            depth=plan.prefetch_batches,
            device=place.device,
        )

    def of_step(self, step: int) -> RankData:
        """Return the first micro-batch of a step, as `micro_batches` does."""
        return self.micro_batches(step)[0]

    def micro_batches(self, step: int) -> Sequence[RankData]:
        """Return the micro-batches of a step.

        Raises:
            Exception: what making them raised.
        """
        if self._plan.loads_batches:
            return self.loader.take(step)
        return [self._kept_batch(step, micro_batch) for micro_batch in range(self._num_micro_batches)]

    def _kept_batch(self, step: int, micro_batch: int) -> RankData:
        parts, num_train_rows = self._parts(step, micro_batch)
        data = self._kept.get(parts) or self._of_parts(parts, num_train_rows)
        if data.num_train_rows_of_step != num_train_rows:  # other replicas have other parts
            data = replace(data, num_train_rows_of_step=num_train_rows)
        self._kept[parts] = data
        return data

    def making(self, step: int) -> Making | None:
        """Return when a later batch was made during a step, if a thread makes them."""
        return self.loader.making(step)

    def whole_graph(self) -> RankData:
        """Return the whole graph, all ranks together, dealt out by parts; that of a full-graph plan is its batch."""
        if self._plan.is_full_graph:
            return self.of_step(0)
        if self._whole is None:
            num_ranks = self._plan.num_row_ranks
            self._whole = self._rank_data(
                np.arange(self._plan.partition.num_parts) % num_ranks,
                graph_rank=self._place.row_rank,
                num_ranks=num_ranks,
                exchanges=frozenset({Exchange.HALO if num_ranks > 1 else Exchange.NONE}),
                group=self._place.gradient_group,
                num_train_rows=1,
            )
        return self._whole

    def sample(self, step: int, micro_batch: int = 0) -> tuple[Neighbourhood, int]:
        """Return the neighbourhoods that this rank samples for a micro-batch, and how many seeds the step has."""
        sampled = self._plan.sampled
        assert sampled is not None, "batches are parts"
        if self._sampler is None:
            order_N = self._inputs.order_N
            place_N = None if order_N is None else np.argsort(order_N)
            self._sampler = NeighbourhoodSampler(self._inputs.graph, sampled.fan_outs, seed=self._seed, place_N=place_N)
        ranges = [seed_ranges(self._plan, step=step, micro_batch=each) for each in range(self._plan.num_micro_batches)]
        first, end = ranges[micro_batch][self._place.replica]
        seeds = self._epoch_seeds(step // self._plan.steps_per_epoch)[first:end]
        return self._sampler.sample(seeds, step), ranges[-1][-1][1] - ranges[0][0][0]

    def close(self) -> None:
        """End the thread that makes batches, if there is one."""
        self.loader.close()

    def _made(self, step: int) -> Sequence[RankData]:
        """Return the micro-batches of a step that are not kept."""
        return [self._made_batch(step, micro_batch) for micro_batch in range(self._num_micro_batches)]

    def _made_batch(self, step: int, micro_batch: int) -> RankData:
        if self._plan.sampled is None:
            return prepare_attention(self._of_parts(*self._parts(step, micro_batch)))
        neighbourhood, num_train_rows = self.sample(step, micro_batch)
        data = build_sampled_data(
            self._inputs.graph,
            self._inputs.encodings,
            neighbourhood,
            degree_buckets=self._model.edge_bias is EdgeBias.DEGREE,
            num_train_rows_of_step=max(num_train_rows, 1),
            dtype=self._dtype,
            device=self._place.device,
            has_features=self._has_features,
        )
        return prepare_attention(data)

    def _epoch_seeds(self, epoch: int) -> np.ndarray:
        """Return all nodes to train on, in the order of an epoch, which is keyed like everything that is drawn."""
        if self._seeds_of_epoch is None or self._seeds_of_epoch[0] != epoch:
            nodes = np.flatnonzero(self._inputs.graph.train_mask_N)
            key = torch.tensor([self._seed, epoch])
            bits_N = stream_bits(torch.from_numpy(nodes), key, Stream.SEEDS).numpy()
            self._seeds_of_epoch = epoch, nodes[np.argsort(bits_N, kind="stable")]
        return self._seeds_of_epoch[1]

    @property
    def _has_features(self) -> bool:
        """Whether this rank has the first stage, which alone needs features."""
        return self._place.pipeline_rank == 0

    def _parts(self, step: int, micro_batch: int) -> tuple[tuple[int, ...], int]:
        """Return this replica's parts in a micro-batch, and the rows that the loss of the step uses on all ranks."""
        batches = [
            batch_parts(self._plan, step=step, seed=self._seed, micro_batch=each)
            for each in range(self._num_micro_batches)
        ]
        parts = self._plan.partition.parts
        distinct = {batch for of_micro_batch in batches for batch in of_micro_batch}
        num_train_rows = sum(parts[part].num_train_nodes for batch in distinct for part in batch)
        # A step without labels has a loss of 0, not 0 / 0.
        return batches[micro_batch][self._place.replica], max(num_train_rows, 1)

    def _of_parts(self, parts: tuple[int, ...], num_train_rows: int) -> RankData:
        shares = self._plan.partition.shares
        owner_of_part = np.full(self._plan.partition.num_parts, -1, np.int64)
        for graph_rank in range(self._plan.graph_parallel_degree):
            owner_of_part[list(owned_parts(self._plan, parts, graph_rank))] = graph_rank
        return self._rank_data(
            owner_of_part,
            graph_rank=self._place.graph_rank,
            num_ranks=self._plan.graph_parallel_degree,
            exchanges=frozenset(self._plan.exchange),
            group=self._place.graph_group,
            num_train_rows=num_train_rows,
            inside_N=None if self._plan.between_edges else self._inputs.part_N,
            overlaps=self._plan.overlap_exchange,
            for_one_step=self._plan.loads_batches,
            ranks_per_host=self._plan.ranks_per_host,
            part_ranks=None if shares is None else shares.part_ranks,
        )

    def _rank_data(
        self,
        owner_of_part: np.ndarray,
        *,
        graph_rank: int,
        num_ranks: int,
        exchanges: frozenset[Exchange],
        group: dist.ProcessGroup | None,
        num_train_rows: int,
        inside_N: np.ndarray | None = None,
        overlaps: bool = False,
        for_one_step: bool = False,
        ranks_per_host: int | None = None,
        part_ranks: tuple[int, ...] | None = None,
    ) -> RankData:
        part_N = self._inputs.part_N
        return build_rank_data(
            self._inputs.graph,
            self._inputs.encodings,
            owner_of_part[part_N] if part_ranks is None else rank_of_nodes(part_N, part_ranks),
            order_N=self._inputs.order_N,
            graph_rank=graph_rank,
            num_ranks=num_ranks,
            exchanges=exchanges,
            group=group,
            num_train_rows_of_step=num_train_rows,
            degree_buckets=self._model.edge_bias is EdgeBias.DEGREE,
            dtype=self._dtype,
            device=self._place.device,
            inside_N=inside_N,
            overlaps=overlaps,
            rows_per_message=self._rows_per_message(Exchange.HALO, num_ranks),
            head_rows_per_message=self._rows_per_message(Exchange.HEAD_ALL_TO_ALL, num_ranks),
            for_one_step=for_one_step,
            ranks_per_host=ranks_per_host,
            host_group=self._place.host_group,
            part_ranks=part_ranks,
            part_group=self._place.part_group,
            has_features=self._has_features,
        )

    def _rows_per_message(self, exchange: Exchange, num_ranks: int) -> int | None:
        found = rows_per_message(self._plan, self._model, exchange, num_ranks=num_ranks)
        # An evaluation by more ranks than the plan's graph groups have sends a row to each of them at least.
        return None if found is None else max(found, 1)


def batch_shape(batches: Sequence[RankData], num_graph_nodes: int) -> tuple[int, ...]:
    """Return the shape of the task that made the micro-batches of a step, counted."""
    return tuple(map(sum, zip(*(data.batch_shape(num_graph_nodes) for data in batches), strict=True)))


def sampled_works(plan: Plan, model: ModelSpec, inputs: Inputs, *, step: int, seed: int) -> tuple[RankWork, ...]:
    """Return what each rank of a plan of sampled batches holds in a step, from the very samples that it draws.

    With these `simulator.workload.lower` gives the exact program, where it else gives that of expected counts.
    """
    found: list[RankWork] = []
    for micro_batch in range(plan.num_micro_batches):
        works = [
            sampled_work(
                *(plan, model, inputs),
                rank=replica * plan.num_replica_ranks,
                step=step,
                seed=seed,
                micro_batch=micro_batch,
            )
            for replica in range(plan.data_parallel_degree)
        ]
        found += of_all_ranks(plan, works)
    return tuple(found)


def sampled_work(
    plan: Plan, model: ModelSpec, inputs: Inputs, *, rank: int, step: int, seed: int, micro_batch: int = 0
) -> RankWork:
    """Return what one rank of a plan of sampled batches holds of a micro-batch, from the very sample that it draws."""
    place = Place(
        rank=rank,
        num_ranks=plan.num_ranks,
        replica=rank // plan.num_replica_ranks,
        graph_rank=0,
        graph_group=None,
        world=None,
        device=torch.device("cpu"),
    )
    batches = Batches(plan, inputs, place, model, dtype=torch.float32, seed=seed)
    neighbourhood, _ = batches.sample(step, micro_batch)
    layers = tuple(layer.counts() for layer in neighbourhood.layers)
    features, node_N = inputs.graph.features, neighbourhood.node_N
    num_entries = 0 if isinstance(features, np.ndarray) else int(np.diff(features.indptr)[node_N].sum())
    return work_of_sample(layers, num_feature_entries=num_entries)
