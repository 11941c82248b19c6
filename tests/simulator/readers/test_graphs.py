import dataclasses
import re
import runpy
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse
from hypothesis import given
from hypothesis import strategies as st

from simulator.errors import SpecError
from simulator.readers import stores
from simulator.readers.graphs import (
    Graph,
    open_graph,
    read_graph,
    rows_by_target,
    simple_adjacency,
    undirected_adjacency,
    write_store,
)
from simulator.specs.graph import FeatureNorm, GraphFile
from tests.small_graphs import edge_index_of, edges_of, graph_of, multigraphs

# Four nodes: 0 -> 1 twice, 2 -> 1, 1 -> 1, 1 -> 0; node 3 is isolated.
EDGES = [(0, 1), (2, 1), (0, 1), (1, 1), (1, 0)]


def arrays(**changes):
    """A store's arrays, changed; None leaves one out."""
    masks = np.array([[True, False, False, False], [False, True, False, False], [False, False, True, False]])
    store = {
        "edge_index": edge_index_of(EDGES),
        "num_nodes": np.array(4),
        "x": np.array([[1, 3], [0, 0], [2, 2], [4, 0]], dtype=np.float32),
        "y": np.array([0, 2, 1, -1]),
        "train_mask": masks[0],
        "val_mask": masks[1],
        "test_mask": masks[2],
    }
    return {name: array for name, array in (store | changes).items() if array is not None}


SPARSE = {
    "x": None,
    "x_indptr": np.array([0, 2, 2, 3, 5], dtype=np.int32),
    "x_indices": np.array([2, 0, 1, 0, 1], dtype=np.uint16),
    "x_data": np.array([1], dtype=np.float16),
    "x_shape": np.array([4, 3], dtype=np.int32),
}


def read(folder, *, preparation=None, **changes):
    np.savez(folder / "g.npz", **arrays(**changes))
    return read_graph(GraphFile(path="g.npz", **(preparation or {"add_self_loops": False})), base=folder)


def test_edges_are_sorted_by_target_then_source_and_repeats_stay(tmp_path):
    spec, graph = read(tmp_path)
    assert graph.indptr_N.tolist() == [0, 1, 5, 5, 5]
    assert graph.source_E.tolist() == [1, 0, 0, 1, 2]
    assert graph.target_E.tolist() == [0, 1, 1, 1, 1]
    assert graph.indptr_N.dtype == np.int64
    assert graph.source_E.dtype == np.int32
    assert (spec.num_nodes, spec.num_edges, spec.num_features, spec.num_classes) == (4, 5, 2, 3)
    assert (spec.num_train_nodes, spec.num_val_nodes, spec.num_test_nodes) == (1, 1, 1)
    # In-degrees 1, 4, 0, 0: sorted 0, 0, 1, 4, interpolated between neighbours.
    assert spec.in_degree_quantiles == pytest.approx((0, 0, 0.5, 1.75, 3.1, 3.91, 4))


def test_self_loops_are_added_once_and_existing_ones_kept_single(tmp_path):
    _, graph = read(tmp_path, preparation={"add_self_loops": True}, edge_index=edge_index_of([*EDGES, (1, 1)]))
    assert edges_of(graph) == [(0, 0), (1, 0), (0, 1), (0, 1), (1, 1), (2, 1), (2, 2), (3, 3)]


def test_symmetrise_adds_reverse_edges_and_removes_repeats(tmp_path):
    _, graph = read(tmp_path, preparation={"add_self_loops": False, "symmetrise": True})
    assert edges_of(graph) == [(1, 0), (0, 1), (1, 1), (2, 1), (1, 2)]


