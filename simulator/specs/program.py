"""Task, Program: what every rank does in one step, in the order in which its host thread issues it.

The simulator prices these tasks and the executor runs them under the same names: `lower` in
`simulator/workload.py` writes the program, `executor/model.py` and `executor/train.py` follow it, and the
conformance tests hold the two together.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import overload

from simulator.specs.units import Dtype

# A row with more edges is long: attention's kernels on GPUs cut it into pieces that programs of their own take.
MAX_SHORT_EDGES = 32


class TaskKind(StrEnum):
    """What a task computes or moves; `SHAPE_FIELDS` says what its shape counts, `executor/operations.py` does it."""

    CLUSTER_BATCH = "cluster_batch"
    SAMPLED_BATCH = "sampled_batch"
    LINEAR = "linear"
    INPUT_LINEAR = "input_linear"
    SPARSE_LINEAR = "sparse_linear"
    PROJECTION = "projection"
    LAYER_NORM = "layer_norm"
    GELU = "gelu"
    DROPOUT = "dropout"
    RESIDUAL = "residual"
    HALO_PACK = "halo_pack"
    PAD_ROWS = "pad_rows"
    COPY_ROWS = "copy_rows"
    BIAS = "bias"
    TARGET_ROWS = "target_rows"
    EDGE_BIAS = "edge_bias"
    ATTENTION = "attention"
    ATTENTION_SOURCES = "attention_sources"
    ATTENTION_TARGETS = "attention_targets"
    MERGE = "merge"
    LOSS = "loss"
    SHARD_COPY = "shard_copy"
    CLIP = "clip"
    GRADIENT_NORM = "gradient_norm"
    GRADIENT_SCALE = "gradient_scale"
    OPTIMIZER = "optimizer"
    GRADIENT_CAST = "gradient_cast"
    TOP_K_SELECT = "top_k_select"
    TOP_K_SUM = "top_k_sum"
    LOW_RANK_PROJECT = "low_rank_project"
    LOW_RANK_ORTHOGONALISE = "low_rank_orthogonalise"
    LOW_RANK_RESTORE = "low_rank_restore"
    COPY_TO_HOST = "copy_to_host"
    COPY_FROM_HOST = "copy_from_host"
    HOST_OPTIMIZER = "host_optimizer"
    ALL_TO_ALL = "all_to_all"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_REDUCE = "all_reduce"
    SEND = "send"
    RECEIVE = "receive"

    @property
    def is_collective(self) -> bool:
        """Whether ranks take part together."""
        return self in COLLECTIVES


# Making the rows of a batch on the host and bringing them to the device.
BATCH_KINDS = frozenset({TaskKind.CLUSTER_BATCH, TaskKind.SAMPLED_BATCH})
# Both ends of a message from one rank to another, whose group is these two: it begins once both are there. The sender
# goes on meanwhile.
MESSAGES = frozenset({TaskKind.SEND, TaskKind.RECEIVE})
# Collectives of a group, in which each rank does the same.
GROUP_COLLECTIVES = frozenset({TaskKind.ALL_TO_ALL, TaskKind.ALL_GATHER, TaskKind.REDUCE_SCATTER, TaskKind.ALL_REDUCE})
COLLECTIVES = GROUP_COLLECTIVES | MESSAGES
# Of a backward pass of attention that goes in two: over the sources of edges, for the gradients of keys and values, and
# over their targets, for those of queries.
ATTENTION_PASSES = frozenset({TaskKind.ATTENTION_SOURCES, TaskKind.ATTENTION_TARGETS})
ATTENTIONS = ATTENTION_PASSES | {TaskKind.ATTENTION}
# What compresses gradients.
COMPRESSIONS = frozenset(
    {
        TaskKind.GRADIENT_CAST,
        TaskKind.TOP_K_SELECT,
        TaskKind.TOP_K_SUM,
        TaskKind.LOW_RANK_PROJECT,
        TaskKind.LOW_RANK_ORTHOGONALISE,
        TaskKind.LOW_RANK_RESTORE,
    }
)
# Of parameters, gradients and the optimizer's state, which are fp32 whatever the activations are.
UPDATES = COMPRESSIONS | {
    TaskKind.SHARD_COPY,
    TaskKind.CLIP,
    TaskKind.GRADIENT_NORM,
    TaskKind.GRADIENT_SCALE,
    TaskKind.OPTIMIZER,
    TaskKind.HOST_OPTIMIZER,
}
# Between the device's memory and the host's, of bytes of any format.
HOST_COPIES = frozenset({TaskKind.COPY_TO_HOST, TaskKind.COPY_FROM_HOST})

_ATTENTION_FIELDS = (
    "targets",
    "sources",
    "edges",
    "edges_of_long_targets",
    "edges_of_long_sources",
    "heads",
    "head_size",
)
SHAPE_FIELDS: dict[TaskKind, tuple[str, ...]] = {
    # Nodes of the whole graph; rows of the batch, edges into them (where heads travel, those of all ranks too, or alone
    # if all layers do so), numbers of their features.
    TaskKind.CLUSTER_BATCH: ("nodes", "rows", "edges", "features"),
    # Rows of the last layer and of the first, edges of all layers, numbers of the first one's features.
    TaskKind.SAMPLED_BATCH: ("seeds", "rows", "edges", "features"),
    TaskKind.LINEAR: ("rows", "columns_in", "columns_out"),
    # A linear map of input features, which need no gradient.
    TaskKind.INPUT_LINEAR: ("rows", "columns_in", "columns_out"),
    TaskKind.SPARSE_LINEAR: ("rows", "entries", "columns_in", "columns_out"),
    # A linear map without a bias, such as to queries and keys with values, into which its result is split.
    TaskKind.PROJECTION: ("rows", "columns_in", "columns_out"),
    TaskKind.LAYER_NORM: ("rows", "columns"),
    TaskKind.GELU: ("rows", "columns"),
    TaskKind.DROPOUT: ("rows", "columns"),
    TaskKind.RESIDUAL: ("rows", "columns"),
    # Own rows to the front of the exchange buffer (0 where they stay), rows that others need to a message; backward,
    # gradients that a message brought are added in place (0 rows).
    TaskKind.HALO_PACK: ("rows", "rows_sent", "columns"),
    # Own rows to a buffer of as many rows as the largest part has; backward, the way back.
    TaskKind.PAD_ROWS: ("rows", "rows_padded", "columns"),
    # Rows to another layout or number format, forward and backward.
    TaskKind.COPY_ROWS: ("rows", "columns"),
    # A vector to each row, where it is no part of a product since the product is one of several ranks.
    TaskKind.BIAS: ("rows", "columns"),
    # The first rows of queries and of the residual stream, whose columns count; backward, zeros behind their gradients.
    TaskKind.TARGET_ROWS: ("rows", "rows_kept", "columns"),
    TaskKind.EDGE_BIAS: ("edges", "heads"),
    # Of the edges, those of targets, and those of sources, with more than MAX_SHORT_EDGES of them.
    TaskKind.ATTENTION: _ATTENTION_FIELDS,
    TaskKind.ATTENTION_SOURCES: _ATTENTION_FIELDS,
    TaskKind.ATTENTION_TARGETS: _ATTENTION_FIELDS,
    # Attention over a second set of edges into that over a first one, in place; of the rows, the last have such edges.
    TaskKind.MERGE: ("rows", "rows_merged", "heads", "head_size"),
    TaskKind.LOSS: ("rows", "rows_labelled", "columns"),
    # Numbers of a share of a layer's parameters to a message, or gradients; those of the shares of all ranks back.
    TaskKind.SHARD_COPY: ("shares", "elements"),
    TaskKind.CLIP: ("elements", "tensors"),
    # Both halves of a clip, where ranks sum what they know of the norm in between.
    TaskKind.GRADIENT_NORM: ("elements", "tensors"),
    TaskKind.GRADIENT_SCALE: ("elements", "tensors"),
    TaskKind.OPTIMIZER: ("elements", "tensors"),
    # A bucket to bf16, or back.
    TaskKind.GRADIENT_CAST: ("elements",),
    # The largest entries of a bucket, what earlier steps left out added.
    TaskKind.TOP_K_SELECT: ("elements", "elements_kept"),
    # The entries of all ranks back into a bucket.
    TaskKind.TOP_K_SUM: ("elements", "elements_kept", "ranks"),
    # PowerSGD on the matrices of a bucket: left factors; right factors from orthogonal left ones, and what they leave
    # out; the product of both. Elements are those of the matrices, `matrix_rank` the columns of their factors.
    TaskKind.LOW_RANK_PROJECT: ("elements", "matrices", "matrix_rank"),
    TaskKind.LOW_RANK_ORTHOGONALISE: ("elements", "matrices", "matrix_rank"),
    TaskKind.LOW_RANK_RESTORE: ("elements", "matrices", "matrix_rank"),
    TaskKind.COPY_TO_HOST: ("bytes",),
    TaskKind.COPY_FROM_HOST: ("bytes",),
    # The same update by the host, of parameters in its memory.
    TaskKind.HOST_OPTIMIZER: ("elements", "tensors"),
    # Bytes that this rank sends to each rank of the group, in the group's order.
    TaskKind.ALL_TO_ALL: (),
    # Bytes of this rank's input to the call.
    TaskKind.ALL_GATHER: ("bytes",),
    TaskKind.REDUCE_SCATTER: ("bytes",),
    TaskKind.ALL_REDUCE: ("bytes",),
    TaskKind.SEND: ("bytes",),
    TaskKind.RECEIVE: ("bytes",),
}


class Phase(StrEnum):
    """Which part of a step a task belongs to; all but the forward pass add it to the task's name."""

    FORWARD = "forward"
    RECOMPUTE = "recompute"
    BACKWARD = "backward"
    UPDATE = "update"


