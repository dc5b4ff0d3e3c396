"""Medusa heads under training: head i reads the target's final hidden state at t and learns token t + 2 + i.

The served heads themselves (`spec/medusa.py`), with the target's own output layer for all (frozen) or one for each head
(Medusa-1, arXiv 2401.10774, section 2.2.1). Rows are those whose token t + 2 + i is the assistant's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from foretell.model.decoder import Decoder
from foretell.spec.medusa import MedusaHeads
from foretell.training.capture import Capture
from foretell.training.data import Packed
from foretell.training.dense import trainable
from foretell.training.losses import Teacher, head_loss
from foretell.training.recipe import Loss, roots_ahead
from foretell.training.save import DraftCard, save_medusa


@dataclass(frozen=True, slots=True)
class MedusaSettings:
    """How heads are trained.

    Args:
        heads, layers: K, and residual blocks in each.
        own_output: an output layer for each head, which starts as the target's; else the target's for all.
        decay: weight of each head against the one before.
    """

    heads: int = 4
    layers: int = 1
    own_output: bool = False
    decay: float = 0.8


def new_heads(target: Decoder, settings: MedusaSettings) -> MedusaHeads:
    """Heads that say what the target's own head says: blocks start at zero."""
    wide = torch.promote_types(target.dtype, torch.float32)
    hidden = target.config.hidden_size
    shape = (settings.heads, settings.layers, hidden)
    weight = torch.zeros(*shape, hidden, dtype=wide, device=target.device)
    bias = torch.zeros(shape, dtype=wide, device=target.device)
    output = None
    if settings.own_output:
        output = target.head.weight.detach().to(wide).repeat(settings.heads, 1, 1)
    net = MedusaHeads(weight, bias, output)
    trainable(list(net.parameters()))
    return net


class MedusaRecipe:
    """Trains MedusaHeads.

    Args:
        target: built on DENSE.
        capture: without taps: the final hidden state is all that is read.
    """

    def __init__(
        self,
        net: MedusaHeads,
        target: Decoder,
        capture: Capture,
        settings: MedusaSettings,
        card: DraftCard,
    ) -> None:
        self.net, self.target, self.capture = net, target, capture
        self.modules, self.ahead, self.settings, self.card = net, net.heads, settings, card

    def roots(self, batch: Packed) -> tuple[Tensor, ...]:
        """See Recipe."""
        return tuple(roots_ahead(batch, head + 2, 0) for head in range(self.ahead))

    def loss(self, rows: Tensor, batch: Packed, roots: Sequence[Tensor]) -> Loss:
        """See Recipe."""
        captured = self.capture(rows, batch)
        flat = captured.hidden.flatten(0, 1)
        teacher = Teacher(captured.best.flatten())
        total = torch.zeros((), device=flat.device)
        sums, hits = [], []
        for head, which in enumerate(roots):
            output = self.target.head.weight if self.net.output is None else self.net.output[head]
            learn = self.net.output is not None
            loss, hit = head_loss(
                self.state(flat[which], head), output, which + head + 1, teacher, learn
            )
            total = total + loss * self.settings.decay**head
            sums.append(loss.detach())
            hits.append(hit)
        return Loss(total, torch.stack(sums), torch.stack(hits), tuple(len(r) for r in roots))

    def state(self, feature: Tensor, head: int) -> Tensor:
        """[R, H] → [R, H], what one head hands to its output layer; as MedusaHeads.hidden, for one head."""
        x = feature
        for layer in range(self.net.weight.shape[1]):
            y = x @ self.net.weight[head, layer].to(x.dtype).t()
            if self.net.bias is not None:
                y = y + self.net.bias[head, layer].to(x.dtype)
            x = x + torch.nn.functional.silu(y)
        return x

    def save(self, folder: Path) -> None:
        """See Recipe."""
        save_medusa(folder, self.net, self.card)
