"""SearchSpec: which plans a search may propose."""

from dataclasses import dataclass
from enum import StrEnum

from simulator.specs.checks import require, require_at_least, require_positive
from simulator.specs.gradients import GradientCompression
from simulator.specs.order import NodeOrder
from simulator.specs.plan import Exchange, ExchangePayload, Offload, ParameterSharding, PipelineSchedule, Recompute
from simulator.specs.units import MIB, Dtype


class BatchKind(StrEnum):
    """What a step trains on; the kinds differ in convergence, so a person may forbid one."""

    FULL_GRAPH = "full_graph"
    CLUSTERS = "clusters"
    ISOLATED_CLUSTERS = "isolated_clusters"  # without the edges between the parts of a batch
    SAMPLED = "sampled"  # neighbourhoods of nodes to train on, sampled anew each step


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSpec:
    """Bounds of the search; bf16, batches of less than the graph and compressed gradients change what is learned: ask.

    Attributes:
        num_ranks: numbers of ranks to try; empty for every power of two up to the cluster, and the cluster.
        tensor_parallel_degrees: numbers of ranks that share heads and feed-forward columns, to try where they share
            them evenly; empty for 1, and on GPUs every power of two up to the devices of a host.
        pipeline_parallel_degrees: numbers of ranks that share the layers of a replica, to try where there are as many
            layers.
        pipeline_schedules: to try with several stages; where they are interleaved, with two stages a rank, four and so
            on, as the layers allow.
        num_micro_batches: batches of a replica in a step to try where they are not the full graph; more of them make
            a step's batch larger, and a pipeline idle less.
        parameter_shardings: choices to try where several ranks hold other rows.
        shared_part_counts: numbers of parts to cut the full graph into beside one a rank, tried where ranks are more;
            the parts with most work are then served by several, each with heads of its own.
        batches, exchanges, recomputes, precisions: choices to try; a hierarchical exchange only on full graphs that
            several hosts share.
            Recomputes between none and layer, and offloads, are only tried where a plan that keeps all does not fit.
        offloads: what layers keep on the host, to try beside keeping it.
        offload_optimizers: whether the optimizer's state lies on the host, to try.
        exchange_overlaps, exchange_payloads: choices to try where rows of others travel.
        exchange_precisions: number formats to try of what travels, beside that of the plan; skipped where not shorter.
        exchange_chunk_bytes: bound of a message to try beside none, for plans whose buffers would not fit; 0 for none.
        gradient_bucket_bytes: sizes of buckets to try; without overlap the largest is taken, as its latency is least.
        overlap_gradients: whether buckets are reduced beside the backward pass; empty for both on GPUs, and for false
            on CPUs, whose cores would have to move the bytes too.
        gradient_compressions: to try where there are several ranks.
        parts_per_replica: cluster batches cut the graph into this many parts for each rank.
        parts_per_batch: parts of a cluster batch of one rank; ranks that share a batch have one each.
        fan_outs: neighbours that a node attends to at most in sampled batches, one for each layer, the last layer's
            last; empty without sampled batches.
        seeds_per_batch: nodes to train on of a replica in a step, at most, in sampled batches; 0 without.
        orders: of the nodes of a rank, to choose from by predicted gain; the only one is taken without a question.
        seed: of the partitioner, and of the batches that are drawn to count what sampled ones hold.
    """

    num_ranks: tuple[int, ...] = ()
    tensor_parallel_degrees: tuple[int, ...] = ()
    pipeline_parallel_degrees: tuple[int, ...] = (1,)
    pipeline_schedules: tuple[PipelineSchedule, ...] = (PipelineSchedule.ONE_F_ONE_B, PipelineSchedule.INTERLEAVED)
    num_micro_batches: tuple[int, ...] = (1,)
    parameter_shardings: tuple[ParameterSharding, ...] = (ParameterSharding.NONE,)
    shared_part_counts: tuple[int, ...] = ()
    batches: tuple[BatchKind, ...] = (BatchKind.FULL_GRAPH,)
    exchanges: tuple[Exchange, ...] = (
        Exchange.HALO,
        Exchange.HIERARCHICAL_HALO,
        Exchange.ALL_GATHER,
        Exchange.HEAD_ALL_TO_ALL,
    )
    recomputes: tuple[Recompute, ...] = tuple(Recompute)
    offloads: tuple[Offload, ...] = (Offload.NONE,)
    offload_optimizers: tuple[bool, ...] = (False,)
    precisions: tuple[Dtype, ...] = (Dtype.FLOAT32,)
    exchange_overlaps: tuple[bool, ...] = (False, True)
    exchange_payloads: tuple[ExchangePayload, ...] = tuple(ExchangePayload)
    exchange_precisions: tuple[Dtype, ...] = ()
    exchange_chunk_bytes: int = 0
    gradient_bucket_bytes: tuple[int, ...] = (1 * MIB, 5 * MIB, 25 * MIB)
    overlap_gradients: tuple[bool, ...] = ()
    gradient_compressions: tuple[GradientCompression, ...] = (GradientCompression(),)
    parts_per_replica: int = 4
    parts_per_batch: int = 1
    fan_outs: tuple[int, ...] = ()
    seeds_per_batch: int = 0
    orders: tuple[NodeOrder, ...] = tuple(NodeOrder)
    seed: int = 0

    def __post_init__(self) -> None:
        require_positive(parts_per_replica=self.parts_per_replica)
        rule = f"must be within 1 and parts_per_replica = {self.parts_per_replica}"
        require(1 <= self.parts_per_batch <= self.parts_per_replica, "parts_per_batch", rule, self.parts_per_batch)
        if BatchKind.ISOLATED_CLUSTERS in self.batches:
            rule = "must be >= 2 for isolated_clusters: no edges join the parts of a batch that has one"
            require(self.parts_per_batch >= 2, "parts_per_batch", rule, self.parts_per_batch)
        self._require_sampling()
        require_at_least(0, exchange_chunk_bytes=self.exchange_chunk_bytes)
        for size in self.gradient_bucket_bytes:
            require(size >= 4, "gradient_bucket_bytes", "must hold sizes of 4 bytes or more", size)
        choices = (
            "batches",
            "exchanges",
            "recomputes",
            "offloads",
            "offload_optimizers",
            "precisions",
            "orders",
            "exchange_overlaps",
            "exchange_payloads",
            "gradient_bucket_bytes",
            "gradient_compressions",
            "parameter_shardings",
            "pipeline_parallel_degrees",
            "pipeline_schedules",
            "num_micro_batches",
        )
        for field in choices:
            require(len(getattr(self, field)) > 0, field, "must name at least one choice", getattr(self, field))
        for num_ranks in self.num_ranks:
            require(num_ranks >= 1, "num_ranks", "must hold numbers >= 1", num_ranks)
        for field in ("tensor_parallel_degrees", "pipeline_parallel_degrees", "num_micro_batches"):
            for number in getattr(self, field):
                require(number >= 1, field, "must hold numbers >= 1", number)
        for count in self.shared_part_counts:
            require(count >= 2, "shared_part_counts", "must hold numbers >= 2: use head_all_to_all for one part", count)
        if self.shared_part_counts:
            rule = "must hold full_graph when shared_part_counts is not empty: batches of parts have one rank a part"
            require(BatchKind.FULL_GRAPH in self.batches, "batches", rule, self.batches)
            rule = "must hold halo when shared_part_counts is not empty: rows go between parts by it"
            require(Exchange.HALO in self.exchanges, "exchanges", rule, self.exchanges)
        rule = "must not hold none: a single rank has nothing to exchange, and several must"
        require(Exchange.NONE not in self.exchanges, "exchanges", rule, "none")

    def _require_sampling(self) -> None:
        """Require fan-outs and seeds where batches are sampled, and only there."""
        if BatchKind.SAMPLED in self.batches:
            require(
                len(self.fan_outs) > 0, "fan_outs", "must hold one for each layer for sampled batches", self.fan_outs
            )
            require(
                self.seeds_per_batch >= 1, "seeds_per_batch", "must be >= 1 for sampled batches", self.seeds_per_batch
            )
            for fan_out in self.fan_outs:
                require(fan_out >= 1, "fan_outs", "must hold numbers >= 1", fan_out)
        else:
            rule = "must be left out unless batches names sampled"
            require(not self.fan_outs, "fan_outs", rule, self.fan_outs)
            require(not self.seeds_per_batch, "seeds_per_batch", rule, self.seeds_per_batch)
