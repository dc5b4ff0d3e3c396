"""The decoder: one for all families, whose differences are data in ModelConfig.

A forward pass writes the keys and values of its rows into the paged KV and attends as `meta` says. It knows rows, not
requests; it keeps nothing between calls and never waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor, nn

from foretell.model.config import ModelConfig
from foretell.model.layers import (
    Build,
    Context,
    Layer,
    Linear,
    RMSNorm,
    at_hand,
    embed,
    fill_random,
)
from foretell.model.rope import inverse_frequencies, rotation
from foretell.model.shard import part_of
from foretell.ops.group import ALONE, Group, rows_of
from foretell.ops.meta import LayerKV, Meta
from foretell.ops.table import OpTable, table_for


class Decoder(nn.Module):
    """A decoder-only language model. It is born empty: `load.load_model` or `Decoder.random` fill it.

    Args:
        config: of the whole model.
        group: the ranks that it is split over; this is one rank's part.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        ops: OpTable,
        group: Group = ALONE,
    ) -> None:
        super().__init__()
        self.config, self.dtype, self.device, self.ops = config, dtype, device, ops
        self.part, self.rows = part_of(config, group), rows_of(config.vocab_size, group)
        build = Build(ops, dtype, group)
        self.embedding = build.parameter(self.rows.count, config.hidden_size)
        self.layers = nn.ModuleList(Layer(build, self.part) for _ in range(config.layers))
        self.norm = RMSNorm(build, config.hidden_size, config.norm_eps)
        self.head = Linear(build, config.hidden_size, self.rows.count, bias=False)
        at_hand(self)
        self.frequencies = tuple(inverse_frequencies(rope, device) for rope in config.ropes)

    @classmethod
    def random(
        cls,
        config: ModelConfig,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        ops: OpTable | None = None,
    ) -> Self:
        """A model with random weights, the same for the same seed on every device."""
        device = torch.device(device)
        model = cls(config, dtype, device, ops or table_for(device))
        fill_random(model, seed, device)
        if config.tied:
            model.tie()
        return model

    @property
    def kv_shape(self) -> tuple[int, int, int]:
        """(layers, KV heads of this rank, head dimension)."""
        return self.part.layers, self.part.kv_heads, self.part.head_dim

    def feature_width(self, taps: tuple[int, ...]) -> int:
        """F, the width of the features of these taps."""
        return len(taps) * self.config.hidden_size

    def tie(self) -> None:
        """Make the head of the embedding; call once the embedding is filled."""
        self.head.weight = self.embedding
        self.head.pack()

    def forward(
        self, tokens: Tensor, meta: Meta, kv: Sequence[LayerKV], taps: tuple[int, ...] = ()
    ) -> tuple[Tensor, Tensor | None]:
        """Run rows through the model.

        Args:
            tokens: [B, N] int64 with TreeRows, [R] with RaggedRows; -1 is padding.
            kv: one entry per layer; rows are written at `meta.kv_slots`.
            taps: features wanted: -1 is the final hidden state; j >= 0 the residual stream after j layers, not normed.

        Returns:
            [..., H] hidden states after the final norm, and the taps side by side [..., F] (None without taps).
        """
        x = self.embed(tokens.flatten(), self.config.embedding_scale)  # [R, H]
        contexts = self._contexts(meta, kv)
        tapped: dict[int, Tensor] = {}
        for i, layer in enumerate(self.layers):
            if i in taps:
                tapped[i] = x.clone()  # the residual stream may be added to in place
            x = layer.forward(x, contexts[i], kv[i])
        tapped[len(self.layers)] = x
        hidden = tapped[-1] = self.norm.forward(x)
        shape = (*tokens.shape, -1)
        features = torch.cat([tapped[tap] for tap in taps], dim=-1).view(shape) if taps else None
        return hidden.view(shape), features

    def embed(self, tokens: Tensor, scale: float = 1.0) -> Tensor:
        """[R] tokens → [R, H] embeddings; -1 is padding."""
        return embed(self.ops, tokens, self.embedding, scale, self.rows)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., H] hidden states after the final norm → [..., V] logits in the model's dtype, on every rank."""
        return self.rows.join(self.own_logits(hidden))

    def own_logits(self, hidden: Tensor) -> Tensor:
        """[..., H] → [..., rows.count], the logits of this rank's tokens."""
        flat = hidden.reshape(-1, hidden.shape[-1])
        out = self.head.forward(flat)
        if self.config.logit_scale != 1.0:
            out = out * self.config.logit_scale
        cap = self.config.logits_softcap
        if cap is not None:
            out = cap * torch.tanh(out / cap)
        return out.view(*hidden.shape[:-1], -1)

    def _contexts(self, meta: Meta, kv: Sequence[LayerKV]) -> list[Context]:
        """What each layer must know; layers of the same window and rope share theirs."""
        config = self.part
        group, block_size = config.heads // config.kv_heads, kv[0].k.shape[1]
        positions, kv_slots = meta.positions.flatten(), meta.kv_slots.flatten()
        masks = {
            w: self.ops.mask(meta, w, block_size, group, self.dtype) for w in set(config.windows)
        }
        rotations = [
            rotation(rope, frequencies, positions, self.dtype, self.ops)
            for rope, frequencies in zip(config.ropes, self.frequencies, strict=True)
        ]
        kinds = tuple(zip(config.windows, config.layer_ropes, strict=True))
        contexts = {
            (window, rope): Context(meta, kv_slots, rotations[rope], masks[window], window)
            for window, rope in set(kinds)
        }
        return [contexts[kind] for kind in kinds]
