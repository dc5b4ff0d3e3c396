"""Medusa: extra heads on the target's last hidden state draft, one per depth (arXiv 2401.10774, section 2.1).

The feature of the position that emitted the pending token (position t; the pending token is t + 1) gives all candidates
of a step: head i predicts token t + 2 + i, the nodes of depth i + 1. No KV and no state. Not where head files are read:
that is checkpoint/medusa.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretell.model.decoder import Decoder
from foretell.ops.table import OpTable
from foretell.spec.candidates import Choice, Scoring, choice_for, fill_depths
from foretell.spec.drafter import Draft, KVSpec, KVView, PromptRows, Window, nothing
from foretell.spec.nodes import Shape
from foretell.spec.tree import Tree
from foretell.spec.verify import Acceptance
from foretell.spec.vocabulary import Vocabulary


class MedusaHeads(nn.Module):
    """K heads of L residual blocks: x + SiLU(W x + b), then an output layer.

    Args:
        weight: [K, L, H, H].
        bias: [K, L, H] or None.
        output: [K, Vm, H], one output layer per head; [1, Vm, H], one for all; None: the target's own.
        scale: multiplies the logits of heads with their own output layer.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None, output: Tensor | None, scale: float = 1.0
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.output = None if output is None else nn.Parameter(output, requires_grad=False)
        self.scale = scale
        self._packed: list[Any] = []  # output layers as a device wants them
        self._linear: Callable[[Tensor, Any], Tensor] | None = None

    def pack(self, ops: OpTable) -> None:
        """Lay out the output layers for a device that wants a layout of its own; a copy replaces the plain weights.

        They are most of what a step reads: five heads of a small model weigh more than the model.
        """
        if self.output is None or self.output.requires_grad or not ops.repacks(self.output[0]):
            return
        if self.output.is_meta:  # packed before
            return
        self._packed = [ops.pack_linear(output, None) for output in self.output]
        self._linear = ops.linear
        self.output = nn.Parameter(self.output.detach().to("meta"), requires_grad=False)

    @property
    def heads(self) -> int:
        """K."""
        return self.weight.shape[0]

    def hidden(self, feature: Tensor, heads: int) -> Tensor:
        """[B, H] features → [heads, B, H] states of the first heads."""
        x = feature.expand(heads, -1, -1)
        for layer in range(self.weight.shape[1]):
            y = torch.bmm(x, self.weight[:heads, layer].transpose(1, 2))
            if self.bias is not None:
                y = y + self.bias[:heads, layer].unsqueeze(1)
            x = x + F.silu(y)
        return x

    def logits(self, feature: Tensor, heads: int, target: Decoder) -> Tensor:
        """[B, H] features → [B, heads, Vm] logits of the first heads."""
        x = self.hidden(feature, heads)
        if self.output is None:
            return target.logits(x.transpose(0, 1))
        if self._linear is not None:
            layers = self._packed * heads if len(self._packed) == 1 else self._packed
            rows = [self._linear(x[i], layers[i]) for i in range(heads)]
            return torch.stack(rows, dim=1) * self.scale
        output = self.output[:heads].expand(heads, -1, -1)
        return torch.bmm(x, output.transpose(1, 2)).transpose(0, 1) * self.scale


class MedusaDrafter:
    """Drafts with Medusa heads.

    Args:
        net: the heads.
        vocabulary: what the heads' tokens are for the target.
        acceptance: under `match` candidates share the target's noise.
        draws: under `rejection` hand over the law of drawn candidates; False takes the likeliest as point masses, as
            Medusa itself does, and needs no memory for laws.
    """

    kv: KVSpec | None = None
    features: tuple[int, ...] = (-1,)

    def __init__(
        self,
        net: MedusaHeads,
        vocabulary: Vocabulary,
        acceptance: Acceptance,
        draws: bool = False,
    ) -> None:
        self.net = net
        self.scoring = Scoring(vocabulary, choice_for(acceptance, draws))
        self.draws = self.scoring.choice is Choice.DRAWN
        self._target: Decoder | None = None

    def check_tree(self, tree: Tree) -> None:
        """Refuse a tree that the heads cannot fill.

        Raises:
            ValueError: the tree is deeper than there are heads.
        """
        if tree.depth > self.net.heads:
            raise ValueError(
                f"tree: depth {tree.depth} needs {tree.depth} Medusa heads, the checkpoint has {self.net.heads}; "
                f"give a tree of depth {self.net.heads} or less"
            )

    def bind(self, target: Decoder, kv: KVView | None) -> None:
        """Receive the target, for its head."""
        self._target = target
        self.net.pack(target.ops)

    def observe(self, rows: PromptRows) -> None:
        """Nothing to ingest: the last feature of a prompt comes with its window."""

    def propose(self, window: Window, shape: Shape) -> Draft:
        """All levels from one feature; every node of a depth takes its candidate from the same head."""
        depth = shape.tree.depth
        if depth == 0:
            return nothing(window.tokens.shape[0], shape)
        assert self._target is not None, "propose before bind"
        assert window.features is not None, "Medusa reads the final hidden state"
        assert depth <= self.net.heads, (depth, self.net.heads)
        last = (window.count - 1).clamp(min=0).view(-1, 1, 1)
        feature = window.features.gather(1, last.expand(-1, 1, window.features.shape[-1]))
        logits = self.net.logits(feature.squeeze(1), depth, self._target)  # [B, D, Vm]
        return fill_depths(self.scoring, window, shape, logits)
