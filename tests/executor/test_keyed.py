"""Random bits by keys, against the definitions of the hash in Python's own integers, and their spread."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from executor.keyed import GOLDEN, edge_bits, edge_head_bits, key_number, key_word, low_word, mix, signed, threshold

WORD = 2**32
words = st.integers(0, WORD - 1)
int64s = st.integers(-(2**63), 2**63 - 1)


def mixed(bits: int) -> int:
    """MurmurHash3's finaliser without its first shift (Appleby 2008)."""
    bits = bits * 0x85EBCA6B % WORD
    bits ^= bits >> 13
    bits = bits * 0xC2B2AE35 % WORD
    return bits ^ bits >> 16


def key_of(seed: int, step: int) -> int:
    return mixed(mixed(seed % WORD ^ GOLDEN) ^ step % WORD)


def edge_bits_of(edge: int, seed: int, step: int) -> int:
    return mixed(mixed(edge % WORD ^ key_of(seed, step)) ^ (edge >> 32) % WORD)


def word_of(tensor: torch.Tensor) -> int:
    return int(tensor) % WORD


@given(words)
def test_a_word_is_mixed_as_the_hash_says(bits):
    assert word_of(mix(torch.tensor(signed(bits), dtype=torch.int32))) == mixed(bits)


@given(st.integers(-(2**40), 2**40))
def test_signed_numbers_have_the_low_word(value):
    assert -(2**31) <= signed(value) < 2**31
    assert (signed(value) - value) % WORD == 0


@given(int64s)
def test_the_low_word_of_any_number(number):
    word = low_word(torch.tensor([number], dtype=torch.int64))
    assert word.dtype == torch.int32
    assert int(word) == signed(number)


@given(seed=int64s, step=st.integers(0, 2**40), edges=st.lists(st.integers(0, 2**62 - 1), min_size=1, max_size=5))
def test_the_bits_of_edges_and_heads_follow_from_seed_step_and_id(seed, step, edges):
    key = torch.tensor([seed, step], dtype=torch.int64)
    assert word_of(key_word(key)) == key_of(seed, step)
    wanted = [edge_bits_of(edge, seed, step) for edge in edges]
    edge_E = torch.tensor(edges, dtype=torch.int64)
    assert [word_of(bits) for bits in edge_bits(edge_E, key)] == wanted
    heads = edge_head_bits(edge_E, key, 3)
    for row, bits in zip(heads, wanted, strict=True):
        assert [word_of(found) for found in row] == [mixed(bits ^ (head + 1) * GOLDEN % WORD) for head in range(3)]


@pytest.mark.parametrize("ratio", [0.0, 0.01, 0.5, 0.99])
def test_the_share_asked_for_lies_below_the_threshold(ratio):
    bits = edge_head_bits(torch.arange(50_000), torch.tensor([1, 2]), 8)
    # 400,000 draws: four standard deviations are below 0.0032.
    assert (bits < threshold(ratio)).float().mean().item() == pytest.approx(ratio, abs=0.0032)


def test_no_word_lies_below_the_threshold_of_nothing_and_one_above_that_of_all():
    assert threshold(0.0) == -(2**31)
    assert threshold(1.0) == 2**31 - 1


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("edges", edge_bits(torch.arange(2**16), torch.tensor([5, 0]))),
        ("edges of a large graph", edge_bits(2**61 + torch.arange(2**16), torch.tensor([5, 0]))),
        ("heads", edge_head_bits(torch.arange(2**10), torch.tensor([5, 0]), 64).flatten()),
        (
            "steps",
            torch.stack([edge_bits(torch.arange(2), torch.tensor([5, step])) for step in range(2**12)]).flatten(),
        ),
    ],
)
def test_bits_of_neighbouring_keys_look_drawn(name, words):
    bits = (words.numpy().view(np.uint32)[:, None] >> np.arange(32, dtype=np.uint32)) & 1
    tolerance = 5 / len(words) ** 0.5  # standard deviations of a share near a half, of a correlation near zero
    assert np.abs(bits.mean(0) - 0.5).max() < tolerance / 2, name
    following = (bits[1:] == bits[:-1]).mean(0)
    assert np.abs(following - 0.5).max() < tolerance / 2, name
    assert np.abs(np.corrcoef(bits.T) - np.eye(32)).max() < tolerance, name
    assert len(np.unique(words)) > 0.99 * len(words), name


@given(int64s, int64s)
def test_the_word_of_a_step_is_one_number_with_and_without_tensors(seed, step):
    assert key_number(seed, step) == int(key_word(torch.tensor([seed, step]))) == signed(key_of(seed, step))
