"""Plan: how one model is trained on one graph by many ranks."""

import itertools
import random
from dataclasses import dataclass, field
from enum import StrEnum

from simulator.specs.checks import require, require_at_least, require_length, require_positive, require_share
from simulator.specs.gradients import GradientCompression
from simulator.specs.hosts import HostRows
from simulator.specs.mesh import ROW_AXES, MeshShape
from simulator.specs.order import OrderSpec
from simulator.specs.shares import PartShares
from simulator.specs.units import MIB, Dtype


class Exchange(StrEnum):
    """How a layer gets the keys and values of nodes that other ranks of its graph group own."""

    NONE = "none"  # the group is one rank
    HALO = "halo"  # only rows that a rank needs travel, by an all-to-all with uneven splits
    HIERARCHICAL_HALO = "hierarchical_halo"  # the same, but a row crosses to another host once, and is passed on there
    ALL_GATHER = "all_gather"  # every rank gets every row
    HEAD_ALL_TO_ALL = "head_all_to_all"  # every rank gets all rows of the heads that it owns, and sends them back


class ExchangePayload(StrEnum):
    """What of a row travels in a halo exchange or an all-gather."""

    KEYS_AND_VALUES = "keys_and_values"
    ROWS = "rows"  # the layer's normed row, half the bytes; who receives it computes its keys and values again


# What brings rows of others to a rank, which its own nodes then attend to.
ROW_EXCHANGES = frozenset({Exchange.HALO, Exchange.HIERARCHICAL_HALO, Exchange.ALL_GATHER})
# Of these, what brings only the rows that the own nodes attend to.
HALO_EXCHANGES = frozenset({Exchange.HALO, Exchange.HIERARCHICAL_HALO})


class Recompute(StrEnum):
    """What of a layer is computed again in the backward pass instead of kept."""

    NONE = "none"
    SELECTIVE = "selective"  # norms, activation, dropout masks, edge biases: outputs of products and attention are kept
    DENSE = "dense"  # also queries, keys and values, and the way up; attention and what exchanges brought are kept
    ATTENTION = "attention"  # also attention; nothing that travelled travels again
    LAYER = "layer"  # only the layer's input is kept


# Where keys and values travel, queries alone are computed again, so they are not made together.
QUERIES_APART = frozenset({Recompute.DENSE, Recompute.ATTENTION})


class Offload(StrEnum):
    """What a layer keeps for its backward pass in the host's memory meanwhile."""

    NONE = "none"
    ACTIVATIONS = "activations"  # what it would keep on the device, but for small tensors


class ParameterSharding(StrEnum):
    """Where the parameters of a layer lie, with their gradients and the optimizer's state."""

    NONE = "none"  # on every rank that computes with them
    ZERO2 = "zero2"  # a share on each; all of a layer is gathered before its forward pass and kept until its backward
    ZERO3 = "zero3"  # the same, but a layer is gathered for either pass and given up behind it


class PipelineSchedule(StrEnum):
    """In which order a rank runs the passes of its stages over the micro-batches of a step."""

    GPIPE = "gpipe"  # all forward passes, then all backward passes
    ONE_F_ONE_B = "1f1b"  # a backward pass as soon as there is one to run, so that fewer micro-batches are kept
    INTERLEAVED = "interleaved_1f1b"  # the same, each rank with several stages that lie apart, so that ranks idle less


class StepMode(StrEnum):
    """How the operations of a step get to the device."""

    EAGER = "eager"  # the host launches one after another
    CUDA_GRAPH = "cuda_graph"  # once captured they are launched as one; steps that are traced stay eager


class PartitionMethod(StrEnum):
    """Who cut the graph."""

    SINGLE = "single"  # one part
    METIS = "metis"
    STRIPES = "stripes"  # runs of nodes with equal numbers of edges, where METIS cannot serve


