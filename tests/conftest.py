"""What all tests share: one thread, fixed seeds, and the folder of real models.

Not a place for builders of models or engines: those live beside the tests that use them.
FORETELL_TEST_MODELS names a folder of real models (GGUF files or Hugging Face directories); a test
that asks for one skips, with the reason, where it is missing.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

MODELS_VARIABLE = "FORETELL_TEST_MODELS"


def pytest_configure(config: pytest.Config) -> None:
    # One thread: tiny tensors gain nothing from more, and the order of a sum never changes.
    torch.set_num_threads(int(os.environ.get("FORETELL_TEST_THREADS", "1")))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Every test starts from the same seeds, whatever ran before it."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _interruptible() -> Iterator[None]:
    """Ctrl-C means what it means in a terminal, also where a shell started the tests in the background, ignoring it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def models_folder() -> Path:
    """The folder of real models; skips where FORETELL_TEST_MODELS does not name one."""
    value = os.environ.get(MODELS_VARIABLE)
    if not value:
        pytest.skip(f"needs real models: set {MODELS_VARIABLE} to a folder that holds them")
    folder = Path(value)
    assert folder.is_dir(), f"{MODELS_VARIABLE}={value!r} is not a folder"
    return folder


@pytest.fixture(scope="session")
def real_model(models_folder: Path) -> Callable[[str], Path]:
    """Finds one real model by file name, e.g. real_model("smollm2-135m.gguf"); skips without it."""

    def find(name: str) -> Path:
        path = models_folder / name
        if not path.exists():
            pytest.skip(f"needs the real model {name} in {models_folder}")
        return path

    return find