@given(multigraphs(), st.booleans(), st.booleans())
def test_prepared_rows_equal_a_slow_count_of_the_edges(multigraph, symmetrise, add_self_loops):
    edges, num_nodes = multigraph
    expected = Counter(edges)
    if symmetrise:
        expected = Counter(set(edges) | {(target, source) for source, target in edges})
    if add_self_loops:
        expected = Counter({edge: count for edge, count in expected.items() if edge[0] != edge[1]})
        expected.update((node, node) for node in range(num_nodes))
    source_E, target_E = edge_index_of(edges)
    indptr_N, source_E = rows_by_target(
        source_E, target_E, num_nodes=num_nodes, symmetrise=symmetrise, add_self_loops=add_self_loops
    )
    rows = [source_E[indptr_N[node] : indptr_N[node + 1]].tolist() for node in range(num_nodes)]
    assert rows == [sorted(row) for row in rows]
    assert Counter((source, target) for target, row in enumerate(rows) for source in row) == expected


@given(multigraphs())
def test_adjacencies_hold_the_distinct_pairs_of_distinct_nodes(multigraph):
    edges, num_nodes = multigraph
    directed = {(target, source) for source, target in edges if source != target}
    simple, undirected = (function(graph_of(edges, num_nodes)) for function in (simple_adjacency, undirected_adjacency))
    assert set(zip(*(ends.tolist() for ends in simple.nonzero()), strict=True)) == directed
    assert simple.nnz == len(directed)
    both = directed | {(source, target) for target, source in directed}
    assert set(zip(*(ends.tolist() for ends in undirected.nonzero()), strict=True)) == both
    assert undirected.nnz == len(both)


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.uint32, np.int64, np.uint64])
def test_edge_indices_may_have_any_integer_type(tmp_path, dtype):
    _, graph = read(tmp_path, edge_index=edge_index_of(EDGES).astype(dtype))
    assert graph.source_E.tolist() == [1, 0, 0, 1, 2]


@pytest.mark.parametrize("left_out", [["num_nodes"], ["num_nodes", "x"]])
def test_the_number_of_nodes_follows_from_features_or_labels(tmp_path, left_out):
    spec, _ = read(tmp_path, **dict.fromkeys(left_out))
    assert spec.num_nodes == 4


def test_a_graph_without_edges_is_legal(tmp_path):
    spec, graph = read(tmp_path, edge_index=np.zeros((2, 0), dtype=np.int64))
    assert (spec.num_edges, graph.indptr_N.tolist()) == (0, [0, 0, 0, 0, 0])
    assert spec.in_degree_quantiles == (0,) * 7


def test_without_features_the_in_degree_is_the_only_one(tmp_path):
    spec, graph = read(tmp_path, x=None)
    # In-degrees 1, 4, 0, 0; the logarithms of 2, 5, 1 and 1.
    assert graph.features == pytest.approx(np.array([[0.693147], [1.609438], [0], [0]]))
    assert (spec.num_features, spec.num_feature_entries) == (1, 0)


def test_without_labels_and_masks_nothing_is_labelled(tmp_path):
    spec, graph = read(tmp_path, y=None, train_mask=None, val_mask=None, test_mask=None)
    assert graph.labels_N.tolist() == [-1] * 4
    assert (spec.num_train_nodes, spec.num_val_nodes, spec.num_test_nodes, spec.num_classes) == (0, 0, 0, 1)


def test_class_names_count_the_classes(tmp_path):
    assert read(tmp_path, class_names=np.array(["a", "b", "c", "d"]))[0].num_classes == 4


def test_a_split_chooses_a_row_of_each_mask(tmp_path):
    train_mask = np.array([[True, False, False, False], [False, True, False, False]])
    preparation = {"split": 1}
    _, graph = read(tmp_path, preparation=preparation, train_mask=train_mask, val_mask=None, test_mask=train_mask[::-1])
    assert graph.train_mask_N.tolist() == [False, True, False, False]
    assert graph.test_mask_N.tolist() == [True, False, False, False]
    assert not graph.val_mask_N.any()


