"""EAGLE heads under training: the served network, unrolled over its own output (EAGLE-3, arXiv 2503.01840, 3.2).

Step 0 runs every row r of a text as the engine runs committed tokens: token r with the feature of token r - 1. Step s
runs what the engine would draft from root r if it drafted the text itself: token r + s, the network's own output of
step s - 1, at rotary position r + s - 1; it sees the step-0 keys up to r and its own keys of the steps 1 to s. All
steps keep the root's index, so features, outputs and keys line up without a shift.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from foretell.model.config import ModelConfig
from foretell.model.decoder import Decoder
from foretell.model.layers import Context, fill_random
from foretell.model.rope import Rope, inverse_frequencies, rotation
from foretell.spec.eagle import Concat, Eagle3Net, Fusion, FusionNet, Parts
from foretell.training.capture import Capture, Captured
from foretell.training.data import Packed
from foretell.training.dense import empty_steps, packed_rows, trainable
from foretell.training.losses import Teacher, head_loss
from foretell.training.recipe import Loss, ahead, roots_ahead
from foretell.training.save import DraftCard, save_eagle, save_eagle3

DECAY = 0.8  # weight of a step against the one before


@dataclass(frozen=True, slots=True)
class EagleSettings:
    """How an EAGLE head is trained.

    Args:
        steps: unrolled steps, the first included.
        decay: weight of each step against the one before.
        hard: share of the target's likeliest token in what is learned; the rest is its whole law.
        feature_loss: weight of the distance to the target's own feature (EAGLE-1).
    """

    steps: int = 7
    decay: float = DECAY
    hard: float = 0.0
    feature_loss: float = 0.0


class EagleRecipe:
    """Trains an Eagle3Net or FusionNet built on dense operations.

    Args:
        target: built on dense operations; gives the embedding, and the head where the network has none.
        taps: target features that it reads.
        vocabulary: [Vd] int64, target id of each of the network's tokens.
        card: what its config says besides.
    """

    def __init__(
        self,
        net: Eagle3Net | FusionNet,
        target: Decoder,
        capture: Capture,
        vocabulary: Tensor,
        settings: EagleSettings,
        card: DraftCard,
    ) -> None:
        self.net, self.target, self.capture = net, target, capture
        self.modules, self.ahead, self.settings, self.card = net, settings.steps, settings, card
        self.vocabulary = vocabulary
        size = target.config.vocab_size
        self._draft_of = torch.full((size,), -1, dtype=torch.int64, device=target.device)
        self._draft_of[vocabulary] = torch.arange(vocabulary.shape[0], device=target.device)
        self._frequencies = inverse_frequencies(net.parts.layer.ropes[0], target.device)
        whole = vocabulary.shape[0] == size
        head = target.head.weight
        self._teacher_head = head if whole else head[vocabulary].contiguous()

    def roots(self, batch: Packed) -> tuple[Tensor, ...]:
        """See Recipe; entry 0 of a document has no feature and is never a root."""
        return tuple(roots_ahead(batch, step + 1, 1) for step in range(self.ahead))

    def loss(self, rows: Tensor, batch: Packed, roots: Sequence[Tensor]) -> Loss:
        """See Recipe."""
        captured = self.capture(rows, batch)
        teacher = self._teacher(captured)
        weight = self.net.head.weight if self.net.head is not None else self._teacher_head
        total = torch.zeros((), device=batch.tokens.device)
        sums, hits = [], []
        for step, hidden in enumerate(self.outputs(batch, captured.features)):
            which = roots[step]
            x = self.net.out(hidden)[which]
            loss, hit = head_loss(x, weight, which + step, teacher, self.net.head is not None)
            part = loss
            if self.settings.feature_loss:
                own = captured.hidden.flatten(0, 1)[which + step]
                part = (
                    part
                    + self.settings.feature_loss
                    * F.smooth_l1_loss(x.float(), own.float(), reduction="none").mean(-1).sum()
                )
            total = total + part * self.settings.decay**step
            sums.append(loss.detach())
            hits.append(hit)
        return Loss(total, torch.stack(sums), torch.stack(hits), tuple(len(r) for r in roots))

    def outputs(self, batch: Packed, features: Tensor) -> list[Tensor]:
        """The network's outputs [B * L, H] before the final norm, at each unrolled step.

        Args:
            features: [B, L, F], of every position.
        """
        config = self.net.parts.layer
        before = torch.cat((torch.zeros_like(features[:, :1]), features[:, :-1]), 1)
        fused = self.net.fuse(before.flatten(0, 1))
        kv = empty_steps(config.layers, config.kv_heads, features.device)
        outputs: list[Tensor] = []
        for step in range(self.ahead):
            if step:
                fused = self.net.feed_back(outputs[-1])
            tokens = ahead(batch.tokens, step).flatten()
            embedded = self.target.ops.embed(tokens, self._embedding(), 1.0).to(fused.dtype)
            positions = batch.places + (step - 1)
            meta = packed_rows(batch.places, batch.documents, positions, first_key=1)
            turn = rotation(config.ropes[0], self._frequencies, meta.positions, fused.dtype)
            mask = self.target.ops.mask(meta, None, 1, config.heads // config.kv_heads, fused.dtype)
            context = Context(meta, meta.kv_slots, turn, mask, None)
            outputs.append(self.net.run(embedded, fused, context, kv))
        return outputs

    def save(self, folder: Path) -> None:
        """See Recipe."""
        if isinstance(self.net, Eagle3Net):
            save_eagle3(folder, self.net, self.vocabulary, self.card)
        else:
            save_eagle(folder, self.net, self.card)

    def _embedding(self) -> Tensor:
        return self.target.embedding if self.net.embedding is None else self.net.embedding

    @torch.no_grad()
    def _teacher(self, captured: Captured) -> Teacher:
        best = self._draft_of[captured.best.flatten()]
        if self.settings.hard >= 1.0:
            return Teacher(best)
        logits = captured.hidden.flatten(0, 1) @ self._teacher_head.t()
        wide = torch.promote_types(logits.dtype, torch.float32)
        law = torch.softmax(logits, -1, dtype=wide).to(logits.dtype)
        return Teacher(best, law, self.settings.hard)


def head_layer(
    target: ModelConfig, layers: int = 1, intermediate: int | None = None
) -> ModelConfig:
    """The shape of a head's layers: the target's own, plain."""
    base = target.ropes[0].base
    return ModelConfig(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=intermediate or target.intermediate_size,
        layers=layers,
        heads=target.heads,
        kv_heads=target.kv_heads,
        head_dim=target.head_dim,
        max_position=target.max_position,
        norm_eps=target.norm_eps,
        ropes=(Rope(dim=target.head_dim, base=base),),
    )


def default_taps(layers: int) -> tuple[int, ...]:
    """The target layers an EAGLE-3 head reads: low, middle, high (as the original's; closer together in small models).

    Raises:
        ValueError: the target has fewer than 3 layers.
    """
    if layers < 3:
        raise ValueError(
            f"an EAGLE-3 head reads three layers and the target has {layers}; train eagle or medusa"
        )
    return (2, layers // 2, layers - 3) if layers >= 7 else (1, (layers + 1) // 2, layers)


def new_eagle3(
    target: Decoder, vocabulary: Tensor, layer: ModelConfig, chunks: int, seed: int
) -> Eagle3Net:
    """A head to be trained, in float32 or wider; its output layer starts as the target's rows of its vocabulary."""
    wide = torch.promote_types(target.dtype, torch.float32)
    parts = Parts(layer, own_embedding=0, own_head=vocabulary.shape[0])
    concat = Concat(chunks=chunks, target_hidden=target.config.hidden_size)
    net = Eagle3Net(parts, concat, wide, target.ops)
    _start(net, target.device, seed)
    assert net.head is not None
    with torch.no_grad():
        net.head.weight.copy_(target.head.weight[vocabulary].to(wide))
    trainable(list(net.parameters()))
    return net


def new_eagle(target: Decoder, layer: ModelConfig, seed: int) -> FusionNet:
    """An EAGLE-1 head to be trained; embedding and head are the target's."""
    wide = torch.promote_types(target.dtype, torch.float32)
    net = FusionNet(Parts(layer, 0, 0), Fusion(), wide, target.ops)
    _start(net, target.device, seed)
    trainable(list(net.parameters()))
    return net


def _start(net: torch.nn.Module, device: torch.device, seed: int) -> None:
    """Weights of a standard deviation of 0.02 at most; norms one, biases zero."""
    fill_random(net, seed, device)
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
            else:
                parameter.mul_(0.02 / max(0.02, float(parameter.std())))


@torch.no_grad()
def calibrate(net: Eagle3Net, features: Tensor) -> None:
    """Scale `fc` so that half of the rows come out of it shorter than 1 (root-mean-square), half longer.

    The residual stream of some targets is a hundred times another's; without this the first steps only learn the scale.

    Args:
        features: [..., F] of some text.
    """
    assert net.fc is not None
    length = net.fuse(features.flatten(0, -2)).float().pow(2).mean(-1).sqrt().median()
    net.fc.weight.div_(length.clamp(min=1e-6))
