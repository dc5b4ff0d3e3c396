"""Kernels: a Python function over addresses, compiled for bfloat16 and for float32, and kept on disk.

Compiling takes seconds, once per machine: what is compiled lies in a folder named after the sources of all kernels, so
a changed source never meets old code. `prepare` compiles ahead of time and says so; no step compiles anything then.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
import types as python_types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numba
import torch

from foretell.ops.cpu import lanes

log = logging.getLogger("foretell")

ELEMENTS: dict[torch.dtype, dict[str, Any]] = {
    torch.bfloat16: {
        "load": lanes.load_bfloat16,
        "store": lanes.store_bfloat16,
        "load_vector": lanes.load_vector_bfloat16,
    },
    torch.float32: {
        "load": lanes.load_float32,
        "store": lanes.store_float32,
        "load_vector": lanes.load_vector_float32,
    },
}
_TYPES = {"int": numba.int64, "float": numba.float64}
# Sums may be taken in any order, which is what makes vector code of them; NaN and infinities keep their meaning.
RELAXED = {"reassoc", "contract", "arcp", "nsz"}


class Kernel(dict[torch.dtype, Callable[..., None]]):
    """A kernel's compiled forms, by element type: `kernel[x.dtype](x.data_ptr(), ...)`. Made at first use."""

    def __init__(self, body: Callable[..., None]) -> None:
        super().__init__()
        self.body = body

    def __missing__(self, dtype: torch.dtype) -> Callable[..., None]:
        self[dtype] = made = self._compile(dtype)
        return made

    def _compile(self, dtype: torch.dtype) -> Callable[..., None]:
        """The body with the element type's own loads and stores, under a name of its own: names are keys on disk."""
        body, name = self.body, _name(dtype)
        assert isinstance(body, python_types.FunctionType), body
        scope = body.__globals__ | ELEMENTS[dtype]
        mine = python_types.FunctionType(body.__code__, scope, f"{body.__name__}_{name}")
        mine.__qualname__ = mine.__name__
        arguments = [_TYPES[kind] for key, kind in body.__annotations__.items() if key != "return"]
        with _cached_in(folder()) as kept:
            compiled: Callable[..., None] = numba.njit(
                numba.void(*arguments),
                nogil=True,
                fastmath=RELAXED,
                error_model="numpy",
                cache=kept,
            )(mine)
        return compiled


def prepare(kernels: Sequence[Kernel], dtype: torch.dtype) -> None:
    """Compile what is not yet compiled for an element type, or read it from disk."""
    missing = [kernel for kernel in kernels if dtype not in kernel]
    if not missing:
        return
    name = _name(dtype)
    place = folder()
    if place is None or not any(place.glob(f"**/*_{name}-*.nbc")):
        log.info("compiling the CPU kernels for %s, once on this machine: some seconds", name)
    for kernel in missing:
        kernel[dtype]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@cache
def folder() -> Path | None:
    """Where compiled kernels are kept; None if nowhere can be written: then every process compiles its own.

    Under NUMBA_CACHE_DIR, or the user's own cache folder.
    """
    base = os.environ.get("NUMBA_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME")
    root = Path(base) if base else Path.home() / ".cache"
    place = root / "foretell" / "kernels" / _fingerprint()
    try:
        place.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=place).close()
    except OSError as error:
        log.warning(
            "%s cannot be written (%s): CPU kernels are compiled in every process", place, error
        )
        return None
    return place


def _fingerprint() -> str:
    """Of all sources here: Numba looks at a kernel's own file only."""
    digest = hashlib.sha256(numba.__version__.encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


@contextmanager
def _cached_in(place: Path | None) -> Iterator[bool]:
    """Numba decides where a function is kept when it is declared; its setting is put back after that."""
    before = numba.config.CACHE_DIR
    if place is not None:
        numba.config.CACHE_DIR = str(place)
    try:
        yield place is not None
    finally:
        numba.config.CACHE_DIR = before
