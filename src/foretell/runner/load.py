"""Reads what a configuration names: the target, its tokenizer and the drafter.

A drafter's checkpoint is looked into before anything large is read, so that a wrong one costs no wait.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from foretell.config import Chained, DraftCheckpoint, EngineConfig, Ngram, Suffix, checkpoint_of
from foretell.model.decoder import Decoder
from foretell.model.hub import DEFAULT_MODEL, Kind, ModelSource, resolve
from foretell.model.load import load_config, load_model
from foretell.model.tokenizer import load_tokenizer
from foretell.ops.table import table_for
from foretell.runner.build import Built, Parts, assemble
from foretell.spec.autoregressive import DraftModelDrafter
from foretell.spec.chained import ChainedDrafter
from foretell.spec.checkpoint.eagle3 import LayerIds, Overrides
from foretell.spec.checkpoint.load import Identified, Wanted, identify, load_drafter, told
from foretell.spec.checkpoint.recognise import Family
from foretell.spec.compat import Check, compare_layers, compare_names, compare_tokenizers
from foretell.spec.drafter import NoDrafter
from foretell.spec.ngram import NgramDrafter
from foretell.spec.resolved import Resolved
from foretell.spec.suffix import SuffixDrafter, SuffixLimits
from foretell.spec.tree_spec import read_tree, static_tree
from foretell.spec.verify import Acceptance
from foretell.spec.vocabulary import Tokenizer, pair_vocabularies
from foretell.speculation import NO_COUNT

log = logging.getLogger("foretell")


@dataclass(frozen=True, slots=True)
class Found:
    """A drafter's checkpoint that was looked into and not yet read."""

    source: ModelSource
    identified: Identified


def build(config: EngineConfig) -> Built:
    """Load everything that `config` names and allocate the rest.

    Raises:
        ValueError: a model, drafter, tree or size does not work; the message names the field and the remedy.
    """
    if config.tensor_parallel_size > 1:
        raise ValueError(
            f"tensor_parallel_size={config.tensor_parallel_size} is not supported: a model runs on one device. "
            "Leave it out, and use a smaller or quantised model where memory is short"
        )
    device = resolve_device(config.device)
    source = resolve(config.model, revision=config.revision)
    found = None
    draft = checkpoint_of(config.drafter)
    if draft is not None:
        found = find_drafter(config, draft, source)
    if source.kind is Kind.DIRECTORY:
        load_config(source)  # says what is wrong in our words; the tokenizer's library reads it too
    tokenizer = load_tokenizer(source if config.tokenizer is None else _other(config.tokenizer))
    ops = table_for(device, config.deterministic)
    target = load_model(source, config.dtype, device, ops, config.max_model_len)
    return assemble(config, load_parts(config, found, target, tokenizer), tokenizer)


def find_drafter(config: EngineConfig, draft: DraftCheckpoint, target: ModelSource) -> Found:
    """What the drafter's checkpoint is, and that all that was said about it applies to it.

    Args:
        target: where the target lies, for a drafter inside it.

    Raises:
        ValueError: there is none, it is not what was named, a tree is wrong, or a key does not apply.
    """
    if config.tree is not None:
        read_tree(config.tree, draft.num_speculative_tokens)
    source = target if draft.model is None else _resolve_draft(draft.model, draft.revision)
    local = source.path.name if Path(source.name).expanduser().exists() else source.name
    found = Found(source, identify(source.path, draft.method, local))
    family, evidence = found.identified.family, found.identified.evidence
    log.info("speculative model %s: %s, by %s", local, family.value, evidence)
    _check_keys(draft, family, local)
    if family is Family.DRAFT_MODEL:
        if draft.num_speculative_tokens is None and config.tree is None:
            raise ValueError(NO_COUNT)
        static_tree(config.speculation)
    return found


def _other(tokenizer: str) -> ModelSource:
    try:
        return resolve(tokenizer)
    except ValueError as error:
        raise ValueError(f"tokenizer: {error}") from error


def _resolve_draft(model: str, revision: str | None) -> ModelSource:
    try:
        return resolve(model, revision=revision)
    except ValueError as error:
        raise ValueError(f"speculative {error}") from error


def _check_keys(draft: DraftCheckpoint, family: Family, name: str) -> None:
    """A setting of another family would be ignored: say so instead."""
    for key, value, owner in (
        ("use_heterogeneous_vocab", draft.use_heterogeneous_vocab, Family.DRAFT_MODEL),
        ("draft_sample_method", draft.sampling, Family.DRAFT_MODEL),
        ("target_layers", draft.target_layers, Family.EAGLE3),
        ("target_layers_convention", draft.target_layers_convention, Family.EAGLE3),
        ("norm_before_residual", draft.norm_before_residual, Family.EAGLE3),
    ):
        if value is not None and family is not owner:
            raise ValueError(
                f"{key} belongs to {owner.value!r}, but {name} is a checkpoint of {family.value!r}; leave it out"
            )


def load_parts(
    config: EngineConfig, found: Found | None, target: Decoder, tokenizer: Tokenizer
) -> Parts:
    """The target with the drafter that the configuration asks for.

    Args:
        found: the drafter's checkpoint, if it has one.

    Raises:
        ValueError: the drafter does not fit the target, or the tree does not fit the drafter.
    """
    match config.drafter:
        case None:
            return Parts(target, NoDrafter(), target.dtype, resolved=Resolved())
        case DraftCheckpoint() as draft:
            return _checkpoint(config, draft, found, target, tokenizer)
        case Chained(first=first, then=draft):
            parts = _checkpoint(config, draft, found, target, tokenizer)
            return _chain(_free(first, target, config.acceptance), parts)
        case Ngram() | Suffix() as free:
            return _free(free, target, config.acceptance)