def test_sparse_features_keep_rows_sorted_and_repeat_a_single_value(tmp_path):
    spec, graph = read(tmp_path, **SPARSE)
    assert isinstance(graph.features, scipy.sparse.csr_array)
    assert graph.features.toarray().tolist() == [[1, 0, 1], [0, 0, 0], [0, 1, 0], [1, 1, 0]]
    assert graph.features.indices.tolist() == [0, 2, 1, 0, 1]
    assert graph.features.dtype == np.float32
    assert graph.features.indices.dtype == np.int32
    assert (spec.num_features, spec.num_feature_entries, spec.has_sparse_features) == (3, 5, True)


def test_rows_are_scaled_to_sum_one_and_rows_of_zeros_stay(tmp_path):
    row = {"normalize_features": FeatureNorm.ROW}
    dense = read(tmp_path, preparation=row)[1].features
    assert dense == pytest.approx(np.array([[0.25, 0.75], [0, 0], [0.5, 0.5], [1, 0]]))
    sparse = read(tmp_path, preparation=row, **SPARSE)[1].features
    assert sparse.toarray() == pytest.approx(np.array([[0.5, 0, 0.5], [0, 0, 0], [0, 1, 0], [0.5, 0.5, 0]]))
    assert dense.dtype == sparse.dtype == np.float32


def test_columns_are_standardised_and_constant_ones_only_centred(tmp_path):
    x = np.array([[1, 0.1], [3, 0.1], [1, 0.1], [3, 0.1]])
    features = read(tmp_path, preparation={"normalize_features": FeatureNorm.STANDARD}, x=x)[1].features
    assert features.tolist() == [[-1, 0], [1, 0], [-1, 0], [1, 0]]
    assert features.dtype == np.float32


BAD_ARRAYS = [
    ({"edge_index": edge_index_of([(0, 1), (4, 1)])}, r"edge_index\[0, 1\] must be within 0 and 3, got 4"),
    ({"edge_index": edge_index_of([(0, -1)])}, r"edge_index\[1, 0\] must be within 0 and 3, got -1"),
    ({"edge_index": edge_index_of(EDGES).astype(float)}, "edge_index must hold integers, got float64"),
    ({"edge_index": edge_index_of(EDGES).T}, r"edge_index must have shape \[2, E\], got \[5, 2\]"),
    ({"edge_index": None}, "edge_index must be in the store, got only num_nodes, x, y"),
    ({"num_nodes": np.array(0)}, "num_nodes must be within 1 and 2147483647, got 0"),
    ({"num_nodes": None, "x": None, "y": None}, "num_nodes must be in a store without x and y"),
    ({"x": np.zeros((3, 2))}, r"x must have shape \[4, F\], got \[3, 2\]"),
    ({"x": np.zeros(4)}, r"x must have shape \[4, F\], got \[4\]"),
    ({"x": np.zeros((4, 0))}, "x must have a column"),
    ({"x": np.full((4, 1), "a")}, "x must hold real numbers, got <U1"),
    ({"x": np.array([[0], [0], [np.nan], [0]])}, r"x\[2, 0\] must be finite in float32, got nan"),
    ({"x": np.array([[0, -np.inf]] * 4)}, r"x\[0, 1\] must be finite in float32, got -inf"),
    ({"x": np.array([[0.0], [1e300], [0], [0]])}, r"x\[1, 0\] must be finite in float32, got 1e\+300"),
    ({"y": np.array([0, 1, 2])}, r"y must have shape \[4\], got \[3\]"),
    ({"y": np.array([0.0, 1, 2, 3])}, "y must hold integers, got float64"),
    ({"y": np.array([0, 1, 2, -2])}, r"y\[3\] must be within -1 and 2147483646, got -2"),
    ({"class_names": np.array(["a", "b"])}, r"y\[1\] must be within -1 and 1, got 2"),
    ({"train_mask": np.zeros(3, bool)}, r"train_mask must have shape \[4\], got \[3\]"),
    ({"val_mask": np.zeros((4, 2), bool)}, r"val_mask must have shape \[splits, 4\], got \[4, 2\]"),
    ({"test_mask": np.array([0, 1, 0, 0])}, "test_mask must hold booleans, got int64"),
    ({"train_mask": np.array([0, 0, 0, 1], bool)}, "train_mask must hold labelled nodes only, got node 3"),
    ({"val_mask": np.array([1, 0, 0, 0], bool)}, "train_mask must not overlap val_mask, got node 0 in both"),
    ({**SPARSE, "x": np.zeros((4, 1))}, "x must not stand beside sparse features, got x_indptr"),
    ({**SPARSE, "x_data": None}, "x_data must be in the store"),
    ({**SPARSE, "x_shape": np.array([5, 3])}, r"x_shape must be \[4, F\] with F >= 1, got \[5, 3\]"),
    ({**SPARSE, "x_shape": np.array([4, 2])}, r"x_indices\[0\] must be within 0 and 1, got 2"),
    ({**SPARSE, "x_indptr": np.array([0, 2, 1, 3, 5])}, "x_indptr must not fall, got 2 then 1 at 1"),
    ({**SPARSE, "x_indptr": np.array([0, 2, 2, 3, 4])}, "x_indptr must start at 0 and end at .* 5, got 0 and 4"),
    ({**SPARSE, "x_data": np.ones(3)}, "x_data must have 1 or 5 entries, got 3"),
    ({**SPARSE, "x_data": np.array([np.nan])}, r"x_data\[0\] must be finite in float32, got nan"),
    (
        {**SPARSE, "x_indptr": np.zeros(5, int), "x_indices": np.zeros(0, int), "x_data": np.zeros(0)},
        "x_indices must have an entry, got none",
    ),
]


