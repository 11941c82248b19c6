"""Random graphs made on the device in a second: R-MAT and community graphs, undirected, with self loops, by target.

The same generators as ../shared/bench/sparse_attention.py, which the GPU machine does not have.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK_EDGES = 16_000_000
# Quadrants of R-MAT (Chakrabarti, Zhan, Faloutsos, SDM 2004), and share of a community's edges that stay in it.
A, B, C = 0.57, 0.19, 0.19
INSIDE_RATIO = 0.8


@dataclass(frozen=True, kw_only=True)
class DeviceGraph:
    """A graph whose transpose has the same pattern.

    Attributes:
        indptr_N1: int64 [N + 1].
        source_E: int64 [E], ascending for each target.
    """

    name: str
    indptr_N1: Tensor
    source_E: Tensor

    @property
    def num_nodes(self) -> int:
        """Nodes, N."""
        return self.indptr_N1.numel() - 1

    @property
    def edge_index(self) -> Tensor:
        """Sources and targets, int64 [2, E], as PyG takes them; made anew on each use."""
        nodes_N = torch.arange(self.num_nodes, device=self.source_E.device)
        return torch.stack([self.source_E, nodes_N.repeat_interleave(self.indptr_N1.diff())])


def rmat_graph(name: str, num_nodes: int, num_edges: int, generator: torch.Generator) -> DeviceGraph:
    """Return a power-law graph whose node numbers say nothing; `num_edges` are directed, without self loops."""
    levels = max(1, math.ceil(math.log2(num_nodes)))
    device = generator.device

    def sample(count: int) -> tuple[Tensor, Tensor]:
        source, target = torch.zeros(2, count, dtype=torch.int64, device=device)
        for _ in range(levels):
            draw = torch.rand(count, device=device, generator=generator)
            low = draw >= A + B
            right = ((draw >= A) & ~low) | (draw >= A + B + C)
            source, target = source * 2 + low, target * 2 + right
        fits = (source < num_nodes) & (target < num_nodes)
        return source[fits], target[fits]

    pairs = _distinct_pairs(num_nodes, num_edges // 2, sample, generator)
    names = torch.randperm(num_nodes, device=device, generator=generator)
    return _graph_of(name, num_nodes, names[pairs // num_nodes], names[pairs % num_nodes])


def community_graph(
    name: str, num_nodes: int, num_edges: int, generator: torch.Generator, *, num_communities: int
) -> DeviceGraph:
    """Return a degree-corrected block graph with communities of equal size, each a run of nodes."""
    device = generator.device
    # Expected degrees follow a power law of exponent 3.2, cut at 40 times the least.
    uniform = torch.rand(num_nodes, device=device, generator=generator, dtype=torch.float64)
    weight = uniform.clamp(min=1e-4).pow(-1 / 2.2).clamp(max=40.0)
    total_N1 = torch.zeros(num_nodes + 1, dtype=torch.float64, device=device)
    torch.cumsum(weight, 0, out=total_N1[1:])
    start = torch.arange(num_communities + 1, device=device) * num_nodes // num_communities

    def draw(low: Tensor | float, high: Tensor | float, count: int) -> Tensor:
        share = torch.rand(count, device=device, generator=generator, dtype=torch.float64)
        found = torch.searchsorted(total_N1, low + (high - low) * share, right=True) - 1
        return found.clamp(0, num_nodes - 1)

    def sample(count: int) -> tuple[Tensor, Tensor]:
        everything = float(total_N1[-1])
        source = draw(0.0, everything, count)
        member = torch.searchsorted(start, source, right=True) - 1
        inside = torch.rand(count, device=device, generator=generator) < INSIDE_RATIO
        low = torch.where(inside, total_N1[start[member]], 0.0)
        high = torch.where(inside, total_N1[start[member + 1]], everything)
        return source, draw(low, high, count)

    pairs = _distinct_pairs(num_nodes, num_edges // 2, sample, generator)
    return _graph_of(name, num_nodes, pairs // num_nodes, pairs % num_nodes)


def _distinct_pairs(
    num_nodes: int, wanted: int, sample: Callable[[int], tuple[Tensor, Tensor]], generator: torch.Generator
) -> Tensor:
    """Return undirected pairs as keys, low * N + high; about as many as wanted where the graph has room for them."""
    found = torch.zeros(0, dtype=torch.int64, device=generator.device)
    for _ in range(30):
        missing = wanted - found.numel()
        if missing <= 0:
            break
        first, second = sample(min(CHUNK_EDGES, int(missing * 1.5) + 1024))
        differ = first != second
        low, high = torch.minimum(first, second)[differ], torch.maximum(first, second)[differ]
        found = torch.unique(torch.cat([found, low * num_nodes + high]))
    order = torch.randperm(found.numel(), device=generator.device, generator=generator)
    return found[order[:wanted]]


def _graph_of(name: str, num_nodes: int, first: Tensor, second: Tensor) -> DeviceGraph:
    loops = torch.arange(num_nodes, device=first.device)
    target, source = torch.cat([first, second, loops]), torch.cat([second, first, loops])
    keys = torch.sort(target * num_nodes + source).values
    counts_N = torch.bincount(keys // num_nodes, minlength=num_nodes)
    indptr_N1 = torch.zeros(num_nodes + 1, dtype=torch.int64, device=first.device)
    torch.cumsum(counts_N, 0, out=indptr_N1[1:])
    return DeviceGraph(name=name, indptr_N1=indptr_N1, source_E=keys % num_nodes)
