"""What a checkpoint is, from its tensors first and its config second; never from its name.

Nothing is built here. A family that exists but is not supported is refused by its own name, so that nobody has to
guess why acceptance is zero.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from foretell.spec.checkpoint import medusa
from foretell.spec.checkpoint.source import Checkpoint, Config


class Family(StrEnum):
    """What a drafter checkpoint can be."""

    MEDUSA = "medusa"
    EAGLE = "eagle"  # EAGLE-1 and EAGLE-2, whose weights are the same
    EAGLE3 = "eagle3"
    MLP_SPECULATOR = "mlp_speculator"
    PARD = "pard"
    MTP = "mtp"
    DRAFT_MODEL = "draft_model"


METHODS = {  # what users may call a family
    **{family.value: family for family in Family},
    "eagle1": Family.EAGLE,
    "eagle2": Family.EAGLE,
    "draft": Family.DRAFT_MODEL,
}
MTP_NAMES = re.compile(
    r"^(mtp\.|model\.mtp_layers\.\d+\.|model\.layers\.\d+\.(eh_proj|enorm|hnorm)\.)"
)


@dataclass(frozen=True, slots=True)
class Recognised:
    """A family, and what it was told by."""

    family: Family
    evidence: str


def recognise(checkpoint: Checkpoint) -> Recognised:
    """Find out what a checkpoint is.

    Raises:
        ValueError: it is a family that is not supported, or nothing known; says what was seen.
    """
    _refuse_unsupported(checkpoint)
    names = set(checkpoint.shapes)
    plain = {name.removeprefix("model.") for name in names}
    config = checkpoint.config
    if _any(names, medusa.ORIGINAL) or _any(names, medusa.CONVERTED):
        return Recognised(Family.MEDUSA, "tensors of Medusa heads")
    if any(re.match(r"(speculator\.)?emb\.\d+\.weight$", name) for name in names):
        return Recognised(Family.MLP_SPECULATOR, "tensors emb.{i}, proj.{i}, head.{i}")
    if _any(names, MTP_NAMES):
        return Recognised(Family.MTP, "multi-token-prediction layers in the checkpoint")
    if {"layers.0.hidden_norm.weight", "midlayer.hidden_norm.weight"} & plain:
        return Recognised(Family.EAGLE3, "a hidden_norm in the first layer")
    if "fc.weight" in plain and any(name.startswith("layers.0.") for name in plain):
        return Recognised(
            Family.EAGLE, "fc over embedding and feature, and a layer without hidden_norm"
        )
    _refuse_promises(checkpoint)
    if "embed_tokens.weight" in plain and "layers.0.input_layernorm.weight" in plain:
        if any(key in config for key in ("pard_token", "ptd_token_id")):
            return Recognised(Family.PARD, "a language model with a pard_token")
        return Recognised(Family.DRAFT_MODEL, "the tensors of a language model")
    seen = ", ".join(sorted(names)[:4]) or "none"
    raise ValueError(
        f"{checkpoint.name}: not a drafter that is known; it has the tensors {seen} ... Known are Medusa heads, "
        "EAGLE-1 to 3, MLPSpeculator, MTP, PARD and language models"
    )


def check_method(method: str | None, found: Recognised, checkpoint: Checkpoint) -> Family:
    """The family, if it is what the user named.

    Raises:
        ValueError: the method is unknown or another one.
    """
    if method is None:
        return found.family
    if method not in METHODS:
        raise ValueError(
            f"speculative method {method!r} is unknown; known are {', '.join(METHODS)}"
        )
    wanted = METHODS[method]
    if wanted is found.family:
        return wanted
    if wanted is Family.DRAFT_MODEL and _holds_language_model(found, checkpoint):
        return wanted
    raise ValueError(
        f"method {method!r} was given, but {checkpoint.name} is a checkpoint of {found.family.value!r} "
        f"({found.evidence}); use method={found.family.value!r} or leave the method out"
    )


def _holds_language_model(found: Recognised, checkpoint: Checkpoint) -> bool:
    """Whether a whole model is there besides what was found in it."""
    if found.family not in (Family.PARD, Family.MTP, Family.MEDUSA):
        return False
    plain = {name.removeprefix("model.") for name in checkpoint.shapes}
    return {"embed_tokens.weight", "layers.0.input_layernorm.weight"} <= plain


def verifier_of(config: Config) -> str | None:
    """The target that a speculators-format config names, for serving it by the drafter's name alone."""
    if not is_speculators(config):
        return None
    verifier = (config.get("speculators_config") or {}).get("verifier") or {}
    name = verifier.get("name_or_path")
    return str(name) if name else None


def is_speculators(config: Config) -> bool:
    """Whether a config.json is that of a drafter in speculators' format."""
    return "speculators_model_type" in config


def draft_tokens_of(checkpoint: Checkpoint) -> int | None:
    """How many tokens a step the checkpoint suggests to draft: speculators' first proposal, or n_predict."""
    methods = (checkpoint.config.get("speculators_config") or {}).get("proposal_methods") or ()
    suggested = (
        methods[0].get("speculative_tokens") if methods else checkpoint.config.get("n_predict")
    )
    return int(suggested) if suggested else None


def _refuse_unsupported(checkpoint: Checkpoint) -> None:
    config, names = checkpoint.config, checkpoint.shapes
    kind = str(config.get("speculators_model_type", ""))
    architectures = " ".join(config.get("architectures") or ())
    for family, here in (
        ("P-EAGLE", kind == "peagle" or any(n.endswith("mask_hidden") for n in names)),
        ("DFlash", kind == "dflash" or "DFlash" in architectures),
        ("DSpark", kind == "dspark" or "DSpark" in architectures),
        ("EAGLE-4", "Eagle4" in architectures or "efficient_lm_head.weight" in names),
        ("EAGLE-1 in speculators' old format", kind == "eagle"),
        ("MTP in speculators' format", kind == "mtp"),
    ):
        if here:
            raise ValueError(
                f"{checkpoint.name} is a {family} drafter, which is not supported; use an EAGLE-3, Medusa or "
                "draft-model checkpoint for the target"
            )


def _refuse_promises(checkpoint: Checkpoint) -> None:
    """A config that speaks of heads over tensors that have none."""
    config = checkpoint.config
    for family, keys in (
        ("Medusa", ("medusa_num_heads",)),
        ("EAGLE", ("eagle_config", "draft_vocab_size")),
    ):
        said = next((key for key in keys if key in config), None)
        if said is not None:
            raise ValueError(
                f"{checkpoint.name}: config.json has {said}, but no tensor is named like those of {family}; fetch the "
                "weights again or use the right folder"
            )


def _any(names: Iterable[str], pattern: re.Pattern[str]) -> bool:
    return any(pattern.match(name) for name in names)
