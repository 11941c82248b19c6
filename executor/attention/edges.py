"""Attention over the edges of a graph: each node attends to the sources of its incoming edges."""

from torch import Tensor

from executor.attention.chunked import ChunkedAttention
from executor.attention.graph import EdgeGraph
from executor.attention.plain import plain_attention


def edge_attention(
    q_NHK: Tensor,
    k_MHK: Tensor,
    v_MHK: Tensor,
    graph: EdgeGraph,
    *,
    edge_bias_EH: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Return the attention of each target over the sources of its incoming edges, [N, H, K].

    Scores, softmax and sums are fp32 whatever the inputs are. A target without edges gets zeros.

    Args:
        q_NHK: queries of the targets.
        k_MHK: keys of the sources; M may exceed N where a part has a halo.
        v_MHK: values of the sources.
        graph: the edges.
        edge_bias_EH: added to the scores of each edge and head.
        scale: factor of the products of queries and keys; by default 1 / sqrt(K).
    """
    scale = q_NHK.shape[2] ** -0.5 if scale is None else scale
    if q_NHK.device.type == "cpu":
        out_NHK: Tensor = ChunkedAttention.apply(q_NHK, k_MHK, v_MHK, edge_bias_EH, graph, scale)  # type: ignore[no-untyped-call]
        return out_NHK
    return plain_attention(q_NHK, k_MHK, v_MHK, graph, edge_bias_EH, scale)