@pytest.mark.parametrize(("changes", "message"), BAD_ARRAYS, ids=[message for _, message in BAD_ARRAYS])
def test_a_bad_array_is_named_with_its_rule_and_value(tmp_path, changes, message):
    with pytest.raises(SpecError, match=f"^{re.escape(str(tmp_path))}/g.npz: {message}"):
        read(tmp_path, **changes)


BAD_SETTINGS = [
    ({"split": 1}, {}, "split must be below the 1 splits of train_mask, got 1"),
    ({"split": 2}, {"y": None, "train_mask": None, "val_mask": None, "test_mask": None}, "split must be 0 for a store"),
    ({"normalize_features": FeatureNorm.STANDARD}, SPARSE, "normalize_features must not be standard for sparse"),
    ({"normalize_features": FeatureNorm.ROW}, {"x": None}, "normalize_features must not be row for a store without"),
    (
        {"normalize_features": FeatureNorm.ROW},
        {"x": np.array([[1e38, -1e38, 1e-3]] * 4)},
        r"x scaled by row\[0, 0\] must be finite",
    ),
]


@pytest.mark.parametrize(("preparation", "changes", "message"), BAD_SETTINGS)
def test_a_setting_that_does_not_fit_the_store_is_refused(tmp_path, preparation, changes, message):
    with pytest.raises(SpecError, match=message):
        read(tmp_path, preparation=preparation, **changes)


def test_a_missing_store_is_named(tmp_path):
    with pytest.raises(SpecError, match=re.escape(f"{tmp_path}/none.npz: path must be an .npz file or a folder")):
        read_graph(GraphFile(path="none.npz"), base=tmp_path)


@pytest.mark.parametrize("kept_ratio", [0.0, 0.3, 0.7, 0.99])
def test_a_file_that_is_cut_off_is_refused(tmp_path, kept_ratio):
    np.savez_compressed(tmp_path / "g.npz", **arrays())
    content = (tmp_path / "g.npz").read_bytes()
    (tmp_path / "g.npz").write_bytes(content[: int(kept_ratio * len(content))])
    with pytest.raises(SpecError, match=r"g.npz.* must be whole in an .npz file"):
        read_graph(GraphFile(path="g.npz"), base=tmp_path)


