"""Adapter of `edge_attention` for the attention benchmark: `--impl tests/bench/attention_impl.py:graphpilot`."""

from typing import Any

import torch
from torch import Tensor

from executor.attention.edges import edge_attention
from executor.attention.graph import EdgeGraph

# As the trainer does: the backward pass runs in the thread that asks for it. On a virtual machine with one GPU the
# hand-over to a thread of autograd's own took 200 to 300 us. It holds for all that the benchmark runs.
torch.autograd.set_multithreading_enabled(False)


def graphpilot(q_NHK: Tensor, k_NHK: Tensor, v_NHK: Tensor, benchmark_graph: Any) -> Tensor:
    """Return the attention over a graph of the benchmark; the prepared graph is kept in the benchmark's cache."""

    def prepare() -> EdgeGraph:
        n = benchmark_graph.n
        return EdgeGraph(indptr_N1=benchmark_graph.rowptr, source_E=benchmark_graph.col32, num_sources=n)

    out_NHK: Tensor = edge_attention(q_NHK, k_NHK, v_NHK, benchmark_graph.cached("graphpilot", prepare))
    return out_NHK
