"""Random bits that depend on keys (seed, step, global ids) alone, so on no partition, order or device.

`mix` is MurmurHash3's 32-bit finaliser (Appleby 2008) without its first shift; `executor/attention/kernels.py` and
`executor/attention/cpu.py` compute the same bits in Triton and Numba, and tests compare them.
"""

from enum import IntEnum

import torch
from torch import Tensor

GOLDEN = 0x9E3779B1  # 2^32 over the golden ratio, a prime: spreads consecutive numbers over all words (Knuth, TAOCP 3)

_WORD = 2**32 - 1


def signed(value: int) -> int:
    """Return the low 32 bits as a signed number."""
    return (value + 2**31) % 2**32 - 2**31


def mix(bits: Tensor) -> Tensor:
    """Return int32 numbers with their bits mixed; int32 products wrap around."""
    bits = bits * signed(0x85EBCA6B)
    bits = bits ^ ((bits >> 13) & 0x7FFFF)
    bits = bits * signed(0xC2B2AE35)
    return bits ^ ((bits >> 16) & 0xFFFF)


def low_word(numbers: Tensor) -> Tensor:
    """Return the low 32 bits of int64 numbers as int32."""
    return (((numbers + 2**31) & (2**32 - 1)) - 2**31).to(torch.int32)


def key_word(key: Tensor) -> Tensor:
    """Return one int32 word for a key of int64 [2]: seed and step."""
    seed, step = low_word(key).unbind()
    return mix(mix(seed ^ signed(GOLDEN)) ^ step)


def key_number(seed: int, step: int) -> int:
    """Return the word of `key_word` as a number, signed, without a tensor."""
    word = _mixed((seed ^ GOLDEN) & _WORD)
    return signed(_mixed(word ^ (step & _WORD)))


def _mixed(word: int) -> int:
    """Return a word of 32 bits as `mix` mixes it."""
    word = word * 0x85EBCA6B & _WORD
    word ^= word >> 13
    word = word * 0xC2B2AE35 & _WORD
    return word ^ word >> 16


def edge_bits(edge_id_E: Tensor, key: Tensor) -> Tensor:
    """Return int32 bits of each edge, [E].

    Args:
        edge_id_E: global edge ids, int64, below 2^62.
        key: int64 [2], seed and step.
    """
    return mix(mix(low_word(edge_id_E) ^ key_word(key)) ^ low_word(edge_id_E >> 32))


def edge_head_bits(edge_id_E: Tensor, key: Tensor, num_heads: int) -> Tensor:
    """Return int32 bits of each edge and head, [E, H]."""
    head_H = torch.arange(1, num_heads + 1, dtype=torch.int32, device=edge_id_E.device) * signed(GOLDEN)
    return mix(edge_bits(edge_id_E, key).unsqueeze(1) ^ head_H)


class Stream(IntEnum):
    """What bits are for, other than dropout: each use has bits of its own for the same key and id."""

    UNIFORM = 1
    WEIGHTED = 2
    WALK = 3
    VISIT = 4
    EXPANDER = 5
    PROJECTION = 6
    SEEDS = 7


def stream_bits(id_N: Tensor, key: Tensor, stream: Stream) -> Tensor:
    """Return int32 bits of ids for one use, in the ids' shape.

    Args:
        id_N: int64 of any shape, global ids of nodes or edges.
        key: int64 [2], seed and step.
    """
    word = mix(key_word(key) ^ signed(stream * GOLDEN))
    return mix(mix(low_word(id_N) ^ word) ^ low_word(id_N >> 32))


def numbered_bits(bits: Tensor, number: Tensor) -> Tensor:
    """Return further int32 bits for each number, from 0, of what has such bits; shapes are broadcast."""
    return mix(bits ^ ((number.to(torch.int32) + 1) * signed(GOLDEN)))


def unit_doubles(bits: Tensor) -> Tensor:
    """Return fp64 numbers within (0, 1), never 0 or 1, from int32 bits."""
    return ((bits.to(torch.int64) & (2**32 - 1)).to(torch.float64) + 0.5) * 2.0**-32


def numbers_below(bits: Tensor, bound: Tensor) -> Tensor:
    """Return int64 numbers from 0 to below int64 bounds, at most 2^31, uniform but for bound / 2^32."""
    return ((bits.to(torch.int64) & (2**32 - 1)) * bound) >> 32


def threshold(ratio: float) -> int:
    """Return the signed 32-bit number that a share of all words lies below."""
    return min(int(ratio * 2**32), 2**32 - 1) - 2**31