def test_a_damaged_array_is_named(tmp_path):
    np.savez(tmp_path / "g.npz", **arrays())
    content = bytearray((tmp_path / "g.npz").read_bytes())
    place = content.index(arrays()["x"].tobytes())
    content[place] ^= 1
    (tmp_path / "g.npz").write_bytes(content)
    with pytest.raises(SpecError, match=r"g.npz: x must be whole .* Bad CRC-32"):
        read_graph(GraphFile(path="g.npz"), base=tmp_path)


def test_pickled_objects_are_refused_without_being_loaded(tmp_path):
    with pytest.raises(SpecError, match=r"g.npz: y must be whole .* without objects"):
        read(tmp_path, y=np.array([{}, 1, 2, 3], dtype=object))


def test_a_single_array_in_place_of_a_store_is_refused(tmp_path):
    np.save(tmp_path / "g.npy", np.zeros(3))
    with pytest.raises(SpecError, match=r"g.npy must be whole in an .npz file .* got a single array"):
        read_graph(GraphFile(path="g.npy"), base=tmp_path)


def test_an_empty_array_file_in_a_folder_is_refused(tmp_path):
    write_folder(tmp_path / "g", arrays())
    (tmp_path / "g" / "y.npy").write_bytes(b"")
    with pytest.raises(SpecError, match=r"g/y.npy must be whole in an .npy file"):
        read_graph(GraphFile(path="g"), base=tmp_path)


def write_folder(folder, store):
    folder.mkdir()
    for name, array in store.items():
        np.save(folder / f"{name}.npy", array)


def assert_equal(one: Graph, other: Graph) -> None:
    for field in dataclasses.fields(Graph):
        left, right = getattr(one, field.name), getattr(other, field.name)
        if isinstance(left, scipy.sparse.csr_array):
            left, right = left.toarray(), right.toarray()
        assert left.dtype == right.dtype, field.name
        np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize("features", [{}, SPARSE], ids=["dense", "sparse"])
def test_what_was_written_is_read_as_equal_arrays(tmp_path, features):
    _, graph = read(tmp_path, preparation={"add_self_loops": True}, **features)
    write_store(graph, tmp_path / "deep" / "store")
    _, again = read_graph(GraphFile(path="deep/store", add_self_loops=False), base=tmp_path)
    assert_equal(graph, again)


def test_dense_features_of_a_folder_stay_on_disk(tmp_path):
    write_folder(tmp_path / "g", arrays())
    features = read_graph(GraphFile(path="g"), base=tmp_path)[1].features
    assert isinstance(features, np.ndarray)
    assert isinstance(features.base, np.memmap)
    assert not features.flags.writeable


def test_the_hash_is_that_of_the_arrays_in_a_folder_or_a_file(tmp_path):
    spec, graph = read(tmp_path)
    write_folder(tmp_path / "g", arrays())
    folder_spec, folder_graph = read_graph(GraphFile(path="g", add_self_loops=False), base=tmp_path)
    assert folder_spec.sha256 == spec.sha256
    assert_equal(graph, folder_graph)


def test_the_hash_of_arrays_in_memory_order_is_by_rows():
    x = np.arange(6, dtype=np.int32).reshape(2, 3)
    assert stores.arrays_sha256({"x": x}) == stores.arrays_sha256({"x": np.asfortranarray(x)})


def test_the_hash_changes_with_any_byte_type_shape_or_name(tmp_path):
    x = arrays()["x"]
    other = x.copy()
    other[3, 1] = 1e-30
    stored = [{"x": x}, {"x": other}, {"x": x.astype(np.float64)}, {"x": x.reshape(2, 4)}, {"z": x}, {}]
    assert len({stores.arrays_sha256(one) for one in stored}) == len(stored)


def test_large_arrays_are_hashed_piece_by_piece(monkeypatch):
    x = np.arange(1000)
    whole = stores.arrays_sha256({"x": x})
    monkeypatch.setattr(stores, "_HASHED_BYTES", 333)
    assert stores.arrays_sha256({"x": x}) == whole


