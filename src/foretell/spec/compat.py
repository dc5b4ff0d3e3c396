"""Do drafter and target belong together? What can be compared, how a self-test is judged, and what may be wrong.

Loading refuses what cannot work. What is here catches what works and accepts nothing: another target of the same shape,
a wrong list of layers, another rope, another tokenizer. The self-test itself runs an engine (engine/self_test.py); this
file has no engine: it gives it a control (`Shuffled`), other readings of the same weights (`suspects`), and a verdict.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from foretell.model.decoder import Decoder
from foretell.spec.chained import ChainedDrafter
from foretell.spec.drafter import Draft, Drafter, KVSpec, KVView, PromptRows, Window
from foretell.spec.eagle import Eagle3Net, EagleDrafter
from foretell.spec.nodes import Shape
from foretell.spec.vocabulary import Tokenizer

NEARLY_NOTHING = 1.15  # tokens a step; 1 is no draft accepted at all
HARDLY_BETTER = 0.1  # tokens a step that features must gain over shuffled ones, below WELL
WELL = 1.5


@dataclass(frozen=True, slots=True)
class Check:
    """One comparison."""

    name: str
    holds: bool
    detail: str


@dataclass(frozen=True, slots=True)
class SelfTest:
    """What the drafter did on built-in prompts, greedily, with a short tree.

    Args:
        accepted_length: mean tokens a step, the target's own included: 1 = nothing accepted.
        control: the same with the target's features shuffled among places; None = it reads none.
        drafts: steps it is the mean of.
        depth: most drafted tokens that a step could accept.
        by_kind: accepted length of "text" prompts and of "chat" prompts, where the tokenizer has a template.
        seconds: what it took.
    """

    accepted_length: float
    control: float | None
    drafts: int
    depth: int
    by_kind: Mapping[str, float]
    seconds: float

    @property
    def sound(self) -> bool:
        """The drafter is worth its time, as far as a few prompts tell."""
        if self.drafts == 0:
            return True
        if self.accepted_length < NEARLY_NOTHING:
            return False
        gain = HARDLY_BETTER if self.control is None else self.accepted_length - self.control
        return gain >= HARDLY_BETTER or self.accepted_length >= WELL


@dataclass(frozen=True, slots=True)
class CompatReport:
    """What the start found out about drafter and target.

    Args:
        causes: what is probably wrong and what to do, the likeliest first; empty where nothing is.
    """

    method: str
    checkpoint: str | None
    checks: tuple[Check, ...]
    self_test: SelfTest | None = None
    causes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Nothing speaks against the pair."""
        tested = self.self_test is None or self.self_test.sound
        return tested and all(check.holds for check in self.checks)

    def lines(self) -> list[str]:
        """For people, one finding a line."""
        said = [f"{'ok' if c.holds else 'WRONG'}: {c.name}: {c.detail}" for c in self.checks]
        if self.self_test is not None and self.self_test.drafts:
            said.append(f"{'ok' if self.self_test.sound else 'WRONG'}: {tested(self.self_test)}")
        return said + [f"likely cause: {cause}" for cause in self.causes]

    def as_dict(self) -> dict[str, object]:
        """The same as JSON can hold it."""
        test = self.self_test
        return {
            "ok": self.ok,
            "method": self.method,
            "checkpoint": self.checkpoint,
            "checks": [{"name": c.name, "ok": c.holds, "detail": c.detail} for c in self.checks],
            "self_test": None
            if test is None
            else {
                "ok": test.sound,
                "accepted_length": test.accepted_length,
                "with_shuffled_features": test.control,
                "drafts": test.drafts,
                "depth": test.depth,
                "by_kind": dict(test.by_kind),
                "seconds": test.seconds,
            },
            "causes": list(self.causes),
        }


def tested(test: SelfTest) -> str:
    """A self-test in words."""
    control = "" if test.control is None else f", {test.control:.2f} with shuffled features"
    return f"self-test: {test.accepted_length:.2f} tokens a step on built-in prompts (1 is nothing accepted{control})"


# Comparisons.


def compare_tokenizers(target: Tokenizer, draft: Tokenizer | None) -> Check:
    """The target's tokenizer with the one in the drafter's folder, by what each id spells."""
    ours = target.get_vocab()
    print_ = fingerprint(ours)
    if draft is None:
        return Check("tokenizer", True, f"{print_}; the drafter brings none of its own")
    theirs = draft.get_vocab()
    by_id = {token: string for string, token in ours.items()}
    for string, token in sorted(theirs.items(), key=lambda pair: pair[1]):
        if by_id.get(token, string) != string:
            detail = f"id {token} is {by_id[token]!r} in the target and {string!r} in the drafter"
            return Check("tokenizer", False, f"{detail} ({print_}, {fingerprint(theirs)})")
    return Check("tokenizer", True, f"{print_} on both sides where both have a token")


def fingerprint(vocabulary: Mapping[str, int]) -> str:
    """A short name of a vocabulary: equal for equal strings at equal ids."""
    digest = hashlib.sha256()
    for string, token in sorted(vocabulary.items(), key=lambda pair: pair[1]):
        digest.update(f"{token}\0{string}\0".encode())
    return f"{len(vocabulary)} tokens, sha256 {digest.hexdigest()[:12]}"


def compare_names(trained_for: str | None, target: str) -> Check | None:
    """The target that a checkpoint names with the one that is served; different names may be the same model."""
    if not trained_for:
        return None
    ours, theirs = (_plain(name) for name in (target, trained_for))
    alike = ours in theirs or theirs in ours
    other = "" if alike else f"; this target is called {target}, make sure that it is the same"
    return Check("target", True, f"the checkpoint was trained for {trained_for}{other}")


