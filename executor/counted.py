"""What a rank trains on, made from counts alone: tensors of the right shapes without their numbers.

Where a plan is for a graph that is not here, its counts of rows and edges are all that a rank can be given. Under
torch's `FakeTensorMode`, inside which `counted_data` is to be called, its tensors take no memory.
"""

import torch
from torch import Tensor

from executor.attention.graph import EdgeGraph
from executor.compat import making_sparse_csr
from executor.data import LayerData, RankData
from executor.exchange import ExchangeLayout
from executor.hosts import HostLayouts
from executor.mesh import Place
from executor.operations import SparseFeatures
from executor.served import PartLayout
from executor.topology import EdgeHalves
from simulator.exchange_tasks import EdgeCounts, GroupWork
from simulator.exchanges import rows_per_message
from simulator.specs.graph import GraphSpec
from simulator.specs.model import EdgeBias, ModelSpec
from simulator.specs.plan import ROW_EXCHANGES, Exchange, Plan, SampledLayer
from simulator.workload import RankWork, num_input_columns


def counted_data(
    plan: Plan,
    graph: GraphSpec,
    model: ModelSpec,
    work: RankWork,
    place: Place,
    *,
    dtype: torch.dtype,
    sparse: SparseFeatures | None,
) -> RankData:
    """Return a batch of a rank with as many rows, edges and messages as counted.

    Args:
        work: what the rank holds.
        dtype: of activations.
        sparse: of `counted_features`.
    """
    columns, group = num_input_columns(graph, model), work.group
    has_buckets = model.edge_bias is EdgeBias.DEGREE
    is_sampled, has_features = bool(work.sampled), place.pipeline_rank == 0
    exchanges = set() if is_sampled else set(plan.exchange)
    halved = exchanges & ROW_EXCHANGES if plan.overlap_exchange else set()
    return RankData(
        dtype=dtype,
        node_N=_ids(work.num_rows),
        dense_NF=torch.empty(work.num_rows, columns, dtype=dtype) if columns and has_features else None,
        sparse=sparse if has_features else None,
        edges={exchange: _edges_of(exchange, group) for exchange in exchanges},
        degree_bucket_E=_ids(group.edges.num_edges) if has_buckets and not is_sampled else None,
        halves={exchange: _halves(exchange, group, has_buckets=has_buckets) for exchange in halved},
        group_degree_bucket_E=_ids(group.group_edges.num_edges)
        if has_buckets and Exchange.HEAD_ALL_TO_ALL in exchanges
        else None,
        graph_rank=place.graph_rank,
        layout=_layout(plan, model, work, place),
        label_N=_ids(work.num_output_rows),
        train_row_T=_ids(work.num_train_rows),
        train_label_T=_ids(work.num_train_rows),
        num_train_rows_of_step=max(plan.num_train_nodes, 1),  # a factor of the loss, which has no value here
        mask_rows={},
        layers=tuple(_layer(counts, has_buckets=has_buckets) for counts in work.sampled),
        hosts=_hosts(work, place),
        part=_part(group, place),
    )


def counted_features(graph: GraphSpec, work: RankWork) -> SparseFeatures | None:
    """Return sparse features with as many rows and entries as counted; to be called outside of `FakeTensorMode`.

    None where features are dense. The matrices are real ones without entries, since none can be made of fake tensors.
    """
    if not graph.has_sparse_features:
        return None
    shape = (work.num_rows, graph.num_features)
    found = SparseFeatures(rows=_empty_csr(*shape), columns=_empty_csr(*reversed(shape)))
    found.__dict__["num_entries"] = work.num_feature_entries
    return found


def _empty_csr(num_rows: int, num_columns: int) -> Tensor:
    with making_sparse_csr():
        return torch.sparse_csr_tensor(
            torch.zeros(num_rows + 1, dtype=torch.int64),
            torch.zeros(0, dtype=torch.int64),
            torch.zeros(0),
            size=(num_rows, num_columns),
        )


