"""Runs a Decoder over paged KV the plain way: whole prompts, chunks, single tokens, trees."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from foretell.model.decoder import Decoder
from foretell.ops.meta import LayerKV, RaggedRows, TreeRows, flat_slots


class Paged:
    """One request's KV, in blocks that are neither in order nor next to each other."""

    def __init__(self, model: Decoder, length: int = 96, block_size: int = 4) -> None:
        layers, heads, dim = model.kv_shape
        count = -(-length // block_size)
        order = torch.randperm(count, generator=torch.Generator().manual_seed(7)) + 1
        self.model, self.block_size = model, block_size
        self.blocks = order.to(torch.int32).unsqueeze(0)  # [1, M]
        shape = (count + 1, block_size, heads, dim)
        self.kv = [
            LayerKV(torch.zeros(shape, dtype=model.dtype), torch.zeros(shape, dtype=model.dtype))
            for _ in range(layers)
        ]

    def slots(self, indices: Tensor) -> Tensor:
        """[1, N] key indices → [1, N] flat places."""
        return flat_slots(self.blocks, indices, self.block_size, torch.ones_like(indices) > 0)

    @torch.inference_mode()
    def chunk(self, tokens: Tensor, start: int) -> Tensor:
        """Prompt rows [n] from position `start`; returns their logits [n, V]."""
        positions = torch.arange(start, start + len(tokens))
        meta = RaggedRows(
            positions=positions,
            kv_slots=self.slots(positions.unsqueeze(0))[0],
            blocks=self.blocks,
            starts=torch.tensor([start]),
            offsets=torch.tensor([0, len(tokens)]),
            lengths=((start, len(tokens)),),
        )
        hidden, _ = self.model(tokens, meta, self.kv)
        return self.model.logits(hidden)

    @torch.inference_mode()
    def tree(self, tokens: Tensor, parents: Sequence[int], start: int) -> Tensor:
        """Nodes [N] whose root stands at position `start`; returns their logits [N, V]."""
        depths, bits = [], []
        for node, parent in enumerate(parents):
            depths.append(0 if parent < 0 else depths[parent] + 1)
            bits.append((0 if parent < 0 else bits[parent]) | 1 << node)
        positions = (start + torch.tensor(depths)).unsqueeze(0)
        indices = torch.arange(start, start + len(parents)).unsqueeze(0)
        meta = TreeRows(
            positions=positions,
            kv_slots=self.slots(indices),
            blocks=self.blocks,
            context=torch.tensor([start]),
            bits=torch.tensor([bits]),
            tail_positions=positions,
            keys=start + len(parents),
        )
        hidden, _ = self.model(tokens.unsqueeze(0), meta, self.kv)
        return self.model.logits(hidden)[0]
