"""The order of examples: a fixed pseudo-random permutation that is computed, not stored.

A Feistel network is a bijection of [0, 4**k) whatever its round function; an index that it throws out of
range is fed through again until it lands inside (cycle walking), which makes a bijection of any range(size).
"""

import hashlib

import numpy as np

_ROUNDS = 8
# Odd constants with scattered bits: 2**64 over the golden ratio, and the fraction of sqrt(3).
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_SECOND_MULTIPLIER = np.uint64(0xBB67AE8584CAA73B)


def permute(index, size: int, key: tuple[int, ...]) -> np.ndarray:
    """The places of index under a permutation of range(size) that depends on key alone.

    index: integers of any shape, each in [0, size). key: integers such as (seed, epoch). Returns int64, shape
    of index. Time and memory grow with index, not with size. Raises ValueError for an index out of range.
    """
    index = np.asarray(index, np.int64)
    if index.size and not (0 <= index.min() and index.max() < size):
        raise ValueError(f"indices from {index.min()} to {index.max()} do not lie in range({size})")
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    round_keys = _round_keys(key)
    places = _feistel(index.astype(np.uint64).ravel(), half_bits, round_keys)
    while (outside := places >= size).any():
        places[outside] = _feistel(places[outside], half_bits, round_keys)
    return places.astype(np.int64).reshape(index.shape)


def _round_keys(key: tuple[int, ...]) -> np.ndarray:
    text = " ".join(str(int(part)) for part in key)
    return np.frombuffer(hashlib.blake2b(text.encode(), digest_size=8 * _ROUNDS).digest(), "<u8")


def _feistel(value: np.ndarray, half_bits: int, round_keys: np.ndarray) -> np.ndarray:
    bits = np.uint64(half_bits)
    left, right = value >> bits, value & np.uint64((1 << half_bits) - 1)
    for round_key in round_keys:
        left, right = right, left ^ _round(right, round_key, half_bits)
    return (left << bits) | right


def _round(value: np.ndarray, round_key: np.uint64, half_bits: int) -> np.ndarray:
    mixed = (value ^ round_key) * _MULTIPLIER
    mixed = (mixed ^ (mixed >> np.uint64(32))) * _SECOND_MULTIPLIER
    return mixed >> np.uint64(64 - half_bits)
