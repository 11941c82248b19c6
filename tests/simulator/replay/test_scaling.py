"""Kernels in other shapes and formats: by hand, and laws that hold for any."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.replay.scaling import Setting, scaled_seconds
from simulator.specs.cluster import BUILT_IN_CLUSTERS
from simulator.specs.recording import DeviceOperation, KernelKind, Operator
from simulator.specs.units import Dtype

US = 1e-6
H200 = BUILT_IN_CLUSTERS["h200x8"].device
OLD = Setting(device=H200)  # 4.8 TB/s, 67 TFLOP/s in fp32
DOUBLE = replace(OLD, sizes=((128, 256),))


def operation(kind: KernelKind, name: str = "kernel") -> DeviceOperation:
    return DeviceOperation(name=name, kind=kind, stream="s", start_seconds=0, duration_seconds=0)


def operator(name: str, *shapes: tuple[int, ...]) -> Operator:
    return Operator(
        name=name, thread="t", start_seconds=0, duration_seconds=0, shapes=shapes, dtypes=("float",) * len(shapes)
    )


def test_rows_of_a_norm_keep_their_time_when_they_get_wider():
    norm = operator("aten::native_layer_norm", (120_000, 128))
    # Read and written: 122.88 MB, 25.6 us of the 200; wider rows move 25.6 us more.
    found = scaled_seconds(operation(KernelKind.NORMALISATION), norm, 200 * US, old=OLD, new=DOUBLE)
    assert found == pytest.approx(225.6 * US)
    # In 16 bits they move half; twice the rows take twice as long.
    in_half = scaled_seconds(
        operation(KernelKind.NORMALISATION), norm, 200 * US, old=OLD, new=replace(OLD, dtype=Dtype.BFLOAT16)
    )
    assert in_half == pytest.approx(187.2 * US)
    more = scaled_seconds(
        operation(KernelKind.NORMALISATION), norm, 200 * US, old=OLD, new=replace(OLD, sizes=((120_000, 240_000),))
    )
    assert more == pytest.approx(400 * US)


def test_what_moves_takes_longer_where_the_device_attains_less():
    norm = operator("aten::native_layer_norm", (120_000, 128))
    attained = replace(OLD, memory_ratio=0.8)  # 32 us of the 200
    found = scaled_seconds(
        operation(KernelKind.NORMALISATION), norm, 200 * US, old=attained, new=replace(attained, sizes=((128, 256),))
    )
    assert found == pytest.approx(232 * US)


def test_a_product_takes_its_products_and_its_bytes():
    product = operator("aten::mm", (120_000, 128), (128, 128))
    # 3.932 GFLOP: 58.69 us. 122.88 MB and a weight of 65.5 kB: 25.61 us. Twice as wide: 234.75 us and 51.25 us.
    found = scaled_seconds(operation(KernelKind.MATRIX_PRODUCT), product, 101.5 * US, old=OLD, new=DOUBLE)
    ratio = (234.75 + 51.25) / (58.69 + 25.61)
    assert found == pytest.approx((1.5 + 100 * ratio) * US, rel=1e-3)


def test_the_sum_of_a_split_product_keeps_its_time():
    product = operator("aten::mm", (128, 120_000), (120_000, 128))
    summing = operation(KernelKind.MATRIX_PRODUCT, "void cublasLt::splitKreduce_kernel<32, 16>")
    assert scaled_seconds(summing, product, 7 * US, old=OLD, new=DOUBLE) == pytest.approx(7 * US)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (KernelKind.REDUCTION, "aten::nll_loss_forward"),
        (KernelKind.SOFTMAX, "aten::_log_softmax"),
        (KernelKind.REDUCTION, "aten::linalg_vector_norm"),
        (KernelKind.OPTIMIZER, "aten::_fused_adamw_"),
    ],
)
def test_losses_norms_of_gradients_and_updates_stay_in_fp32(kind, name):
    shapes = operator(name, (90_000, 128))
    new = replace(OLD, dtype=Dtype.BFLOAT16)
    assert scaled_seconds(operation(kind), shapes, 60 * US, old=OLD, new=new) == pytest.approx(60 * US)


KINDS = st.sampled_from([kind for kind in KernelKind if kind is not KernelKind.COLLECTIVE])
MICROSECONDS = st.floats(1, 1e4)


@given(kind=KINDS, rows=st.integers(1, 10**6), seconds=MICROSECONDS, times=st.integers(1, 8))
def test_wider_tensors_are_never_faster_and_the_same_ones_take_the_same(kind, rows, seconds, times):
    shapes = operator("aten::mm", (rows, 48), (48, 48))
    new = replace(OLD, sizes=((48, 48 * times),))
    found = scaled_seconds(operation(kind), shapes, seconds * US, old=OLD, new=new)
    assert found is not None
    assert found >= seconds * US * (1 - 1e-9)
    same = scaled_seconds(operation(kind), shapes, seconds * US, old=OLD, new=OLD)
    assert same == pytest.approx(seconds * US)


@given(rows=st.integers(1, 10**6), edges=st.integers(1, 10**7), seconds=MICROSECONDS, times=st.integers(1, 8))
def test_more_edges_are_never_faster(rows, edges, seconds, times):
    attention = operator("edge_attention", (rows, 4, 32), (rows, 4, 32))
    old, new = replace(OLD, num_edges=edges), replace(OLD, num_edges=edges * times)
    found = scaled_seconds(operation(KernelKind.ATTENTION), attention, seconds * US, old=old, new=new)
    assert found is not None
    assert found >= seconds * US * (1 - 1e-9)


@given(kind=KINDS, rows=st.integers(1, 10**6), seconds=MICROSECONDS)
def test_fewer_bits_are_never_slower(kind, rows, seconds):
    shapes = operator("aten::mm", (rows, 48), (48, 48))
    new = replace(OLD, dtype=Dtype.BFLOAT16)
    found = scaled_seconds(operation(kind), shapes, seconds * US, old=OLD, new=new)
    assert found is not None
    assert found <= seconds * US * (1 + 1e-9)
