"""Vectors of Numba against NumPy and torch."""

# mypy: ignore-errors

import numpy as np
import pytest
import torch
from numba import njit

from executor.attention.cpu_arithmetic import exp, larger, store_totals, total, zero_if_infinite
from executor.attention.cpu_vectors import LANES8, LANES16, address, load, splat, store

VIEWS = {torch.float32: torch.float32, torch.bfloat16: torch.uint16, torch.float16: torch.int16}


@njit
def copy(source, target, count):
    store(address(target), 0, load(address(source), 0, count), count)


@njit
def exponentials(source, target):
    for at in range(0, len(source), 16):
        store(address(target), at, exp(load(address(source), at, LANES16)), LANES16)


@njit
def sums(source, target, factor):
    numbers, results = address(source), address(target)
    a, b, c, d = (
        load(numbers, 0, LANES16),
        load(numbers, 16, LANES16),
        load(numbers, 32, LANES16),
        splat(factor, LANES16),
    )
    store_totals(results, 0, factor, a, b, c, d)
    a, b, c, d = (
        load(numbers, 0, LANES8),
        load(numbers, 8, LANES8),
        load(numbers, 16, LANES8),
        load(numbers, 24, LANES8),
    )
    store_totals(results, 4, factor, a, b, c, d)
    results[8] = total(load(numbers, 0, LANES16))
    results[9] = total(load(numbers, 0, 3))


@njit
def picked(a, b, target):
    first, second = load(address(a), 0, LANES8), load(address(b), 0, LANES8)
    store(address(target), 0, larger(first, second), LANES8)
    store(address(target), 8, zero_if_infinite(first), LANES8)


def array(tensor):
    return tensor.view(VIEWS[tensor.dtype]).numpy()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_numbers_widen_exactly_and_narrow_as_torch_rounds(dtype):
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    numbers = every[torch.isfinite(every)]
    numbers = numbers[: len(numbers) // 16 * 16].view(-1, 16)
    generator = torch.Generator().manual_seed(0)
    nearby = numbers[:200].float() * (1 + 0.01 * torch.rand(200, 16, generator=generator))
    # Halfway between two neighbours, where ties go to even numbers.
    between = (numbers[200:400, :-1].float() + numbers[200:400, 1:].float()) / 2
    between = torch.cat([between, between[:, :1]], 1)
    for row in [*numbers[::64]]:
        wide = torch.empty(16)
        copy(array(row), wide.numpy(), LANES16)
        assert torch.equal(wide, row.float())
    for row in [*nearby, *between]:
        narrow = torch.empty(16, dtype=dtype)
        copy(row.numpy(), array(narrow), LANES16)
        assert torch.equal(narrow, row.to(dtype))


@pytest.mark.parametrize("dtype", list(VIEWS))
def test_what_is_neither_finite_nor_a_number_stays_so(dtype):
    special = torch.tensor([np.nan, np.inf, -np.inf, 0.0, -0.0, 3e38, -3e38, 1e-30])
    found = torch.empty(8, dtype=dtype)
    copy(special.numpy(), array(found), LANES8)
    torch.testing.assert_close(found, special.to(dtype), equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", list(VIEWS))
@pytest.mark.parametrize("count", range(9))
def test_lanes_that_are_not_in_use_are_neither_read_nor_written(dtype, count):
    source, target = torch.arange(1.0, 9.0).to(dtype), torch.full((8,), 7.0, dtype=dtype)
    copy(array(source[:count].clone()), array(target), count)
    assert target.tolist() == [*range(1, count + 1), *[7] * (8 - count)]


def test_exponentials_are_right_to_a_millionth_and_underflow_to_zero():
    x = np.concatenate([np.linspace(-87.3, 88, 16 * 2000), np.linspace(-1, 1, 16 * 100)]).astype(np.float32)
    found = np.empty_like(x)
    exponentials(x, found)
    assert np.abs(found / np.exp(x.astype(np.float64)) - 1).max() < 2e-7
    x = np.array([-np.inf, -1e30, -100, -87.4, 0, -0.0, np.nan, *[-1] * 9], np.float32)
    exponentials(x, found)
    assert found[:6].tolist() == [0, 0, 0, 0, 1, 1]
    assert np.isnan(found[6])


def test_sums_over_lanes_are_those_of_numpy():
    numbers = np.random.default_rng(0).integers(-50, 50, 48).astype(np.float32)
    found = np.empty(10, np.float32)
    sums(numbers, found, np.float32(2))
    by_16, by_8 = numbers.reshape(3, 16).sum(1), numbers[:32].reshape(4, 8).sum(1)
    assert found.tolist() == [*(2 * by_16), 2 * 16 * 2, *(2 * by_8), by_16[0], numbers[:3].sum()]


def test_the_larger_of_two_and_what_is_minus_infinity():
    a = np.array([1, -np.inf, 3, np.inf, -np.inf, 0, np.nan, 5], np.float32)
    b = np.array([2, -np.inf, 1, 4, 7, 0, 6, 5], np.float32)
    found = np.empty(16, np.float32)
    picked(a, b, found)
    assert found[:8].tolist() == [2, -np.inf, 3, np.inf, 7, 0, 6, 5]
    assert found[8:14].tolist() == [1, 0, 3, np.inf, 0, 0]
    assert np.isnan(found[14])
