"""The operators of attention under torch's own checks, checkpoints and compilers."""

import functools

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from executor.attention.edges import edge_attention
from executor.attention.graph import EdgeGraph
from tests.executor.attention_reference import KEY, case_of


def operator_arguments(*, dropout: float = 0.0) -> tuple[tuple[object, ...], EdgeGraph]:
    case = case_of([(0, 0), (2, 0), (1, 1), (2, 2)], 3, num_heads=3, num_kv_heads=1, head_size=5)
    graph = case.graph()
    generator = torch.Generator().manual_seed(0)
    q, k, v, bias, features = (
        torch.randn(shape, generator=generator).requires_grad_()
        for shape in ((3, 3, 5), (3, 1, 5), (3, 1, 5), (4, 3), (4, 1, 5))
    )
    key = torch.tensor(KEY) if dropout else None
    return (q, k, v, bias, features, key, graph.handle, 0.5, dropout, True), graph


@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_the_operator_keeps_torchs_rules(dropout):
    arguments, graph = operator_arguments(dropout=dropout)
    torch.library.opcheck(torch.ops.graphpilot.edge_attention, arguments)
    assert graph.num_edges == 4  # and is alive until here


@pytest.mark.parametrize("with_lse", [True, False])
def test_the_backward_operator_keeps_torchs_rules(with_lse):
    arguments, graph = operator_arguments()
    q, k, v, bias, features, key, handle, scale, dropout, _ = (
        value.detach() if isinstance(value, Tensor) else value for value in arguments
    )
    out, lse, rest = torch.ops.graphpilot.edge_attention(q, k, v, bias, features, key, handle, scale, dropout, True)
    grad_lse = torch.ones(3, 3) if with_lse else None
    backward = torch.ops.graphpilot.edge_attention_backward
    shared = (q, k, v, bias, features, key, out, lse, rest, graph.handle, scale, dropout, True, with_lse)
    torch.library.opcheck(backward, (torch.ones_like(out), grad_lse, *shared))


def test_a_checkpoint_and_a_compiler_change_nothing():
    case = case_of([(s, t) for s in range(5) for t in range(6) if s != t], 6, 5, num_heads=8, num_kv_heads=8)
    graph = case.graph()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = edge_attention(q, k, v, graph)
        return out * 2

    def gradients_of(function: object) -> list[Tensor]:
        leaves = [value.requires_grad_() for value in case.inputs().values()]
        out = function(*leaves)  # type: ignore[operator]
        return [out, *torch.autograd.grad(out.square().sum(), leaves)]

    wanted = gradients_of(attend)
    for function in (
        functools.partial(checkpoint, attend, use_reentrant=False),
        torch.compile(attend, backend="aot_eager", fullgraph=True),
    ):
        assert all(map(torch.equal, gradients_of(function), wanted))
