import dataclasses
from pathlib import Path

import numpy as np
import pytest

from simulator.errors import SpecError
from simulator.readers.orders import order_sha256, read_order
from simulator.readers.stores import save_npy
from simulator.specs.order import NodeOrder, OrderSpec

ORDER_N = np.array([2, 0, 3, 1], dtype=np.int32)
SPEC = OrderSpec(kind=NodeOrder.DEGREE, path="order.npy", sha256=order_sha256(ORDER_N))


def read(folder: Path, array: np.ndarray, *, spec: OrderSpec = SPEC) -> np.ndarray | None:
    save_npy(array, folder / spec.path)
    return read_order(spec, folder=folder, num_nodes=4)


def test_the_order_of_a_plan_is_read_back(tmp_path):
    found = read(tmp_path, ORDER_N)
    assert found is not None
    assert found.tolist() == [2, 0, 3, 1]
    assert found.dtype == np.int32


def test_the_natural_order_needs_no_file(tmp_path):
    assert read_order(OrderSpec(), folder=tmp_path / "none", num_nodes=4) is None


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (ORDER_N[:3], r"order_N must be int32 of shape \[4\], got int32 of shape \[3\]; plan again for this graph"),
        (ORDER_N.astype(np.int64), r"order_N must be int32 of shape \[4\], got int64 of shape \[4\]"),
        (np.array([2, 0, 3, 3], np.int32), "order_N must hold each node once, got none that is 1; plan again"),
        (np.array([2, 0, 4, 1], np.int32), "order_N must hold each node once, got none that is 3; plan again"),
        (np.array([-1, 0, 3, 2], np.int32), "order_N must hold each node once, got none that is 1; plan again"),
        (ORDER_N[::-1], "sha256 must be [0-9a-f]{64} as in the plan, got [0-9a-f]{64}; plan again"),
    ],
)
def test_another_array_in_place_of_the_plans_is_refused(tmp_path, array, message):
    with pytest.raises(SpecError, match=f"{tmp_path / SPEC.path}: {message}"):
        read(tmp_path, array)


def test_a_missing_order_file_is_named(tmp_path):
    spec = dataclasses.replace(SPEC, path="elsewhere.npy")
    with pytest.raises(SpecError, match=r"elsewhere\.npy must be whole in an \.npy file"):
        read_order(spec, folder=tmp_path, num_nodes=4)