def _free(config: Ngram | Suffix, target: Decoder, acceptance: str) -> Parts:
    """A drafter that needs no weights."""
    if isinstance(config, Ngram):
        drafter = NgramDrafter(config.prompt_lookup_min, config.prompt_lookup_max)
        return Parts(target, drafter, target.dtype, resolved=Resolved(method="ngram"))
    limits = SuffixLimits(
        shortest=config.min_match,
        depth=config.max_tree_depth,
        factor=config.max_spec_factor,
        probability=config.min_token_prob,
        # Past outputs were made with noise that a request of the same seed meets again: under match that changes
        # nothing, under another rule the draft would know the numbers that it is judged by.
        texts=config.max_cached_requests if acceptance == "match" else 0,
        tokens=config.corpus_tokens,
    )
    if config.max_cached_requests and not limits.texts:
        log.info(
            "suffix decoding: under acceptance %r only a request's own text is used", acceptance
        )
    suffix = SuffixDrafter(limits)
    learner = suffix if limits.texts else None
    return Parts(
        target,
        suffix,
        target.dtype,
        learner=learner,
        learned_prompt=limits.depth,
        resolved=Resolved(method="suffix"),
    )


def _chain(free: Parts, then: Parts) -> Parts:
    """The drafter of `free` before that of `then`."""
    drafter = ChainedDrafter(free.drafter, then.drafter, then.grows)
    return replace(
        then,
        drafter=drafter,
        learner=free.learner,
        learned_prompt=free.learned_prompt,
        resolved=replace(then.resolved, first=free.resolved.method),
    )


def _checkpoint(
    config: EngineConfig,
    draft: DraftCheckpoint,
    found: Found | None,
    target: Decoder,
    tokenizer: Tokenizer,
) -> Parts:
    assert found is not None, "checkpoints are looked into first"
    if found.identified.family is Family.DRAFT_MODEL:
        parts = _draft_model(config, draft, found.source, target, tokenizer)
    else:
        parts = _trained_drafter(config, draft, found.identified, target)
    identified = found.identified
    resolved = replace(
        parts.resolved,
        method=identified.family.value,
        checkpoint=found.source.name,
        evidence=identified.evidence,
        target_features=parts.drafter.features,
        longest=parts.longest or 0,
    )
    return replace(parts, resolved=resolved, checks=_checks(config, found, parts, tokenizer))


def _checks(
    config: EngineConfig, found: Found, parts: Parts, tokenizer: Tokenizer
) -> tuple[Check, ...]:
    """What can be compared without running anything; what must agree was refused before."""
    if config.compat == "off":
        return ()
    checks = [Check("shapes", True, "every tensor was read and fits the target")]
    size = parts.target.config.vocab_size
    own = parts.resolved.draft_vocabulary
    checks.append(Check("vocabulary", True, f"{own or size} of the target's {size} tokens"))
    folder = found.source.path
    brings = folder.is_dir() and (folder / "tokenizer.json").exists()
    if found.identified.family not in (Family.DRAFT_MODEL, Family.MTP):
        # A draft model's tokenizer was paired with the target's, token by token.
        own_tokenizer = load_tokenizer(found.source) if brings else None
        checks.append(compare_tokenizers(tokenizer, own_tokenizer))
    checks += compare_layers(parts.drafter, parts.target)
    named = compare_names(found.identified.trained_for, config.model or DEFAULT_MODEL)
    return (*checks, *([] if named is None else [named]))


def _draft_model(
    config: EngineConfig,
    draft: DraftCheckpoint,
    source: ModelSource,
    target: Decoder,
    tokenizer: Tokenizer,
) -> Parts:
    model = load_model(source, dtype=config.dtype, device=target.device, ops=target.ops)
    vocabulary = pair_vocabularies(
        tokenizer,
        load_tokenizer(source),
        (target.config.vocab_size, model.config.vocab_size),
        draft.use_heterogeneous_vocab,
        target.device,
    )
    log.info("speculative model %s: %s", source.name, told(static_tree(config.speculation)))
    greedy = draft.sampling == "greedy"
    drafter = DraftModelDrafter(model, vocabulary, Acceptance(config.acceptance), greedy)
    longest = model.config.max_position
    resolved = Resolved(draft_vocabulary=vocabulary.reduced)
    return Parts(
        target, drafter, model.dtype, draws=drafter.draws, longest=longest, resolved=resolved
    )


def _trained_drafter(
    config: EngineConfig, draft: DraftCheckpoint, identified: Identified, target: Decoder
) -> Parts:
    tokens, convention = draft.num_speculative_tokens, draft.target_layers_convention
    wanted = Wanted(
        method=draft.method,
        tree=None if config.tree is None else read_tree(config.tree, tokens),
        tokens=tokens if config.tree is None else None,
        overrides=Overrides(
            layers=draft.target_layers,
            layer_ids=None if convention is None else LayerIds(convention),
            norm_before_residual=draft.norm_before_residual,
        ),
    )
    loaded = load_drafter(identified, target, Acceptance(config.acceptance), wanted)
    return Parts(
        target,
        loaded.drafter,
        target.dtype,
        tree=loaded.tree,
        grows=loaded.grows,
        draws=loaded.draws,
        scratch=loaded.scratch,
        longest=loaded.longest,
        resolved=Resolved(
            growth=loaded.growth,
            draft_vocabulary=loaded.draft_vocabulary,
            notes=loaded.notes,
        ),
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
