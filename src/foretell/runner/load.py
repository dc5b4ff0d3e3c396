"""Reads what a configuration names: the target, its tokenizer and the drafter."""

from __future__ import annotations

import torch

from foretell.config import DraftModel, EngineConfig, Ngram
from foretell.model.decoder import Decoder
from foretell.model.hub import resolve
from foretell.model.load import load_model
from foretell.model.tokenizer import load_tokenizer
from foretell.ops.table import table_for
from foretell.runner.build import Built, Parts, assemble
from foretell.spec.autoregressive import DraftModelDrafter
from foretell.spec.drafter import Drafter, NoDrafter
from foretell.spec.ngram import NgramDrafter
from foretell.spec.verify import Acceptance
from foretell.spec.vocabulary import Tokenizer, pair_vocabularies


def build(config: EngineConfig) -> Built:
    """Load everything that `config` names and allocate the rest.

    Raises:
        ValueError: a model, drafter, tree or size does not work; the message names the field and the remedy.
    """
    device = resolve_device(config.device)
    source = resolve(config.model, revision=config.revision)
    tokenizer = load_tokenizer(source if config.tokenizer is None else resolve(config.tokenizer))
    ops = table_for(device)
    target = load_model(source, dtype=config.dtype, device=device, ops=ops)
    drafter, draft_dtype = load_drafter(config, target, tokenizer)
    parts = Parts(target, drafter, draft_dtype)
    return assemble(config, parts, tokenizer)


def load_drafter(
    config: EngineConfig, target: Decoder, tokenizer: Tokenizer
) -> tuple[Drafter, torch.dtype]:
    """The drafter that the configuration asks for, and the dtype of its KV."""
    match config.drafter:
        case None:
            return NoDrafter(), target.dtype
        case Ngram(prompt_lookup_min=shortest, prompt_lookup_max=longest):
            return NgramDrafter(shortest, longest), target.dtype
        case DraftModel() as draft:
            source = resolve(draft.model, revision=draft.revision)
            model = load_model(source, dtype=config.dtype, device=target.device, ops=target.ops)
            vocabulary = pair_vocabularies(
                tokenizer,
                load_tokenizer(source),
                (target.config.vocab_size, model.config.vocab_size),
                draft.use_heterogeneous_vocab,
                target.device,
            )
            return DraftModelDrafter(model, vocabulary, Acceptance(config.acceptance)), model.dtype
        case other:
            raise NotImplementedError(
                f"Unsupported speculative method: '{type(other).__name__.lower()}'"
            )


def resolve_device(name: str) -> torch.device:
    """The torch device of a configuration's name; "auto" takes a GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(
            f"device={name!r}, but no CUDA device is visible; use device='cpu' or 'auto'"
        )
    return torch.device(name)
