"""MLPSpeculator: a small recurrent network on the target's last hidden state drafts (arXiv 2404.19124, section 2).

The state starts as the feature of the position that emitted the pending token; step i mixes in the token decided last,
s <- GELU(LN_i(proj_i(s) + c * emb_i(token))), and head_i(s) predicts the next. It has no KV and keeps nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretell.model.decoder import Decoder
from foretell.spec.candidates import Choice, Scoring, choice_for, fill_levels
from foretell.spec.drafter import Draft, KVSpec, KVView, PromptRows, Window, nothing
from foretell.spec.nodes import Level, Shape
from foretell.spec.tree import Tree
from foretell.spec.verify import Acceptance
from foretell.spec.vocabulary import Vocabulary

EPS = 1e-6


class MlpSpeculator(nn.Module):
    """n heads; a list shorter than n repeats its last entry (tied weights).

    Args:
        heads: n.
        emb: each [V, I].
        proj: each [I, H] or, after the first, [I, I].
        head: each [V, I].
        ln_weight, ln_bias: each [I].
        scale_input: normalise the feature first.
    """

    def __init__(
        self,
        heads: int,
        emb: list[Tensor],
        proj: list[Tensor],
        head: list[Tensor],
        ln_weight: list[Tensor],
        ln_bias: list[Tensor],
        scale_input: bool,
    ) -> None:
        super().__init__()
        self.heads, self.scale_input = heads, scale_input
        self.emb, self.proj, self.head = _parameters(emb), _parameters(proj), _parameters(head)
        self.ln_weight, self.ln_bias = _parameters(ln_weight), _parameters(ln_bias)
        inner = emb[0].shape[1]
        state = 0.5 ** (0.5 / heads)
        self.token_weight = ((1 - state**2) * inner / 2) ** 0.5 / state

    def start(self, feature: Tensor) -> Tensor:
        """[..., H] features → the first state."""
        return _rms(feature) / 2**0.5 if self.scale_input else feature

    def advance(self, state: Tensor, tokens: Tensor, step: int) -> Tensor:
        """[..., H or I] states and the tokens decided last → [..., I]; `step` counts from 0."""
        table = _at(self.emb, step)
        mixed = F.linear(state, _at(self.proj, step))
        mixed = mixed + self.token_weight * F.embedding(tokens.clamp(min=0), table)
        normed = _rms(mixed) * _at(self.ln_weight, step) + _at(self.ln_bias, step)
        return F.gelu(normed)

    def logits(self, state: Tensor, step: int) -> Tensor:
        """[..., I] → [..., V]."""
        return F.linear(state, _at(self.head, step))


def _parameters(tensors: list[Tensor]) -> nn.ParameterList:
    return nn.ParameterList(nn.Parameter(tensor, requires_grad=False) for tensor in tensors)


def _at(tensors: nn.ParameterList, step: int) -> Tensor:
    tensor: Tensor = tensors[min(step, len(tensors) - 1)]
    return tensor


def _rms(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)


class MlpSpeculatorDrafter:
    """Drafts with an MLPSpeculator; see MedusaDrafter for the arguments."""

    kv: KVSpec | None = None
    features: tuple[int, ...] = (-1,)

    def __init__(
        self,
        net: MlpSpeculator,
        vocabulary: Vocabulary,
        acceptance: Acceptance,
        draws: bool = True,
    ) -> None:
        self.net = net
        self.scoring = Scoring(vocabulary, choice_for(acceptance, draws))
        self.draws = self.scoring.choice is Choice.DRAWN

    def check_tree(self, tree: Tree) -> None:
        """Refuse a tree that the heads cannot fill.

        Raises:
            ValueError: the tree is deeper than there are heads.
        """
        if tree.depth > self.net.heads:
            raise ValueError(
                f"tree: depth {tree.depth} is more than the n_predict={self.net.heads} of the MLPSpeculator; give "
                f"num_speculative_tokens={self.net.heads} or less"
            )

    def bind(self, target: Decoder, kv: KVView | None) -> None:
        """Nothing to bind."""

    def observe(self, rows: PromptRows) -> None:
        """Nothing to ingest: the last feature of a prompt comes with its window."""

    def propose(self, window: Window, shape: Shape) -> Draft:
        """One small step per level of the tree."""
        if shape.tree.depth == 0:
            return nothing(window.tokens.shape[0], shape)
        assert window.features is not None, "MLPSpeculator reads the final hidden state"
        assert shape.tree.depth <= self.net.heads, (shape.tree.depth, self.net.heads)
        last = (window.count - 1).clamp(min=0).unsqueeze(1)
        place = last.unsqueeze(-1).expand(-1, 1, window.features.shape[-1])
        feature = self.net.start(window.features.gather(1, place))
        state = self.net.advance(feature, window.tokens.gather(1, last), 0)
        return fill_levels(self.scoring, window, shape, state, _Steps(self.net))


@dataclass(frozen=True, slots=True)
class _Steps:
    """How states go down the tree: nodes of depth d are mixed in by step d, whose head predicts depth d + 1."""

    net: MlpSpeculator

    def logits(self, hidden: Tensor, depth: int) -> Tensor:
        return self.net.logits(hidden, depth - 1)

    def run(self, tokens: Tensor, above: Tensor, level: Level) -> Tensor:
        return self.net.advance(above, tokens, level.depth)
