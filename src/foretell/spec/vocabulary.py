"""Drafter and target with different vocabularies: tokens correspond where their strings are equal.

The draft model reads the target's text through `to_draft` and proposes only tokens that the target has too
(token-level intersection, arXiv 2502.05202, section 4). What the target writes outside the intersection reaches the
draft as its unknown token: that costs acceptance, never correctness, since the target checks every token.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

log = logging.getLogger("foretell")

LEAST_OVERLAP = (
    0.1  # share of the draft's tokens that the target must know for drafting to make sense
)


class Tokenizer(Protocol):
    """The part of a fast tokenizer of transformers that is read here."""

    bos_token_id: int | None
    eos_token_id: int | None
    unk_token_id: int | None
    pad_token_id: int | None

    def get_vocab(self) -> dict[str, int]:
        """Token strings and their ids, added tokens included."""
        ...


class Vocabulary:
    """The correspondence, as tensors.

    Args:
        draft_of: [V] int64, draft id of each target id; the draft's unknown token where there is none.
        target_of: [Vd] int64, target id of each draft id; -1 where there is none.
        target_size: V, width of the target's logits.
    """

    def __init__(self, draft_of: Tensor, target_of: Tensor, target_size: int) -> None:
        self.target_size = target_size
        self._draft_of = draft_of
        self._target_of = target_of
        self._shared = target_of >= 0
        self._whole = bool(self._shared.all())
        identity = torch.arange(target_of.shape[0], device=target_of.device)
        self._identical = bool((target_of == identity).all()) and target_of.shape[0] == target_size
        self.noise_ids = torch.where(self._shared, target_of, 0).to(torch.int32)

    @property
    def target_ids(self) -> Tensor | None:
        """[Vd] int64, target id of each draft id, -1 where there is none; None: the same ids."""
        return None if self._identical else self._target_of

    @property
    def reduced(self) -> int:
        """Tokens that can be proposed; 0 = all of the target's."""
        shared = int(self._shared.sum())
        return shared if shared < self.target_size else 0

    def to_draft(self, tokens: Tensor) -> Tensor:
        """Draft ids of target ids of any shape; -1 (padding) stays -1."""
        if self._identical:
            return tokens
        return torch.where(tokens >= 0, self._draft_of[tokens.clamp(min=0)], -1)

    def to_target(self, tokens: Tensor) -> Tensor:
        """Target ids of draft ids of any shape; -1 where the target has no such token."""
        return tokens if self._identical else self._target_of[tokens]

    def mask(self, logits: Tensor) -> Tensor:
        """[..., Vd] draft logits with -inf on tokens that the target lacks."""
        return logits if self._whole else torch.where(self._shared, logits, -torch.inf)

    def law_over_target(self, probs: Tensor) -> Tensor:
        """[..., Vd] draft probabilities as [..., V] over target ids."""
        if self._identical:
            return probs
        result = probs.new_zeros(*probs.shape[:-1], self.target_size)
        index = self._target_of.clamp(min=0).expand_as(probs)
        return result.scatter_add(-1, index, torch.where(self._shared, probs, 0))


def same(target_size: int, draft_size: int, tokens: int, device: torch.device) -> Vocabulary:
    """The same tokenizer on both sides; the model widths may differ by padding.

    Args:
        target_size, draft_size: widths of the logits.
        tokens: how many ids the tokenizer really has; ids from there on are padding and never proposed.
    """
    shared = min(target_size, draft_size, max(tokens, 1))
    if target_size == draft_size:
        shared = target_size
    draft_of = torch.arange(target_size, device=device)
    draft_of = torch.where(draft_of < min(target_size, draft_size), draft_of, 0)
    target_of = torch.arange(draft_size, device=device)
    return Vocabulary(draft_of, torch.where(target_of < shared, target_of, -1), target_size)


def intersect(
    target: Sequence[str | None],
    draft: Sequence[str | None],
    sizes: tuple[int, int],
    unknown: int,
    device: torch.device,
) -> Vocabulary:
    """Tokens with equal strings on both sides.

    Args:
        target, draft: string of each id as the tokenizers spell them after normalisation; None for unused ids.
        sizes: (V, Vd), widths of the logits.
        unknown: draft id that stands for target tokens the draft lacks.
    """
    by_string = {string: token for token, string in enumerate(draft) if string is not None}
    draft_of = torch.full((sizes[0],), unknown, dtype=torch.int64)
    target_of = torch.full((sizes[1],), -1, dtype=torch.int64)
    for token, string in enumerate(target):
        other = by_string.get(string) if string is not None else None
        if other is not None and other < sizes[1] and token < sizes[0]:
            draft_of[token] = other
            if target_of[other] < 0:
                target_of[other] = token
    return Vocabulary(draft_of.to(device), target_of.to(device), sizes[0])


