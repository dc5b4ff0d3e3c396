"""From a plan to a drafter that can be trained: its network, its vocabulary, where features are kept."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch

from foretell.model.decoder import Decoder
from foretell.model.hub import ModelSource
from foretell.spec.checkpoint.eagle3 import read_eagle3
from foretell.spec.checkpoint.medusa import read_medusa
from foretell.spec.checkpoint.source import open_checkpoint
from foretell.training.capture import Capture, DiskStore, Store
from foretell.training.data import Example, Packed, draft_vocabulary, token_counts
from foretell.training.draft import DraftRecipe, student_of
from foretell.training.eagle import (
    EagleRecipe,
    calibrate,
    default_taps,
    head_layer,
    new_eagle,
    new_eagle3,
)
from foretell.training.medusa import MedusaRecipe, new_heads
from foretell.training.plan import Plan
from foretell.training.recipe import Recipe
from foretell.training.save import DraftCard


def make_recipe(
    plan: Plan, source: ModelSource, dense: Decoder, examples: Sequence[Example], packed: Packed
) -> tuple[Recipe, dict[str, Any]]:
    """The drafter to train and how, and what the report says of it."""
    if plan.kind == "medusa":
        capture = Capture(dense, (), _store(plan, dense, (), packed))
        card = DraftCard(source.name, tokens=plan.medusa.heads)
        net = new_heads(dense, plan.medusa)
        if plan.initial is not None:
            known = read_medusa(open_checkpoint(plan.initial), dense)
            _start_from(net, known.net, plan.initial.name)
        return MedusaRecipe(net, dense, capture, plan.medusa, card), {"heads": plan.medusa.heads}
    if plan.kind == "draft":
        capture = Capture(dense, (), _store(plan, dense, (), packed))
        student = student_of(dense, source, plan.distil)
        distilled = DraftRecipe(student, dense, capture, plan.distil, source)
        return distilled, {"draft_layers": student.config.layers}
    layer = head_layer(dense.config, plan.layers, plan.intermediate)
    if plan.kind == "eagle":
        taps: tuple[int, ...] = (-1,)
        capture = Capture(dense, taps, _store(plan, dense, taps, packed))
        whole = torch.arange(dense.config.vocab_size, device=dense.device)
        small = new_eagle(dense, layer, plan.loop.seed)
        card = DraftCard(source.name, tokens=plan.tokens)
        return EagleRecipe(small, dense, capture, whole, plan.eagle, card), {}
    assert plan.kind == "eagle3", plan.kind
    taps = plan.taps or default_taps(dense.config.layers)
    capture = Capture(dense, taps, _store(plan, dense, taps, packed))
    size = plan.draft_vocab_size or dense.config.vocab_size
    counts = token_counts(examples, dense.config.vocab_size)
    ends = [e for e in dense.config.eos_token_ids if e < dense.config.vocab_size]
    ids, covered = draft_vocabulary(counts, min(size, dense.config.vocab_size), ends)
    start = None
    if plan.initial is not None:
        start = read_eagle3(open_checkpoint(plan.initial), dense)
        ids = start.vocabulary.noise_ids.long()
    ids = ids.to(dense.device)
    net3 = new_eagle3(dense, ids, layer, len(taps), plan.loop.seed)
    if start is None or plan.initial is None:
        rows = torch.arange(min(2, packed.tokens.shape[0]))
        calibrate(net3, capture(rows, packed.take(rows).to(dense.device)).features)
    else:
        _start_from(net3, start.net, plan.initial.name)  # type: ignore[arg-type]
    card = DraftCard(source.name, taps=taps, tokens=plan.tokens)
    recipe = EagleRecipe(net3, dense, capture, ids, plan.eagle, card)
    return recipe, {"draft_vocab_size": len(ids), "covered": round(covered, 4), "taps": list(taps)}


def _start_from(net: torch.nn.Module, other: torch.nn.Module, name: str) -> None:
    """Begin with the weights of a drafter that was trained before.

    Raises:
        ValueError: it is not of the same shape.
    """
    for (path, ours), theirs in zip(net.named_parameters(), other.parameters(), strict=True):
        if ours.shape != theirs.shape:
            raise ValueError(
                f"{name}: {path} has shape {list(theirs.shape)}, this run trains {list(ours.shape)}; give the settings "
                "it was trained with"
            )
        with torch.no_grad():
            ours.copy_(theirs)


def _store(plan: Plan, dense: Decoder, taps: tuple[int, ...], packed: Packed) -> Store | None:
    rows, length = packed.tokens.shape
    width = dense.feature_width(taps) + dense.config.hidden_size
    shape = (rows, length, width)
    if plan.capture_dir is not None:
        of = f"{dense.config.layers}x{dense.config.hidden_size} {list(taps)} {_fingerprint(dense, packed)}"
        return DiskStore(
            plan.capture_dir, *shape, plan.capture_bytes, dense.dtype, dense.device, of
        )
    return Store(*shape, plan.memory, dense.dtype, dense.device) if plan.memory else None


def _fingerprint(dense: Decoder, packed: Packed) -> str:
    """Of the texts and, by some of its weights, of the target: features of others must not be taken for theirs."""
    weights = torch.cat((dense.norm.weight.flatten(), dense.embedding[:16].flatten()))
    digest = hashlib.sha256(weights.detach().float().cpu().numpy().tobytes())
    digest.update(packed.tokens.numpy().tobytes() + packed.documents.numpy().tobytes())
    return digest.hexdigest()[:16]
