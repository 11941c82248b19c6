"""Dropout of attention: which weights it drops, and what it leaves. Its gradients: `test_attention.py`."""

import random

import pytest
import torch
from torch import Tensor

from executor.attention.edges import edge_attention
from executor.keyed import edge_head_bits, threshold
from tests.executor.attention_reference import KEY, Case, case_of


def dropping_case(**options: object) -> Case:
    edges = [(s, t) for s in range(60) for t in range(50)]
    return case_of(edges, 50, 60, num_heads=8, num_kv_heads=8, **options)


def kept_of(case: Case) -> Tensor:
    """Return which weights are kept, [E, H]: values that single out a source show its weight."""
    graph = case.graph()
    q = torch.zeros(case.num_targets, 8, 16)
    kept = torch.zeros(case.source_E.numel(), 8, dtype=torch.bool)
    for first in range(0, case.num_sources, 16):
        v = torch.zeros(case.num_sources, 8, 16)
        columns = torch.arange(min(16, case.num_sources - first))
        v[first + columns, :, columns] = 1.0
        out = edge_attention(q, torch.zeros_like(v), v, graph, dropout=case.dropout, dropout_key=torch.tensor(KEY))
        chosen_E = ((case.source_E >= first) & (case.source_E < first + 16)).nonzero().squeeze(1)
        kept[chosen_E] = out[case.target_E[chosen_E], :, case.source_E[chosen_E] - first] > 0
    return kept


@pytest.mark.parametrize("ratio", [0.1, 0.5, 0.9])
def test_dropout_drops_by_the_keyed_bits_and_the_share_asked_for(ratio):
    case = dropping_case(dropout=ratio)
    wanted = edge_head_bits(torch.arange(3000), torch.tensor(KEY), 8) >= threshold(ratio)
    kept = kept_of(case)
    assert torch.equal(kept, wanted)
    # 24,000 draws: three standard deviations are below 0.01.
    assert kept.float().mean().item() == pytest.approx(1 - ratio, abs=0.01)


def test_what_dropout_drops_follows_the_edges_ids_whatever_their_order_and_part():
    whole = dropping_case(dropout=0.4)
    chosen_E = torch.tensor(random.Random(0).sample(range(3000), 1200))
    chosen_E = chosen_E[torch.sort(whole.target_E[chosen_E], stable=True).indices]
    part = Case(
        source_E=whole.source_E[chosen_E],
        target_E=whole.target_E[chosen_E],
        num_targets=50,
        num_sources=60,
        num_heads=8,
        num_kv_heads=8,
        dropout=0.4,
        edge_ids=chosen_E,
    )
    assert torch.equal(kept_of(part), kept_of(whole)[chosen_E])


def test_dropout_leaves_the_expectation():
    case = dropping_case(dropout=0.5)
    inputs = case.inputs()
    whole = edge_attention(inputs["q"], inputs["k"], inputs["v"], case.graph())
    outs = [
        edge_attention(
            inputs["q"], inputs["k"], inputs["v"], case.graph(), dropout=0.5, dropout_key=torch.tensor([1, step])
        )
        for step in range(400)
    ]
    spread = torch.stack(outs).std(0) / 400**0.5
    assert ((torch.stack(outs).mean(0) - whole).abs() < 5.5 * spread).all()
