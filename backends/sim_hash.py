"""The hash by which the simulated backend tells histories apart and chooses tokens."""

import numpy as np
from numpy.typing import NDArray

Digests = NDArray[np.uint64]
Numbers = NDArray[np.int64]


def mixed(tokens: Numbers, positions: Numbers) -> Digests:
    """Hash of each (token, position): SplitMix64's finaliser; wraps modulo 2^64."""
    z = tokens.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + positions.astype(np.uint64)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Digests = z ^ (z >> np.uint64(31))
    return mixed


def scrambled(number: int) -> int:
    """A sum of hashes is no hash of its last summand: spread it once more."""
    low, high = number & 0x7FFFFFFF, number >> 31
    return int(mixed(np.array([low], np.int64), np.array([high], np.int64))[0])
