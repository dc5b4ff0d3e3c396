"""From a drafter's folder to a drafter: recognise, read, choose the tree, tell what was decided.

Plain draft models are not loaded here: `identify` says that a checkpoint is one, and who builds the engine loads it as
any model, with its tokenizer.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from pathlib import Path

from foretell.model.decoder import Decoder
from foretell.model.hub import Kind, ModelSource
from foretell.model.load import load_model
from foretell.spec.checkpoint.eagle import EagleReading, read_eagle
from foretell.spec.checkpoint.eagle3 import Overrides, read_eagle3
from foretell.spec.checkpoint.medusa import read_medusa
from foretell.spec.checkpoint.mlp_speculator import read_mlp_speculator
from foretell.spec.checkpoint.mtp import read_mtp
from foretell.spec.checkpoint.recognise import (
    METHODS,
    Family,
    Recognised,
    check_method,
    draft_tokens_of,
    recognise,
    verifier_of,
)
from foretell.spec.checkpoint.source import Checkpoint, open_checkpoint
from foretell.spec.drafter import Drafter
from foretell.spec.dynamic_tree import EAGLE2, EAGLE3, Growth
from foretell.spec.eagle import EagleDrafter
from foretell.spec.medusa import MedusaDrafter
from foretell.spec.mlp_speculator import MlpSpeculatorDrafter
from foretell.spec.pard import PardDrafter
from foretell.spec.presets import cut, medusa_preset, preset
from foretell.spec.tree import Tree, chain
from foretell.spec.verify import Acceptance
from foretell.spec.vocabulary import same

log = logging.getLogger("foretell")


@dataclass(frozen=True, slots=True)
class Identified:
    """A checkpoint, if its tensors could be listed, and what it is."""

    checkpoint: Checkpoint | None  # None: a GGUF file
    family: Family
    evidence: str = ""  # what it was told by

    @property
    def trained_for(self) -> str | None:
        """The target that its config names, if it names one."""
        if self.checkpoint is None:
            return None
        config = self.checkpoint.config
        named = verifier_of(config) or config.get("base_model_name_or_path")
        return str(named) if named else None


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the user said about drafting.

    Args:
        method: as for `check_method`; "eagle1" and "eagle2" choose between a fixed and a grown tree.
        tree: what to draft; None = as `tokens` says.
        tokens: num_speculative_tokens, if no tree is given: a chain of so many, for Medusa its own tree cut to so many
            levels. None = what the checkpoint suggests, else as the originals do.
        overrides: for EAGLE-3.
    """

    method: str | None = None
    tree: Tree | Growth | None = None
    tokens: int | None = None
    overrides: Overrides = field(default_factory=Overrides)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A drafter, and what the engine must provide for it."""

    drafter: Drafter
    family: Family
    tree: Tree  # what steps are planned with: the static tree, or the bound of grown ones
    grows: bool  # drafts bring their parents: the slots need `draft_parents`
    draws: bool  # drafts bring their laws: the slots need `draft_probs`
    scratch: int  # KV entries behind the committed text that drafting may write
    longest: int | None  # tokens of the longest text its config was made for; None = no limit
    notes: tuple[str, ...]
    growth: Growth | None = None
    draft_vocabulary: int = 0  # tokens it can propose; 0 = all of the target's


def identify(path: Path, method: str | None = None, name: str | None = None) -> Identified:
    """Find out what is at a path, and that it is what the user named.

    Args:
        name: what messages call it; None = the folder's name.

    Raises:
        ValueError: see `open_checkpoint`, `recognise` and `check_method`.
    """
    if path.suffix == ".gguf":
        if method is not None and METHODS.get(method) is not Family.DRAFT_MODEL:
            raise ValueError(
                f"method {method!r} was given, but {path.name} is a GGUF file, which holds a draft model"
            )
        return Identified(None, Family.DRAFT_MODEL, "its GGUF file")
    checkpoint = open_checkpoint(path, name)
    found: Recognised = recognise(checkpoint)
    family = check_method(method, found, checkpoint)
    evidence = found.evidence if family is found.family else "the method given"
    return Identified(checkpoint, family, evidence)


def load_drafter(
    identified: Identified, target: Decoder, acceptance: Acceptance, wanted: Wanted
) -> Loaded:
    """Read a drafter that is not a plain draft model.

    Raises:
        ValueError: the checkpoint does not fit the target, or the tree does not fit the drafter.
    """
    checkpoint, family = identified.checkpoint, identified.family
    assert checkpoint is not None, "a GGUF file is a draft model"
    assert family is not Family.DRAFT_MODEL, "draft models are loaded as models"
    if wanted.tokens is None and wanted.tree is None:
        wanted = replace(wanted, tokens=draft_tokens_of(checkpoint))
    match family:
        case Family.EAGLE:
            loaded = _eagle(read_eagle(checkpoint, target), family, acceptance, wanted)
        case Family.EAGLE3:
            reading = read_eagle3(checkpoint, target, wanted.overrides)
            loaded = _eagle(reading, family, acceptance, wanted)
        case Family.MTP:
            loaded = _eagle(read_mtp(checkpoint, target), family, acceptance, wanted)
        case _:
            loaded = _heads(checkpoint, family, target, acceptance, wanted)
    for note in loaded.notes:
        log.info("speculative model %s: %s", checkpoint.name, note)
    return loaded


def _eagle(reading: EagleReading, family: Family, acceptance: Acceptance, wanted: Wanted) -> Loaded:
    shape = _eagle_tree(family, wanted, reading.net.parts.layer.layers)
    growth = shape if isinstance(shape, Growth) else None
    drafter = EagleDrafter(reading.net, reading.taps, reading.vocabulary, acceptance, growth)
    tree = shape.bound if isinstance(shape, Growth) else shape
    return Loaded(
        drafter=drafter,
        family=family,
        tree=tree,
        grows=growth is not None,
        draws=drafter.draws,
        scratch=max(drafter.scratch, tree.nodes),
        longest=None,  # heads' configs often say 2048 and draft well beyond; what fails only costs acceptance
        notes=(*reading.notes, told(shape)),
        growth=growth,
        draft_vocabulary=reading.vocabulary.reduced,
    )


def _eagle_tree(family: Family, wanted: Wanted, layers: int) -> Tree | Growth:
    """As the originals: EAGLE-1 a fixed tree, EAGLE-2 and 3 grown ones, MTP one token for each of its layers."""
    if wanted.tree is not None:
        return wanted.tree
    if wanted.tokens is not None:
        return chain(wanted.tokens)
    if family is Family.MTP:
        return chain(layers)
    if wanted.method == "eagle1":
        return preset("eagle")
    return EAGLE3 if family is Family.EAGLE3 else EAGLE2


def _heads(
    checkpoint: Checkpoint, family: Family, target: Decoder, acceptance: Acceptance, wanted: Wanted
) -> Loaded:
    """Drafters whose depth is bounded and that fill static trees."""
    if isinstance(wanted.tree, Growth):
        raise ValueError(
            f"tree: trees that grow need an EAGLE drafter, {checkpoint.name} is {family.value}; give paths"
        )
    drafter: MedusaDrafter | MlpSpeculatorDrafter | PardDrafter
    notes: tuple[str, ...] = ()
    longest: int | None = None
    tokens = wanted.tokens
    own = None if tokens is None else chain(tokens)  # where Medusa does not say otherwise
    match family:
        case Family.MEDUSA:
            medusa = read_medusa(checkpoint, target)
            tree = wanted.tree or _medusa_tree(checkpoint, medusa.net.heads, tokens)
            # Medusa takes the likeliest candidates; only a chain gains by knowing what they were drawn from.
            drafter = MedusaDrafter(medusa.net, medusa.vocabulary, acceptance, draws=tree.is_chain)
            drafter.check_tree(own or tree)
            notes = medusa.notes
        case Family.MLP_SPECULATOR:
            mlp = read_mlp_speculator(checkpoint, target)
            tree = wanted.tree or own or chain(mlp.net.heads)
            drafter = MlpSpeculatorDrafter(mlp.net, mlp.vocabulary, acceptance)
            notes = mlp.notes
        case _:
            assert family is Family.PARD, family
            tree = wanted.tree or own or chain(8)
            drafter = _pard(checkpoint, target, acceptance)
            longest = drafter.model.config.max_position
    drafter.check_tree(tree)
    return Loaded(
        drafter=drafter,
        family=family,
        tree=tree,
        grows=False,
        draws=drafter.draws,
        scratch=tree.nodes,
        longest=longest,
        notes=(*notes, told(tree)),
        draft_vocabulary=drafter.scoring.vocabulary.reduced,
    )


def _medusa_tree(checkpoint: Checkpoint, heads: int, tokens: int | None) -> Tree:
    """Converted heads draft a chain where they were converted for; published ones the tree of their model's name."""
    levels = heads if tokens is None else min(tokens, heads)
    if checkpoint.config.get("model_type") == "medusa":
        return chain(levels)
    name = checkpoint.config.get("base_model_name_or_path") or checkpoint.name
    return cut(preset(medusa_preset(f"{name} {checkpoint.name}")), levels)


def _pard(checkpoint: Checkpoint, target: Decoder, acceptance: Acceptance) -> PardDrafter:
    source = ModelSource(checkpoint.path, Kind.DIRECTORY, checkpoint.name)
    dtype = str(target.dtype).removeprefix("torch.")
    model = load_model(source, dtype=dtype, device=target.device, ops=target.ops)
    config = checkpoint.config
    mask = int(config.get("pard_token", config.get("ptd_token_id", -1)))
    sizes = (target.config.vocab_size, model.config.vocab_size)
    return PardDrafter(model, mask, same(*sizes, min(sizes), target.device), acceptance)


def told(shape: Tree | Growth) -> str:
    """A tree in words."""
    if isinstance(shape, Growth):
        return f"tree: grown, top_k {shape.top_k}, {shape.depth} levels, {shape.nodes - 1} drafted tokens"
    kind = "chain" if shape.is_chain else "tree"
    return f"tree: {kind} of {shape.nodes - 1} drafted tokens, {shape.depth} levels"