def _ids(count: int) -> Tensor:
    return torch.empty(count, dtype=torch.int64)


def _layout(plan: Plan, model: ModelSpec, work: RankWork, place: Place) -> ExchangeLayout:
    return ExchangeLayout(
        send_row_S=_ids(sum(work.rows_to)),
        rows_to=work.rows_to,
        rows_from=work.rows_from,
        max_rows=work.max_rows,
        group=place.graph_group,
        max_pair_rows=work.group.max_pair_rows,
        rows_per_message=rows_per_message(plan, model, Exchange.HALO),
        rows_by_rank=work.group.rows_by_rank,
        head_rows_per_message=rows_per_message(plan, model, Exchange.HEAD_ALL_TO_ALL),
    )


def _layer(counts: SampledLayer, *, has_buckets: bool) -> LayerData:
    """Return what one layer of a sampled batch attends to."""
    edges = EdgeCounts(
        num_edges=counts.num_edges,
        num_of_long_targets=counts.num_edges_of_long_targets,
        num_of_long_sources=counts.num_edges_of_long_sources,
    )
    return LayerData(
        edges=_edge_graph(counts.num_targets, counts.num_sources, edges),
        degree_bucket_E=_ids(counts.num_edges) if has_buckets else None,
    )


def _edges_of(exchange: Exchange, group: GroupWork) -> EdgeGraph:
    """Return the edges that attention looks at under an exchange."""
    match exchange:
        case Exchange.NONE:
            return _edge_graph(group.num_rows, group.num_rows, group.edges)
        case Exchange.HALO | Exchange.HIERARCHICAL_HALO:
            targets = group.num_rows if group.served is None else group.served.num_rows
            return _edge_graph(targets, group.num_rows + group.num_remote_rows(exchange), group.edges)
        case Exchange.ALL_GATHER:
            return _edge_graph(group.num_rows, group.num_remote_rows(exchange), group.edges)
        case Exchange.HEAD_ALL_TO_ALL:
            return _edge_graph(group.num_group_rows, group.num_group_rows, group.group_edges)


def _halves(exchange: Exchange, group: GroupWork, *, has_buckets: bool) -> EdgeHalves:
    return EdgeHalves(
        inner=_edge_graph(group.num_rows, group.num_rows, group.inner_edges),
        outer=_edge_graph(group.num_boundary_rows, group.num_remote_rows(exchange), group.outer_edges),
        inner_bucket_E=_ids(group.inner_edges.num_edges) if has_buckets else None,
        outer_bucket_E=_ids(group.outer_edges.num_edges) if has_buckets else None,
    )


def _edge_graph(num_targets: int, num_sources: int, edges: EdgeCounts) -> EdgeGraph:
    found = EdgeGraph(
        indptr_N1=_ids(num_targets + 1),
        source_E=torch.empty(edges.num_edges, dtype=torch.int32),
        num_sources=num_sources,
    )
    found.__dict__["num_edges_of_long_rows"] = (edges.num_of_long_targets, edges.num_of_long_sources)
    return found


def _part(group: GroupWork, place: Place) -> PartLayout | None:
    """Return the part that a rank serves, where parts may have several."""
    served = group.served
    if served is None:
        return None
    return PartLayout(part_ranks=served.part_ranks, ranks=served.ranks, group=place.part_group)


def _hosts(work: RankWork, place: Place) -> HostLayouts | None:
    """Return the layouts of a hierarchical exchange."""
    host = work.group.host
    if host is None:
        return None
    return HostLayouts(
        between=ExchangeLayout(
            send_row_S=_ids(sum(host.rows_to)),
            rows_to=host.rows_to,
            rows_from=host.rows_from,
            max_rows=work.max_rows,
            group=place.graph_group,
        ),
        inside=ExchangeLayout(
            send_row_S=_ids(sum(host.passed_to)),
            rows_to=host.passed_to,
            rows_from=host.passed_from,
            max_rows=work.max_rows,
            group=place.host_group,
        ),
    )
