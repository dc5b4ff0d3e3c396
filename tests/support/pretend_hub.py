"""A hub that is a few folders: code that names models by their hub names runs as it stands, on tiny random ones.

The models read and write text: their vocabulary is that of a tiny tokenizer, not the bare ids of `checkpoints`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import checkpoints as files
import pytest
from tiny_tokenizers import byte_level, sentencepiece_like
from transformers import PreTrainedTokenizerFast

from foretell.model import hub

TEXT_IDS = 259  # of the byte-level tokenizer
LONGEST = 2048  # positions


def text_model(
    folder: Path, layers: int = 1, tokenizer: PreTrainedTokenizerFast | None = None
) -> Path:
    """A small language model of byte-level text, or of another tokenizer's, in a folder."""
    tokenizer = tokenizer or byte_level()
    tokenizer.save_pretrained(folder)
    end = tokenizer.eos_token_id
    with of_vocabulary(len(tokenizer)):
        config = files.llama_config(layers, max_position_embeddings=LONGEST, eos_token_id=end)
        return files.write(folder, files.language_model(layers), config, "model.safetensors")


def other_text_model(folder: Path) -> Path:
    """One whose tokenizer is of another kind."""
    return text_model(folder, tokenizer=sentencepiece_like())


@contextmanager
def of_vocabulary(size: int) -> Iterator[None]:
    """Meanwhile `checkpoints` writes tensors for so many ids."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "V", size)
        yield


def pretend(monkeypatch: pytest.MonkeyPatch, places: Mapping[str, Path]) -> None:
    """Hub names are these folders, and nothing else is to be had."""
    monkeypatch.setattr(hub, "_snapshot", lambda name, revision: places[name])
    monkeypatch.setattr(hub, "config_folder", lambda name, revision: places.get(name, Path(name)))
