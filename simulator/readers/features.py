"""Node features of a graph store: checked, in float32, dense or sparse, and scaled."""

from typing import Any, assert_never

import numpy as np
import scipy.sparse
from numpy.typing import DTypeLike, NDArray

from simulator.readers.stores import Numbers, Store
from simulator.specs.graph import FeatureNorm

Features = NDArray[np.float32] | scipy.sparse.csr_array

SPARSE_ARRAYS = ("x_indptr", "x_indices", "x_data", "x_shape")


def read_features(store: Store, *, in_degree_N: NDArray[np.int64], norm: FeatureNorm) -> Features:
    """Return the features of all nodes, scaled; log(1 + in-degree) as the only one where the store has none.

    Dense float32 features of a folder that are not scaled stay on disk, memory-mapped and read-only.

    Raises:
        SpecError: if an array breaks a rule of the layout (`simulator/readers/graphs.py`).
    """
    num_nodes = len(in_degree_N)
    sparse_arrays = [name for name in SPARSE_ARRAYS if name in store.arrays]
    if "x" in store.arrays and sparse_arrays:
        raise store.error("x", "must not stand beside sparse features", sparse_arrays[0], "keep one of them")
    if sparse_arrays:
        return _scaled_sparse(store, _stored_sparse(store, num_nodes), norm)
    if "x" in store.arrays:
        return _scaled_dense(store, _stored_dense(store, num_nodes), norm)
    if norm is FeatureNorm.ROW:
        raise store.error("normalize_features", "must not be row for a store without features", norm, "use none")
    return _scaled_dense(store, np.log1p(in_degree_N, dtype=np.float32)[:, None], norm)


def _stored_dense(store: Store, num_nodes: int) -> NDArray[np.float32]:
    """Return the array x."""
    x = store.array("x", Numbers.REALS, (num_nodes, "F"))
    if x.shape[1] == 0:
        raise store.error("x", "must have a column", list(x.shape), "leave x out for a graph without features")
    return _finite_float32(store, "x", x)


def _stored_sparse(store: Store, num_nodes: int) -> scipy.sparse.csr_array:
    """Return the matrix of the x_ arrays, columns sorted in each row and none repeated."""
    num_rows, num_columns = map(int, store.array("x_shape", Numbers.INTEGERS, (2,)))
    if num_rows != num_nodes or num_columns < 1:
        raise store.error("x_shape", f"must be [{num_nodes}, F] with F >= 1", [num_rows, num_columns], "correct it")
    indices = store.array("x_indices", Numbers.INTEGERS, ("entries",))
    indptr = read_indptr(store, "x_indptr", num_rows=num_nodes, num_entries=len(indices))
    store.require_within("x_indices", indices, 0, num_columns - 1, "correct it or x_shape")
    data = _finite_float32(store, "x_data", store.array("x_data", Numbers.REALS, ("entries",)))
    if len(indices) == 0:
        raise store.error(
            "x_indices", "must have an entry", "none", "leave the x_ arrays out for a graph without features"
        )
    if len(data) not in (1, len(indices)):
        raise store.error("x_data", f"must have 1 or {len(indices)} entries", len(data), "save it again")
    values: NDArray[np.float32] = np.broadcast_to(data, len(indices)).copy()
    index_dtype = csr_index_dtype(max(len(indices), num_columns))
    rows = (values, indices.astype(index_dtype), indptr.astype(index_dtype))
    matrix = scipy.sparse.csr_array(rows, shape=(num_nodes, num_columns))
    matrix.sum_duplicates()
    return matrix


def csr_index_dtype(largest: int) -> DTypeLike:
    """Return the smaller of scipy's two index types that holds a number."""
    return np.int32 if largest <= np.iinfo(np.int32).max else np.int64


def read_indptr(store: Store, name: str, *, num_rows: int, num_entries: int) -> NDArray[np.int64]:
    """Return the checked row pointers [num_rows + 1] of a matrix with `num_entries` entries."""
    indptr = store.array(name, Numbers.INTEGERS, (num_rows + 1,))
    if indptr[0] != 0 or indptr[-1] != num_entries:
        ends = f"{indptr[0]} and {indptr[-1]}"
        raise store.error(
            name, f"must start at 0 and end at the number of entries, {num_entries}", ends, "save it again"
        )
    falls = indptr[1:] < indptr[:-1]
    if falls.any():
        row = int(np.argmax(falls))
        raise store.error(name, "must not fall", f"{indptr[row]} then {indptr[row + 1]} at {row}", "save it again")
    return indptr.astype(np.int64)


def _finite_float32(store: Store, name: str, array: NDArray[Any]) -> NDArray[np.float32]:
    """Return an array in float32, not copied if it is; all entries must be finite there."""
    with np.errstate(over="ignore"):
        converted = array.astype(np.float32, copy=False)
    # NaN and infinity reach the least or the greatest entry, so no array of flags is needed.
    if converted.size and not (np.isfinite(converted.min()) and np.isfinite(converted.max())):
        where = np.unravel_index(np.argmax(~np.isfinite(converted)), converted.shape)
        place = ", ".join(str(int(index)) for index in where)
        raise store.error(
            f"{name}[{place}]", "must be finite in float32", array[where], "fill it or leave the node out"
        )
    return converted


def _scaled_dense(store: Store, x_NF: NDArray[np.float32], norm: FeatureNorm) -> NDArray[np.float32]:
    """Return dense features scaled; rows of sum zero and constant columns are only centred or left."""
    match norm:
        case FeatureNorm.NONE:
            return x_NF
        case FeatureNorm.ROW:
            return _finite_float32(
                store, "x scaled by row", x_NF * _row_scales(x_NF.sum(axis=1, dtype=np.float64))[:, None]
            )
        case FeatureNorm.STANDARD:
            centred_NF = x_NF - x_NF.mean(axis=0, dtype=np.float64).astype(np.float32)
            deviation_F = np.sqrt(np.square(centred_NF, dtype=np.float64).mean(axis=0))
            scale_F = np.where(deviation_F > 0, deviation_F, 1).astype(np.float32)
            scaled_NF: NDArray[np.float32] = centred_NF / scale_F
            return scaled_NF
        case _:
            assert_never(norm)


def _scaled_sparse(store: Store, x_NF: scipy.sparse.csr_array, norm: FeatureNorm) -> scipy.sparse.csr_array:
    """Return sparse features scaled; rows of sum zero stay."""
    match norm:
        case FeatureNorm.NONE:
            return x_NF
        case FeatureNorm.ROW:
            scale_N = _row_scales(x_NF.sum(axis=1, dtype=np.float64))
            scaled = x_NF.data * np.repeat(scale_N, np.diff(x_NF.indptr))
            x_NF.data = _finite_float32(store, "x_data scaled by row", scaled)
            return x_NF
        case FeatureNorm.STANDARD:
            raise store.error("normalize_features", "must not be standard for sparse features", norm, "use row")
        case _:
            assert_never(norm)


def _row_scales(sum_N: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the factor that brings each row's sum to one; one where the sum is zero."""
    return np.divide(1, sum_N, out=np.ones_like(sum_N), where=sum_N != 0)
