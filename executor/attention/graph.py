"""EdgeGraph: edges prepared for attention, once, and kept for every layer and step."""

import itertools
import weakref
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from executor.attention.windows import RULE_OF_SOURCES, RULE_OF_TARGETS, Windows, build_windows
from executor.attention.work import WorkList, build_work_list, even_work_list
from simulator.specs.program import MAX_SHORT_EDGES

MAX_INT32 = 2**31 - 1


@dataclass(frozen=True, kw_only=True, eq=False)
class EdgeGraph:
    """Edges from source rows to target rows, by target.

    The transpose and the work lists of the kernels are built when first asked for and kept.

    Attributes:
        indptr_N1: int64 [num_targets + 1]; the edges into target i are `indptr_N1[i] : indptr_N1[i + 1]`.
        source_E: int32 [num_edges], rows of the keys and values.
        num_sources: rows of the keys and values.
        edge_id_E: int64 [num_edges], ids of the edges in the whole graph, which key dropout; by default the positions.
        row_degree: edges of every target where all have as many; then the host counts nothing.
        same_rows_as: a graph with the same row pointers, whose work list and targets serve this one too, as neighbours
            that are sampled anew each step have.
        is_sampled: whether it is used for one step only; then nobody looks for windows.
    """

    indptr_N1: Tensor
    source_E: Tensor
    num_sources: int
    edge_id_E: Tensor | None = None
    row_degree: int | None = None
    same_rows_as: "EdgeGraph | None" = None
    is_sampled: bool = False

    def __post_init__(self) -> None:
        assert self.indptr_N1.dtype == torch.int64, self.indptr_N1.dtype
        assert self.source_E.dtype == torch.int32, self.source_E.dtype
        assert max(self.num_targets, self.num_sources) <= MAX_INT32, (self.num_targets, self.num_sources)
        _GRAPHS[self.handle] = self

    @property
    def num_targets(self) -> int:
        """Rows of the queries."""
        return self.indptr_N1.numel() - 1

    @property
    def num_edges(self) -> int:
        """Edges."""
        return self.source_E.numel()

    @property
    def device(self) -> torch.device:
        """Where the edges are."""
        return self.source_E.device

    @cached_property
    def handle(self) -> int:
        """Number that stands for this graph in calls of torch operators, which take no objects."""
        return next(_HANDLES)

    @cached_property
    def target_E(self) -> Tensor:
        """Row of the query of each edge, int32 [num_edges], ascending."""
        return self.same_rows_as.target_E if self.same_rows_as is not None else self._targets()

    @cached_property
    def work(self) -> WorkList:
        """Pieces of rows for programs that gather the sources of each target."""
        if self.same_rows_as is not None:
            return self.same_rows_as.work
        if self.row_degree is not None and self.row_degree <= MAX_SHORT_EDGES:
            return even_work_list(self.num_targets, self.row_degree, self.device)
        return build_work_list(self.indptr_N1)

    @cached_property
    def windows(self) -> Windows | None:
        """Windows of targets that share sources; None where they would not pay."""
        if self.is_sampled:
            return None
        return build_windows(self.indptr_N1, self.source_E, self.num_sources, rule=RULE_OF_TARGETS)

    @cached_property
    def transpose(self) -> "Transpose":
        """The same edges by source."""
        source_E, position_E = torch.sort(self.source_E, stable=True)
        counts_M = torch.bincount(self.source_E, minlength=self.num_sources)
        indptr_M1 = torch.zeros(self.num_sources + 1, dtype=torch.int64, device=self.device)
        torch.cumsum(counts_M, 0, out=indptr_M1[1:])
        del source_E
        # Made for once and not kept: the kernels need none.
        target_E = self._targets().index_select(0, position_E)
        index_dtype = torch.int32 if self.num_edges <= MAX_INT32 else torch.int64
        return Transpose(
            indptr_M1=indptr_M1,
            target_E=target_E,
            position_E=position_E.to(index_dtype),
            num_targets=self.num_targets,
            is_sampled=self.is_sampled,
        )

    @cached_property
    def num_edges_of_long_rows(self) -> tuple[int, int]:
        """Edges of targets, and edges of sources, with more than `MAX_SHORT_EDGES` of them; counted once."""
        degree_N = self.indptr_N1.diff()
        degree_M = torch.bincount(self.source_E, minlength=self.num_sources)
        of_targets, of_sources = (int(degree[degree > MAX_SHORT_EDGES].sum()) for degree in (degree_N, degree_M))
        return of_targets, of_sources

    def _targets(self) -> Tensor:
        rows_N = torch.arange(self.num_targets, device=self.device, dtype=torch.int32)
        return rows_N.repeat_interleave(self.indptr_N1.diff(), output_size=self.num_edges)


@dataclass(frozen=True, kw_only=True, eq=False)
class Transpose:
    """The edges of an `EdgeGraph` by source.

    Attributes:
        indptr_M1: int64 [num_sources + 1].
        target_E: int32 [num_edges], targets of each source's edges, ascending.
        position_E: position of each of them among the edges by target; int32, or int64 above 2^31 edges.
        num_targets, is_sampled: of the graph.
    """

    indptr_M1: Tensor
    target_E: Tensor
    position_E: Tensor
    num_targets: int
    is_sampled: bool = False

    @cached_property
    def work(self) -> WorkList:
        """Pieces of rows for programs that gather the targets of each source."""
        return build_work_list(self.indptr_M1)

    @cached_property
    def windows(self) -> Windows | None:
        """Windows of sources that share targets; None where they would not pay."""
        if self.is_sampled:
            return None
        return build_windows(self.indptr_M1, self.target_E, self.num_targets, rule=RULE_OF_SOURCES)


_HANDLES = itertools.count(1)
_GRAPHS: weakref.WeakValueDictionary[int, EdgeGraph] = weakref.WeakValueDictionary()


def graph_of_handle(handle: int) -> EdgeGraph:
    """Return the graph that a handle stands for.

    Raises:
        RuntimeError: if the graph is gone.
    """
    graph = _GRAPHS.get(handle)
    if graph is None:
        raise RuntimeError("the EdgeGraph of an attention is gone: keep it until its backward pass has run")
    return graph