def pair_vocabularies(
    target: Tokenizer,
    draft: Tokenizer,
    sizes: tuple[int, int],
    heterogeneous: bool | None,
    device: torch.device,
) -> Vocabulary:
    """How a draft model's tokens correspond to the target's.

    Equal tokenizers need no map, whatever padding the models add. Different ones are paired by their strings, with
    the beginning and the end of text paired by their role.

    Args:
        sizes: (V, Vd), widths of the logits.
        heterogeneous: True pairs by strings, False refuses different vocabularies, None decides by looking.

    Raises:
        ValueError: the tokenizers differ and `heterogeneous` is False, or share too little to draft with.
    """
    ours, theirs = _by_id(target), _by_id(draft)
    differs = _first_difference(ours, theirs)
    if differs is None and not heterogeneous:
        _warn_about_ends(target, draft)
        return same(*sizes, min(len(ours), len(theirs)), device)
    if heterogeneous is False:
        raise ValueError(
            "Target and draft model should have the same vocabulary size. Target model vocab_size="
            f"{sizes[0]}. Draft model vocab_size={sizes[1]}. {_describe(differs, ours, theirs)} Pass "
            "use_heterogeneous_vocab=True to draft through the tokens that both have."
        )
    pair = intersect(
        _with_roles(_canonical(ours), target),
        _with_roles(_canonical(theirs), draft),
        sizes,
        _unknown(draft),
        device,
    )
    share = float((pair.noise_ids > 0).float().mean())
    if share < LEAST_OVERLAP:
        raise ValueError(
            f"the draft model shares only {share:.1%} of its tokens with the target, too few to draft with; "
            f"{_describe(differs, ours, theirs)} Use a draft model of the target's family"
        )
    log.info("draft vocabulary: %.1f%% of its tokens are the target's too", 100 * share)
    return pair


def _by_id(tokenizer: Tokenizer) -> list[str | None]:
    vocab = tokenizer.get_vocab()
    strings: list[str | None] = [None] * (max(vocab.values(), default=-1) + 1)
    for string, token in vocab.items():
        strings[token] = string
    return strings


def _first_difference(ours: Sequence[str | None], theirs: Sequence[str | None]) -> int | None:
    """The first id that both use and spell differently."""
    for token, (one, other) in enumerate(zip(ours, theirs, strict=False)):
        if one != other and one is not None and other is not None:
            return token
    return None


def _describe(differs: int | None, ours: Sequence[str | None], theirs: Sequence[str | None]) -> str:
    if differs is None:
        return ""
    return f"Token id {differs} is {ours[differs]!r} in the target and {theirs[differs]!r} in the draft."


def _warn_about_ends(target: Tokenizer, draft: Tokenizer) -> None:
    for role in ("bos_token_id", "eos_token_id"):
        one, other = getattr(target, role), getattr(draft, role)
        if one != other:
            log.warning("%s is %s in the target and %s in the draft model", role, one, other)


def _canonical(strings: Sequence[str | None]) -> list[str | None]:
    """Spellings brought to one form: a word's leading space is a space, in byte-level and SentencePiece alike."""
    byte_level = sum(s.startswith("Ġ") for s in strings if s) > sum(
        s.startswith("▁") for s in strings if s
    )
    table = _byte_level_alphabet()
    result: list[str | None] = []
    for string in strings:
        if string is None:
            result.append(None)
        elif byte_level and all(c in table for c in string):
            result.append(bytes(table[c] for c in string).decode("latin-1"))
        elif len(string) == 6 and string.startswith("<0x") and string.endswith(">"):
            result.append(bytes([int(string[3:5], 16)]).decode("latin-1"))
        else:
            result.append(string.replace("▁", " ").encode().decode("latin-1"))
    return result


def _byte_level_alphabet() -> dict[str, int]:
    """Which byte each character of a byte-level vocabulary stands for (GPT-2's printable alphabet)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(byte): byte for byte in plain}
    others = [byte for byte in range(256) if byte not in set(plain)]
    table.update({chr(256 + place): byte for place, byte in enumerate(others)})
    return table


def _with_roles(strings: list[str | None], tokenizer: Tokenizer) -> list[str | None]:
    """Beginning and end of text get names by role, so that they pair whatever they are called."""
    for role, token in (("bos", tokenizer.bos_token_id), ("eos", tokenizer.eos_token_id)):
        if token is not None and token < len(strings):
            strings[token] = f"\0{role}"
    return strings


def _unknown(tokenizer: Tokenizer) -> int:
    for token in (tokenizer.unk_token_id, tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token is not None:
            return token
    return 0