class Stream(StrEnum):
    """Queue of a device in which tasks run one after another."""

    COMPUTE = "compute"
    COMMUNICATION = "communication"
    GRADIENTS = "gradients"  # reductions that go on beside the backward pass and its exchanges
    HOST_TO_DEVICE = "host_to_device"
    DEVICE_TO_HOST = "device_to_host"
    LOADER = "loader"  # makes batches, in a thread of its own where they are prefetched
    HOST = "host"  # what the host computes itself, and waits for
    # Messages between stages, where those of activations and of gradients do not wait for one another.
    SENT_ACTIVATIONS = "sent_activations"
    SENT_GRADIENTS = "sent_gradients"
    RECEIVED = "received"


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One piece of work of one rank.

    Attributes:
        name: unique within a rank's step; the same on every rank of a collective's group, so at both ends of a message.
        shape: counts as `SHAPE_FIELDS` says.
        dtype: of the numbers that it works on.
        waits_for: indices of earlier tasks of this rank, on other streams, that must end first.
        group: ranks of a collective, in order, of a message its source and its target; empty otherwise.
        receives: of an all-to-all, bytes that this rank makes room for from each rank of the group, in the group's
            order; empty where that is not known, as in recorded steps, and of other kinds.
        blocks_host: the host thread waits until it has ended.
        beyond_cache_ratio: of `ATTENTIONS`, an estimate of the share of gathered rows that come from beyond the
            device's cache; None for other kinds.
    """

    name: str
    kind: TaskKind
    phase: Phase
    shape: tuple[int, ...]
    dtype: Dtype
    stream: Stream = Stream.COMPUTE
    waits_for: tuple[int, ...] = ()
    group: tuple[int, ...] = ()
    receives: tuple[int, ...] = ()
    blocks_host: bool = False
    beyond_cache_ratio: float | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes that this rank gives to a collective."""
        assert self.kind.is_collective, self.kind
        return sum(self.shape)