def _plain(name: str) -> str:
    last = name.rstrip("/").split("/")[-1].lower()
    return "".join(c for c in last if c.isalnum())


def compare_layers(drafter: Drafter, target: Decoder) -> list[Check]:
    """Which target states are read, and the rope of either side."""
    drafter = drafter.trained if isinstance(drafter, ChainedDrafter) else drafter
    checks = []
    if drafter.features:
        read = ", ".join(
            "the final one" if j < 0 else f"after layer {j} of {target.config.layers}"
            for j in drafter.features
        )
        checks.append(Check("layers", True, f"reads the target's hidden states: {read}"))
    if isinstance(drafter, EagleDrafter):
        own, base = drafter.net.parts.layer.ropes[0], target.config.ropes[0]
        same = own.base == base.base and own.scaling is base.scaling
        other = "" if same else f" (the target's is {base.base:g}, {base.scaling.value})"
        checks.append(Check("rope", True, f"base {own.base:g}, {own.scaling.value}{other}"))
    return checks


# The self-test's control and its suspects.


class Shuffled:
    """The same drafter with the target's features exchanged between places: what it accepts without reading them."""

    def __init__(self, inner: Drafter) -> None:
        self.inner = inner
        self.kv: KVSpec | None = inner.kv
        self.features: tuple[int, ...] = inner.features

    def bind(self, target: Decoder, kv: KVView | None) -> None:
        """The inner drafter is bound already."""

    def observe(self, rows: PromptRows) -> None:
        """Prompt rows with each other's features."""
        self.inner.observe(replace(rows, features=_shuffle(rows.features)))

    def propose(self, window: Window, shape: Shape) -> Draft:
        """Window rows with each other's features."""
        return self.inner.propose(replace(window, features=_shuffle(window.features)), shape)


def _shuffle(features: Tensor | None) -> Tensor | None:
    if features is None:
        return None
    flat = features.reshape(-1, features.shape[-1])
    # By half of all rows: every row gets another's, in a batch another prompt's.
    return torch.roll(flat, flat.shape[0] // 2, dims=0).view(features.shape)


@dataclass(frozen=True, slots=True)
class Suspect:
    """Another reading of the same weights, not bound yet."""

    cause: str
    remedy: str
    drafter: EagleDrafter


def suspects(drafter: Drafter, target: Decoder) -> list[Suspect]:
    """What could have been read wrongly, each with the drafter it would be if it had been read otherwise."""
    if isinstance(drafter, ChainedDrafter):
        drafter = drafter.trained
    if not isinstance(drafter, EagleDrafter):
        return []
    found = []
    for taps in _other_layers(drafter.features, target.config.layers):
        remedy = f"pass target_layers={list(taps)} (hidden states after so many layers)"
        found.append(Suspect("wrong layers", remedy, drafter.variant(taps=taps)))
    net = drafter.net
    if isinstance(net, Eagle3Net):
        flag = not net.concat.norm_before_residual
        other = copy.copy(net)
        other.concat = replace(net.concat, norm_before_residual=flag)
        remedy = f"pass norm_before_residual={flag}"
        found.append(Suspect("wrong residual", remedy, drafter.variant(net=other)))
    own, theirs = net.parts.layer.ropes[0], target.config.ropes[0]
    if own.base != theirs.base or own.scaling is not theirs.scaling:
        turned = replace(net.parts.layer, ropes=(replace(theirs, dim=own.dim),))
        rope = copy.copy(net)
        rope.parts = replace(net.parts, layer=turned)
        remedy = (
            f"write rope_theta {theirs.base:g} and the target's rope_scaling into its config.json"
        )
        found.append(Suspect("wrong rope base", remedy, drafter.variant(net=rope)))
    return found


def _other_layers(taps: tuple[int, ...], layers: int) -> list[tuple[int, ...]]:
    """Lists of as many layers that are often meant instead: the other convention, and the usual three."""
    if not taps or taps[0] < 0:
        return []
    candidates = [tuple(j + step for j in taps) for step in (1, -1)]
    if len(taps) == 3:
        candidates.append((2, layers // 2, layers - 3))
    kept: list[tuple[int, ...]] = []
    for one in candidates:
        inside = all(0 <= j <= layers for j in one) and len(set(one)) == len(one)
        if inside and one != taps and one not in kept:
            kept.append(one)
    return kept


def find_causes(
    test: SelfTest, tried: Sequence[tuple[Suspect, float]], checks: Sequence[Check]
) -> tuple[str, ...]:
    """What is probably wrong, the likeliest first.

    Args:
        tried: every suspect with its accepted length.
    """
    if test.sound:
        return ()
    better = [
        (length, suspect)
        for suspect, length in tried
        if length >= max(NEARLY_NOTHING, test.accepted_length + 2 * HARDLY_BETTER)
    ]
    better.sort(key=lambda pair: -pair[0])
    causes = [f"{s.cause}: {length:.2f} tokens a step if you {s.remedy}" for length, s in better]
    causes += [f"wrong {c.name}: {c.detail}" for c in checks if not c.holds]
    kinds = test.by_kind
    if len(kinds) > 1 and max(kinds.values()) >= NEARLY_NOTHING > min(kinds.values()):
        bad, good = sorted(kinds, key=lambda kind: kinds[kind])
        causes.append(
            f"wrong template: {kinds[good]:.2f} tokens a step on {good} prompts, {kinds[bad]:.2f} on {bad} prompts"
        )
    if causes:
        return tuple(causes)
    named = next((f" ({c.detail})" for c in checks if c.name == "target"), "")
    return (
        f"wrong target: the drafter was trained for another model or another fine-tune of it{named}; use the drafter "
        "of this very target",
        "wrong template: it was trained on another prompt format, or its training failed; train it for this target",
    )
