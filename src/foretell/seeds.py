"""Seeds of requests that were given none, and of the n answers to one prompt. Integers only; spec/noise.py makes noise.

Invariant: every seed is in [0, 2**63), and equal inputs give equal seeds on every machine.
"""

from __future__ import annotations

_ALL = (1 << 64) - 1
_REQUESTS, _CHILDREN = 1 << 60, 1 << 61  # so that the two never meet


def request_seed(engine_seed: int, counter: int) -> int:
    """Seed of the engine's request number `counter` that came without one."""
    return _mix(_mix(engine_seed & _ALL) ^ _REQUESTS + counter)


def child_seed(seed: int, index: int) -> int:
    """Seed of answer `index`: the first answer is the one that n = 1 would give."""
    return _mix(_mix(seed & _ALL) ^ _CHILDREN + index) if index else seed


def _mix(value: int) -> int:
    """63 well-stirred bits of a 64-bit value (the finaliser of SplitMix64, doi 10.1145/2660193.2660195)."""
    value = (value + 0x9E3779B97F4A7C15) & _ALL
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & _ALL
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & _ALL
    return (value ^ value >> 31) >> 1