def test_a_spec_opens_the_same_arrays_from_any_folder(tmp_path):
    spec, graph = read(tmp_path, preparation={"add_self_loops": True, "symmetrise": True})
    assert spec.source.path == str(tmp_path / "g.npz")
    assert_equal(open_graph(spec, base=tmp_path / "elsewhere"), graph)


def test_a_store_of_other_arrays_is_refused_with_both_hashes(tmp_path):
    spec, _ = read(tmp_path)
    other, _ = read(tmp_path, y=np.array([0, 2, 2, -1]))
    assert other.sha256 != spec.sha256
    with pytest.raises(SpecError, match=f"g.npz: sha256 must be {spec.sha256} .* got {other.sha256}; .*plan again"):
        open_graph(spec, base=tmp_path)


def test_a_write_that_fails_leaves_nothing(tmp_path, monkeypatch):
    def fail(path, *args, **kwargs):
        Path(path).write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(np, "save", fail)
    with pytest.raises(OSError, match="disk full"):
        write_store(graph_of(EDGES, 4), tmp_path / "store")
    assert list(tmp_path.iterdir()) == []


def test_a_store_is_not_written_over_another(tmp_path):
    write_store(graph_of(EDGES, 4), tmp_path / "store")
    with pytest.raises(SpecError, match="store: folder must be new"):
        write_store(graph_of([], 4), tmp_path / "store")
    assert [path.name for path in tmp_path.iterdir()] == ["store"]
    # The first one's: four edges between nodes and a self loop each.
    assert read_graph(GraphFile(path="store"), base=tmp_path)[0].num_edges == 4 + 4


# Nodes, edges, features and classes: ../shared/data/README.md.
REAL_GRAPHS = [
    ("chameleon-filtered", 890, 17_708, 2325, 5, (409, 287, 194)),
    ("cora", 2708, 10_556, 1433, 7, (140, 500, 1000)),
    ("tolokers", 11_758, 1_038_000, 10, 2, (5879, 2939, 2940)),
    ("debian-depends", 63_681, 277_220, 2000, 51, (38_051, 12_682, 12_687)),
    ("cnr-2000", 325_557, 3_216_152, 1, 1, (0, 0, 0)),
]


@pytest.mark.parametrize(("name", "num_nodes", "num_edges", "num_features", "num_classes", "nodes"), REAL_GRAPHS)
def test_real_graphs_read_as_their_own_loader_does(
    shared_data, name, num_nodes, num_edges, num_features, num_classes, nodes
):
    spec, graph = read_graph(GraphFile(path=f"{name}.npz", add_self_loops=False), base=shared_data)
    assert (spec.num_nodes, spec.num_edges) == (num_nodes, num_edges)
    assert (spec.num_features, spec.num_classes) == (num_features, num_classes)
    assert (spec.num_train_nodes, spec.num_val_nodes, spec.num_test_nodes) == nodes
    expected = runpy.run_path(str(shared_data / "load_graph.py"))["load_graph"](shared_data / f"{name}.npz")
    source_E, target_E = expected["edge_index"]
    order = np.lexsort((source_E, target_E))
    np.testing.assert_array_equal(graph.source_E, source_E[order])
    np.testing.assert_array_equal(graph.target_E, target_E[order])
    if "y" in expected:
        np.testing.assert_array_equal(graph.labels_N, expected["y"])
        np.testing.assert_array_equal(graph.train_mask_N, expected["train_mask"][0])
    if scipy.sparse.issparse(expected.get("x")):
        assert abs(graph.features - expected["x"]).max() == 0
    elif "x" in expected:
        np.testing.assert_array_equal(graph.features, expected["x"])


def test_a_data_set_of_many_graphs_is_refused(shared_data):
    with pytest.raises(SpecError, match=r"proteins-graphs.npz: y must have shape \[43471\], got \[1113\]"):
        read_graph(GraphFile(path="proteins-graphs.npz"), base=shared_data)
