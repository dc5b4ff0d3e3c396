"""Acceptance of a tree whose nodes are matched against samples, and moves of accepted KV rows, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from foretell.ops.meta import LayerKV


def accept_match(
    draft: Tensor, sample: Tensor, parents: Tensor, depths: Tensor, bits: Tensor
) -> Tensor:
    """The deepest node all of whose edges are good; an edge is good iff the drafted token is the parent's sample.

    Args:
        draft: [B, N] int64, tokens of the nodes; node 0 is the root, -1 matches nothing.
        sample: [B, N] int64, the target's own sample after each node (-1 where its logits were not finite).
        parents, depths, bits: [B or 1, N] int64, the tree (see `foretell.spec.nodes.Shape`).

    Returns:
        [B] int64, the accepted node; 0 where nothing was accepted. Of equally deep nodes the first.
    """
    good = (draft == sample.gather(1, parents.expand_as(draft))) & (draft >= 0)
    good[:, 0] = True
    place = torch.arange(draft.shape[1], device=draft.device)
    good_bits = (good.to(torch.int64) << place).sum(-1, keepdim=True)
    accepted = (bits & ~good_bits) == 0
    return torch.where(accepted, depths, -1).argmax(-1)


def path_to(node: Tensor, parents: Tensor, depths: Tensor, depth: int) -> Tensor:
    """The nodes from the root to `node`.

    Args:
        node: [B] int64.
        parents, depths: [B or 1, N] int64.
        depth: D, the greatest depth of the tree.

    Returns:
        [B, D + 1] int64; entry d is the path's node of depth d, and `node` itself below its own depth.
    """
    rows = node.shape[0]
    parents = parents.expand(rows, -1)
    depths = depths.expand(rows, -1)
    current = node.unsqueeze(1)
    path = [current] * (depth + 1)
    for d in range(depth, 0, -1):
        path[d] = current
        deeper = depths.gather(1, current) >= d
        current = torch.where(deeper, parents.gather(1, current), current)
    path[0] = current
    return torch.cat(path, dim=1)


def move_kv(layers: Sequence[LayerKV], source: Tensor, target: Tensor) -> None:
    """Copy KV rows from one flat slot to another in every layer; all reads come before all writes.

    Args:
        layers: paged KV of the layers to move.
        source, target: [R] int64 flat slots (`block * block_size + offset`); to move nothing, point both at slot 0.
    """
    for layer in layers:
        for pages in (layer.k, layer.v):
            rows = pages.view(-1, *pages.shape[2:])
            rows.index_copy_(0, target, rows.index_select(0, source))
