"""PyG graphs become stores that read back as the same graph."""

import pytest
import torch
from torch_geometric.data import Data

from executor.compat import making_sparse_csr
from executor.pyg import write_pyg_graph
from simulator.errors import SpecError
from simulator.readers.graphs import read_graph
from simulator.specs.graph import GraphFile

EDGES = torch.tensor([[0, 1, 1, 2, 3], [1, 0, 2, 1, 3]])
X = torch.tensor([[0.0, 1.5], [0.0, 0.0], [2.0, 0.0], [0.0, 3.0]])
Y = torch.tensor([0, 1, 2, 1])


def read(folder, **fields):
    return read_graph(GraphFile(path=str(folder), add_self_loops=False, **fields), base=folder)


def test_a_graph_with_everything(tmp_path):
    masks = [torch.tensor(mask) for mask in ([1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 1])]
    named = dict(zip(("train_mask", "val_mask", "test_mask"), (mask.bool() for mask in masks), strict=True))
    write_pyg_graph(Data(edge_index=EDGES, x=X, y=Y, **named), tmp_path / "store")
    spec, graph = read(tmp_path / "store")
    assert (spec.num_nodes, spec.num_edges, spec.num_features, spec.num_classes) == (4, 5, 2, 3)
    assert (spec.num_train_nodes, spec.num_val_nodes, spec.num_test_nodes) == (1, 1, 2)
    assert sorted(zip(graph.source_E.tolist(), graph.target_E.tolist(), strict=True)) == sorted(
        map(tuple, EDGES.T.tolist())
    )
    assert graph.features.tolist() == X.tolist()
    assert graph.labels_N.tolist() == Y.tolist()


def test_splits_as_columns(tmp_path):
    # Node n is trained on in split n % 2.
    train = torch.tensor([[1, 0], [0, 1], [1, 0], [0, 1]]).bool()
    write_pyg_graph(Data(edge_index=EDGES, x=X, y=Y, train_mask=train), tmp_path / "store")
    for split in (0, 1):
        _, graph = read(tmp_path / "store", split=split)
        assert graph.train_mask_N.tolist() == train[:, split].tolist()


def test_sparse_features(tmp_path):
    with making_sparse_csr():
        write_pyg_graph(Data(edge_index=EDGES, x=X.to_sparse_csr(), y=Y), tmp_path / "store")
    spec, graph = read(tmp_path / "store")
    assert spec.num_feature_entries == 3
    assert graph.features.toarray().tolist() == X.tolist()


def test_a_graph_without_edges_needs_them_named(tmp_path):
    with pytest.raises(SpecError, match="has no edge_index"):
        write_pyg_graph(Data(x=X), tmp_path / "store")