@dataclass(frozen=True, slots=True, kw_only=True)
class PartSpec:
    """One part of the graph in numbers.

    Attributes:
        num_nodes: nodes that the part owns.
        num_train_nodes: of them, those whose label the loss uses.
        num_feature_entries: stored entries of their sparse features; 0 when features are dense.
        edges_from: edges into this part's nodes, by the part that owns the source.
        halo_rows_from: distinct sources of those edges, by the part that owns them; 0 for the part itself.
        edges_of_long_targets_from: of the edges, by the part that owns the source, those of targets with more than
            `MAX_SHORT_EDGES` edges.
        edges_of_long_sources_from: of the edges, by the part that owns the source, those of sources with more than
            `MAX_SHORT_EDGES` edges into this part.
        inner_edges_of_long_targets: of the edges inside the part, those of targets with more than `MAX_SHORT_EDGES` of
            these.
        outer_edges_of_long_targets: of the edges from other parts, those of targets with more than `MAX_SHORT_EDGES` of
            these.
        edges_out_of_long_sources: edges from this part's nodes into all parts, of those that have more than
            `MAX_SHORT_EDGES`.
        num_boundary_nodes: nodes with an edge from another part.
        boundary_nodes_from: nodes with an edge from each part; 0 for the part itself.
    """

    num_nodes: int
    num_train_nodes: int
    num_feature_entries: int
    edges_from: tuple[int, ...]
    halo_rows_from: tuple[int, ...]
    edges_of_long_targets_from: tuple[int, ...]
    edges_of_long_sources_from: tuple[int, ...]
    inner_edges_of_long_targets: int
    outer_edges_of_long_targets: int
    edges_out_of_long_sources: int
    num_boundary_nodes: int
    boundary_nodes_from: tuple[int, ...]

    @property
    def num_edges(self) -> int:
        """Edges into this part's nodes."""
        return sum(self.edges_from)

    @property
    def num_halo_rows(self) -> int:
        """Distinct nodes of other parts that this part's nodes attend to."""
        return sum(self.halo_rows_from)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionSpec:
    """A cut of the graph; the node-to-part array itself lies in a file.

    Attributes:
        method, seed: how it was made.
        path: the partition file, relative to the plan's folder; empty when there is one part.
        sha256: hash of the node-to-part array.
        parts: the parts in numbers.
        hosts: rows between ranks when each row of another host enters a host once; None where nobody asked.
        shares: what each rank owns where some parts are served by several ranks; None for one rank a part.
    """

    method: PartitionMethod
    seed: int
    path: str
    sha256: str
    parts: tuple[PartSpec, ...]
    hosts: HostRows | None = None
    shares: PartShares | None = None

    def __post_init__(self) -> None:
        require_positive(num_parts=len(self.parts))
        if self.hosts is not None:
            self._require_hosts_fit(self.hosts)
        if self.shares is not None:
            self._require_shares_fit(self.shares)
        for part in self.parts:
            require_length(
                len(self.parts),
                edges_from=part.edges_from,
                halo_rows_from=part.halo_rows_from,
                edges_of_long_targets_from=part.edges_of_long_targets_from,
                edges_of_long_sources_from=part.edges_of_long_sources_from,
                boundary_nodes_from=part.boundary_nodes_from,
            )

    def _require_hosts_fit(self, hosts: HostRows) -> None:
        require_length(len(self.parts), hosts=hosts.rows_from)
        for index, part in enumerate(self.parts):
            rows = sum(hosts.rows_from[index]) + sum(hosts.passed_rows_from[index])
            rule = f"must bring part {index} as many rows as it has halo rows, {part.num_halo_rows}"
            require(rows == part.num_halo_rows, "hosts", rule, rows)

    def _require_shares_fit(self, shares: PartShares) -> None:
        require_length(len(self.parts), part_ranks=shares.part_ranks)
        for index, part in enumerate(self.parts):
            ranks = shares.ranks_of(index)
            rows = sum(shares.num_nodes[rank] for rank in ranks)
            require(rows == part.num_nodes, "shares", f"must hold the {part.num_nodes} nodes of part {index}", rows)
            for other, halo_rows in enumerate(part.halo_rows_from):
                rows = sum(shares.rows_to_parts[rank][index] for rank in shares.ranks_of(other))
                rule = f"must send part {index} the {halo_rows} halo rows of part {other}"
                require(rows == halo_rows, "shares", rule, rows)

    @property
    def num_parts(self) -> int:
        """Parts of the cut."""
        return len(self.parts)

    @property
    def num_cut_edges(self) -> int:
        """Edges whose ends lie in different parts."""
        return sum(part.num_edges - part.edges_from[index] for index, part in enumerate(self.parts))

    @property
    def halo_ratio(self) -> float:
        """Copies of remote nodes over owned nodes, all parts together (may exceed one)."""
        return sum(part.num_halo_rows for part in self.parts) / sum(part.num_nodes for part in self.parts)

    @property
    def edge_imbalance(self) -> float:
        """Edges of the largest part over the mean; one is perfect."""
        edges = [part.num_edges for part in self.parts]
        return max(edges) * len(edges) / max(sum(edges), 1)

    @property
    def node_imbalance(self) -> float:
        """Owned nodes of the largest part over the mean; one is perfect."""
        nodes = [part.num_nodes for part in self.parts]
        return max(nodes) * len(nodes) / sum(nodes)

    @property
    def row_imbalance(self) -> float:
        """Owned plus halo rows of the largest part over the mean: the balance of memory."""
        rows = [part.num_nodes + part.num_halo_rows for part in self.parts]
        return max(rows) * len(rows) / sum(rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledLayer:
    """One layer of a batch of sampled neighbourhoods in numbers.

    Attributes:
        num_sources: rows that the layer gets: those of its targets, and of what these attend to.
        num_targets: rows that it returns.
        num_edges: from sources to targets.
        num_edges_of_long_targets: of them, those of targets with more than `MAX_SHORT_EDGES` edges.
        num_edges_of_long_sources: those of sources with more than so many.
    """

    num_sources: int
    num_targets: int
    num_edges: int
    num_edges_of_long_targets: int
    num_edges_of_long_sources: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledBatches:
    """Batches of nodes to train on (seeds) with the neighbourhoods that are sampled for them.

    Attributes:
        fan_outs: neighbours that a target attends to at most, of each layer; the last layer's targets are the seeds.
        seeds_per_batch: seeds of a replica in a step, at most.
        layers: counts to be expected of a batch, each layer's, rounded.
        num_feature_entries: to be expected, stored entries of the rows' sparse features; 0 when features are dense.
    """

    fan_outs: tuple[int, ...]
    seeds_per_batch: int
    layers: tuple[SampledLayer, ...]
    num_feature_entries: int

    def __post_init__(self) -> None:
        require_positive(seeds_per_batch=self.seeds_per_batch)
        for fan_out in self.fan_outs:
            require(fan_out >= 1, "fan_outs", "must hold numbers >= 1", fan_out)
        require_length(len(self.fan_outs), layers=self.layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The choices that a search makes; `MeshShape` says which rank sits where.

    A step trains on `data_parallel_degree` batches of `parts_per_batch` parts. A batch with all parts is
    the full graph. Edges that leave a batch are dropped. The ranks of a graph group share a batch, one part each, or
    several for a part where `partition.shares` says so.
    Where batches are sampled, a replica trains on nodes of any part, and the parts are those of evaluations.

    Attributes:
        data_parallel_degree: replicas, each with a batch of its own.
        graph_parallel_degree: ranks that share a batch.
        tensor_parallel_degree: ranks that share the heads and feed-forward columns of all layers, for the same rows.
        shard_parameters: whether ranks with the same heads and columns share out parameters.
        pipeline_parallel_degree: ranks that share the layers of a replica, one after another.
        stages: layers of each stage, in order; stage s is on rank s modulo the degree of its pipeline. Empty for one
            stage.
        pipeline_schedule: of the passes of a pipeline's stages.
        num_micro_batches: batches of a replica in a step, one after another: each is `parts_per_batch` parts, or
            sampled neighbourhoods of `seeds_per_batch` seeds. The loss is the mean over the nodes of all of them.
        partition: the cut of the graph.
        parts_per_batch: parts that a replica trains on in one step.
        exchange: of each layer.
        recompute: of each layer.
        precision: of activations; parameters, softmax and loss are fp32.
        gradient_bucket_bytes: gradients are reduced in buckets of about this size.
        overlap_gradients: a bucket's reduction begins as soon as its last gradient is there, beside the rest of the
            backward pass; else behind the backward pass.
        gradient_compression: what travels in place of gradients.
        order: in which each rank holds its nodes.
        step_mode: how steps are launched.
        beyond_cache_ratio: share of the rows that attention gathers which come from beyond the device's cache, with
            this partition, order and precision; None where nobody looked.
        overlap_exchange: attention over edges between own rows runs while rows of others are on their way, in layers
            with a halo exchange or an all-gather; a rank's rows with edges from others then come last.
        exchange_payload: what of a row travels in these layers.
        exchange_precision: of what travels; None for `precision`.
        exchange_chunk_bytes: most bytes that a rank sends to others, or receives from them, in one collective of a
            layer; an exchange that has more is cut into several. None for no bound.
        between_edges: whether the edges between the parts of a batch are kept.
        sampled: neighbourhoods to train on instead of parts; None for parts.
        keep_batches: keep every batch on the device once it is made, which batches of one part allow.
        prefetch_batches: of batches that are not kept, how many a thread makes ahead of the steps; 0 makes each in the
            step that needs it.
        offload: of each layer; empty for none of them.
        offload_min_bytes: tensors of fewer bytes stay on the device.
        offload_optimizer: parameters and the optimizer's state lie in the host's memory too, where the host updates
            them; gradients go there and parameters come back.
    """

    data_parallel_degree: int
    graph_parallel_degree: int
    tensor_parallel_degree: int = 1
    shard_parameters: ParameterSharding = ParameterSharding.NONE
    pipeline_parallel_degree: int = 1
    stages: tuple[int, ...] = ()
    pipeline_schedule: PipelineSchedule = PipelineSchedule.ONE_F_ONE_B
    num_micro_batches: int = 1
    partition: PartitionSpec
    parts_per_batch: int
    exchange: tuple[Exchange, ...]
    recompute: tuple[Recompute, ...]
    precision: Dtype
    gradient_bucket_bytes: int = 25 * MIB
    overlap_gradients: bool = False
    gradient_compression: GradientCompression = field(default_factory=GradientCompression)
    order: OrderSpec = field(default_factory=OrderSpec)
    step_mode: StepMode = StepMode.EAGER
    beyond_cache_ratio: float | None = None
    overlap_exchange: bool = False
    exchange_payload: ExchangePayload = ExchangePayload.KEYS_AND_VALUES
    exchange_precision: Dtype | None = None
    exchange_chunk_bytes: int | None = None
    between_edges: bool = True
    sampled: SampledBatches | None = None
    keep_batches: bool = False
    prefetch_batches: int = 0
    offload: tuple[Offload, ...] = ()
    offload_min_bytes: int = 1 * MIB
    offload_optimizer: bool = False

    def __post_init__(self) -> None:
        require_at_least(0, prefetch_batches=self.prefetch_batches)
        require_positive(data_parallel_degree=self.data_parallel_degree)
        require_positive(graph_parallel_degree=self.graph_parallel_degree)
        require_positive(tensor_parallel_degree=self.tensor_parallel_degree)
        require_positive(pipeline_parallel_degree=self.pipeline_parallel_degree)
        require_positive(num_micro_batches=self.num_micro_batches)
        for num_layers in self.stages:
            require(num_layers >= 1, "stages", "must hold numbers >= 1", num_layers)
        require_at_least(4, gradient_bucket_bytes=self.gradient_bucket_bytes)
        rule = f"must be within 1 and num_parts = {self.partition.num_parts}"
        require(
            1 <= self.parts_per_batch <= self.partition.num_parts,
            "parts_per_batch",
            rule,
            self.parts_per_batch,
        )
        require_length(len(self.exchange), recompute=self.recompute)
        if self.offload:
            require_length(len(self.exchange), offload=self.offload)
        require_positive(offload_min_bytes=self.offload_min_bytes)
        require_share(beyond_cache_ratio=self.beyond_cache_ratio)
        if self.exchange_chunk_bytes is not None:
            require_positive(exchange_chunk_bytes=self.exchange_chunk_bytes)

    @property
    def mesh(self) -> MeshShape:
        """Sizes of the axes of ranks."""
        return MeshShape(
            dp=self.data_parallel_degree,
            pp=self.pipeline_parallel_degree,
            gp=self.graph_parallel_degree,
            tp=self.tensor_parallel_degree,
        )

    @property
    def num_ranks(self) -> int:
        """Processes, one device each."""
        return self.mesh.num_ranks

    @property
    def shares_out(self) -> bool:
        """Whether ranks share parameters out."""
        return self.shard_parameters is not ParameterSharding.NONE

    @property
    def num_row_ranks(self) -> int:
        """Ranks with rows of their own; others hold the same rows and other heads and columns."""
        return self.mesh.size(ROW_AXES)

    @property
    def num_replica_ranks(self) -> int:
        """Ranks of one replica, which follow one another."""
        return self.num_ranks // self.data_parallel_degree

    @property
    def is_full_graph(self) -> bool:
        """Whether each step trains on the whole graph."""
        takes_all = self.parts_per_batch == self.partition.num_parts
        return takes_all and self.sampled is None and (self.between_edges or self.partition.num_parts == 1)

    @property
    def loads_batches(self) -> bool:
        """Whether batches are made anew for each step."""
        return not self.is_full_graph and not self.keep_batches

    @property
    def num_train_nodes(self) -> int:
        """Nodes that the loss uses."""
        return sum(part.num_train_nodes for part in self.partition.parts)

    @property
    def steps_per_epoch(self) -> int:
        """Steps after which every part, or every node to train on, was trained on once."""
        batches_per_step = self.data_parallel_degree * self.num_micro_batches
        if self.sampled is not None:
            return max(-(-self.num_train_nodes // (self.sampled.seeds_per_batch * batches_per_step)), 1)
        parts_per_step = self.parts_per_batch * batches_per_step
        return -(-self.partition.num_parts // parts_per_step)

    @property
    def ranks_per_host(self) -> int | None:
        """Ranks of a host that a hierarchical exchange counts on; None without one, when any will do."""
        hosts = self.partition.hosts
        return hosts.ranks_per_host if hosts and Exchange.HIERARCHICAL_HALO in self.exchange else None

    @property
    def part_ranks(self) -> tuple[int, ...]:
        """Ranks of a graph group that serve each part of its batch, in order; one each unless parts are shared."""
        shares = self.partition.shares
        return (1,) * self.parts_per_batch if shares is None else shares.part_ranks

    @property
    def part_groups(self) -> tuple[tuple[int, ...], ...]:
        """Ranks that serve a part together, each with heads and rows of its own; parts of one rank are left out."""
        shares = self.partition.shares
        if shares is None:
            return ()
        return tuple(shares.ranks_of(part) for part, count in enumerate(shares.part_ranks) if count > 1)

    def overlaps(self, layer: int) -> bool:
        """Return whether attention of a layer runs while its exchange is under way."""
        return self.overlap_exchange and self.exchange[layer] in ROW_EXCHANGES

    def offloads(self, layer: int) -> bool:
        """Return whether a layer's activations go to the host's memory."""
        return bool(self.offload) and self.offload[layer] is Offload.ACTIVATIONS

    def splits_projection(self, layer: int) -> bool:
        """Return whether queries are made apart from keys and values, since they alone are computed again."""
        is_asked = self.recompute[layer] in QUERIES_APART and self.exchange[layer] in ROW_EXCHANGES
        return is_asked and not self.overlaps(layer)

    def graph_group(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that share a batch with `rank` and exchange rows of the same heads with it."""
        return self.mesh.group(("gp",), rank)

    def tensor_group(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that hold the same rows as `rank`, with other heads and columns."""
        return self.mesh.group(("tp",), rank)

    def gradient_group(self, rank: int) -> tuple[int, ...]:
        """Return the ranks over which the gradients of `rank` are summed."""
        return self.mesh.group(ROW_AXES, rank)

    def row_rank(self, rank: int) -> int:
        """Return the place of `rank` in its gradient group: which of the ranks with rows of their own it is."""
        return self.mesh.place_in(ROW_AXES, rank)

    @property
    def cuts_steps(self) -> bool:
        """Whether a step is several passes, over stages or micro-batches, whose tasks are told apart by name."""
        return self.pipeline_parallel_degree > 1 or self.num_micro_batches > 1

    @property
    def num_stages(self) -> int:
        """Stages of all ranks of a pipeline."""
        return max(len(self.stages), 1)

    def layers_of_stage(self, stage: int) -> range:
        """Return the layers of a stage."""
        if not self.stages:
            return range(len(self.exchange))
        first = sum(self.stages[:stage])
        return range(first, first + self.stages[stage])

    def pipeline_rank(self, rank: int) -> int:
        """Return the place of `rank` in its pipeline."""
        return self.mesh.coordinates(rank).pp

    def stages_of(self, pipeline_rank: int) -> range:
        """Return the stages of a rank by its place in its pipeline."""
        return range(pipeline_rank, self.num_stages, self.pipeline_parallel_degree)

    def stage_of(self, parameter: str) -> int:
        """Return the stage that holds a parameter, told by its name, such as "layer0.edge_bias"."""
        module = parameter.partition(".")[0]
        if not module.startswith("layer"):
            return 0 if module == "input" else self.num_stages - 1
        index = int(module.removeprefix("layer"))
        return next(stage for stage in range(self.num_stages) if index in self.layers_of_stage(stage))

    def stage_group(self, rank: int, stage: int, other: int) -> tuple[int, int]:
        """Return the ranks between which one stage of the pipeline of `rank` sends to another."""
        pipeline, degree = self.mesh.group(("pp",), rank), self.pipeline_parallel_degree
        return pipeline[stage % degree], pipeline[other % degree]

    def model_group(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that hold one whole model together with `rank`."""
        return self.mesh.group(("pp", "tp"), rank)


def batch_parts(plan: Plan, *, step: int, seed: int, micro_batch: int = 0) -> tuple[tuple[int, ...], ...]:
    """Return the parts of a micro-batch of each replica in a step; some may be empty at the end of an epoch.

    The order of parts is drawn anew for each epoch from `seed`. Simulator and executor both ask here.
    """
    if plan.is_full_graph:
        return (tuple(range(plan.partition.num_parts)),) * plan.data_parallel_degree
    epoch, step_of_epoch = divmod(step, plan.steps_per_epoch)
    order = _shuffled(plan.partition.num_parts, seed=seed, epoch=epoch)
    batches_before = step_of_epoch * plan.num_micro_batches + micro_batch
    first = batches_before * plan.parts_per_batch * plan.data_parallel_degree
    starts = [first + replica * plan.parts_per_batch for replica in range(plan.data_parallel_degree)]
    return tuple(tuple(order[start : start + plan.parts_per_batch]) for start in starts)


def seed_ranges(plan: Plan, *, step: int, micro_batch: int = 0) -> tuple[tuple[int, int], ...]:
    """Return which of an epoch's seeds each replica has in a micro-batch of a step: the first, and one after the last.

    An epoch's seeds are dealt out to all its batches at once, so their numbers differ by one at most, every replica has
    as many steps, and no seed is left out. Simulator and executor both ask here.
    """
    num_batches = plan.steps_per_epoch * plan.num_micro_batches * plan.data_parallel_degree
    first = (step % plan.steps_per_epoch * plan.num_micro_batches + micro_batch) * plan.data_parallel_degree
    bounds = [
        plan.num_train_nodes * batch // num_batches for batch in range(first, first + plan.data_parallel_degree + 1)
    ]
    return tuple(itertools.pairwise(bounds))


def _shuffled(count: int, *, seed: int, epoch: int) -> list[int]:
    """Return 0 to count - 1 in an order that depends on seed and epoch alone."""
    order = list(range(count))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order