_STREAMS = {
    TaskKind.COPY_TO_HOST: Stream.DEVICE_TO_HOST,
    TaskKind.COPY_FROM_HOST: Stream.HOST_TO_DEVICE,
    TaskKind.HOST_OPTIMIZER: Stream.HOST,
}


def stream_of(kind: TaskKind) -> Stream:
    """Return the stream on which tasks of a kind run."""
    if kind in BATCH_KINDS:
        return Stream.LOADER
    if kind in MESSAGES:
        return Stream.SENT_ACTIVATIONS if kind is TaskKind.SEND else Stream.RECEIVED
    if kind in _STREAMS:
        return _STREAMS[kind]
    return Stream.COMMUNICATION if kind.is_collective else Stream.COMPUTE


def task_name(base: str, phase: Phase) -> str:
    """Return the name of a task in a phase, such as "layer0.attention.backward"."""
    return base if phase in (Phase.FORWARD, Phase.UPDATE) else f"{base}.{phase}"


def shifted_group(group: tuple[int, ...], shift: int, num_ranks: int) -> tuple[int, ...]:
    """Return the group of a rank that is so many ranks behind one with equal tasks, in another replica.

    A group that reaches over all replicas stays: moved, it would reach beyond the last rank.
    """
    if shift == 0 or len(group) == num_ranks or max(group, default=0) + shift >= num_ranks:
        return group
    return tuple(rank + shift for rank in group)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SharedTasks(Sequence[tuple[Task, ...]]):
    """The tasks of many ranks, each list of equal ones held once; a rank's own are made when they are asked for.

    Replicas of data parallelism run equal tasks: those of a rank are those of a list, with every group moved by the
    rank's shift, but for that of all ranks.

    Attributes:
        lists: the different ones.
        list_of_rank: index of each rank's list.
        shift_of_rank: what is added to the ranks of its groups.
    """

    lists: tuple[tuple[Task, ...], ...]
    list_of_rank: tuple[int, ...]
    shift_of_rank: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.list_of_rank)

    @overload
    def __getitem__(self, rank: int) -> tuple[Task, ...]: ...

    @overload
    def __getitem__(self, rank: slice) -> tuple[tuple[Task, ...], ...]: ...

    def __getitem__(self, rank: int | slice) -> tuple[Task, ...] | tuple[tuple[Task, ...], ...]:
        if isinstance(rank, slice):
            return tuple(self[each] for each in range(*rank.indices(len(self))))
        tasks, shift = self.lists[self.list_of_rank[rank]], self.shift_of_rank[rank]
        if shift == 0:
            return tasks
        return tuple(self.moved(task, shift) if task.group else task for task in tasks)

    def __iter__(self) -> Iterator[tuple[Task, ...]]:
        return (self[rank] for rank in range(len(self)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(mine == theirs for mine, theirs in zip(self, other, strict=True))

    def __hash__(self) -> int:
        return hash(tuple(self))

    def moved(self, task: Task, shift: int) -> Task:
        """Return a list's task for a rank with a shift."""
        group = shifted_group(task.group, shift, len(self))
        return task if group is task.group else replace(task, group=group)

    @property
    def num_tasks(self) -> int:
        """Tasks of all ranks."""
        sizes = [len(tasks) for tasks in self.lists]
        return sum(sizes[number] for number in self.list_of_rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """The tasks of one step, a tuple for each rank."""

    tasks: Sequence[tuple[Task, ...]]

    @property
    def num_ranks(self) -> int:
        """Ranks that take part."""
        return len(self.tasks)

    @property
    def num_tasks(self) -> int:
        """Tasks of all ranks."""
        return self.shared.num_tasks

    @property
    def shared(self) -> SharedTasks:
        """The same tasks with equal lists told; of tasks that are not shared, those that are one and the same tuple."""
        if isinstance(self.tasks, SharedTasks):
            return self.tasks
        number: dict[int, int] = {}
        for tasks in self.tasks:
            number.setdefault(id(tasks), len(number))
        lists = {id(tasks): tasks for tasks in self.tasks}
        return SharedTasks(
            lists=tuple(lists[key] for key in number),
            list_of_rank=tuple(number[id(tasks)] for tasks in self.tasks),
            shift_of_rank=(0,) * len(self.tasks),
        )
