"""Acceptance of a tree whose nodes are matched against samples, the commit, and moves of KV rows, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foretell.ops.meta import LayerKV, SlotArrays, flat_slots

RUNNING, STOPPED, FULL, BROKEN = 0, 1, 2, 3  # why a request ended in a step


@dataclass(frozen=True, slots=True)
class Drafted:
    """The nodes under verification and the target's samples after them."""

    tokens: Tensor  # [B, N] int64, -1 matches nothing
    sample: Tensor  # [B, N] int64, -1 where logits were not finite
    parents: Tensor  # [B or 1, N] int64, the root's is 0
    depths: Tensor  # [B or 1, N] int64
    bits: Tensor  # [B or 1, N] int64, ancestors and self
    depth: int  # D, greatest depth


@dataclass(frozen=True, slots=True)
class Decision:
    """What was decided, besides what was written into the slots."""

    path: Tensor  # [B, D + 1] int64, accepted nodes; repeats the last one below its depth
    tokens: Tensor  # [B, D + 1] int64, emitted tokens; junk at and after `count`
    count: Tensor  # [B] int64, tokens committed; 0 for rows that were not live
    reason: Tensor  # [B] int64: RUNNING, STOPPED, FULL or BROKEN
    drafted: Tensor  # [B] int64, draft tokens verified
    accepted: Tensor  # [B] int64, how many of the committed tokens were drafted
    start: Tensor  # [B] int64, length before the commit
    moves: (
        tuple[Tensor, Tensor] | None
    )  # [B, D + 1] int64, flat KV slots from and to; equal where nothing moves


def decide(
    drafted: Drafted, slots: SlotArrays, rows: Tensor, block_size: int, moves: bool
) -> Decision:
    """Accept the nodes that match the samples, and commit.

    Args:
        rows: [B] int64, slot of each request; a slot may be named twice only if it is not live.
        block_size: entries of a KV block.
        moves: whether accepted nodes may stand where they do not belong (a tree that is no chain).
    """
    shape = (drafted.parents, drafted.depths, drafted.bits)
    best = accept_match(drafted.tokens, drafted.sample, *shape)
    path = path_to(best, drafted.parents, drafted.depths, drafted.depth)
    found = drafted.depths.expand_as(drafted.sample).gather(1, best.unsqueeze(1)).squeeze(1) + 1
    emitted = drafted.sample.gather(1, path)
    return settle(path, emitted, found, drafted.tokens, slots, rows, block_size, moves)


def settle(
    path: Tensor,
    tokens: Tensor,
    found: Tensor,
    drafted: Tensor,
    slots: SlotArrays,
    rows: Tensor,
    block_size: int,
    moves: bool,
) -> Decision:
    """Commit what an accept rule emits: cut at the first stop token, then at the limit, in front of a NaN.

    A stop inside the limit is a stop, even on the limit's last place.

    Args:
        path: [B, D + 1] int64, accepted nodes.
        tokens: [B, D + 1] int64, emitted tokens, -1 = logits were not finite; junk at and after `found`.
        found: [B] int64, how many are emitted.
        drafted: [B, N] int64, tokens of the nodes.
    """
    live = slots.live[rows]
    place = torch.arange(tokens.shape[1], device=tokens.device)
    stops = (tokens.unsqueeze(-1) == slots.stop[rows].unsqueeze(1)).any(-1) & (tokens >= 0)
    start = slots.length[rows]
    first_stop = _first(stops)
    sound = _first((tokens < 0) & (place < found.unsqueeze(1)))
    limit = slots.limit[rows]
    count = torch.minimum(torch.minimum(found, first_stop + 1), torch.minimum(limit - start, sound))
    count = torch.where(live, count.clamp(min=0), 0)
    full = start + count >= limit
    reason = torch.where(first_stop < count, STOPPED, torch.where(full, FULL, RUNNING))
    broken = (reason == RUNNING) & (sound <= count) & (sound < found)
    reason = torch.where(broken, BROKEN, reason)
    reason = torch.where(live, reason, RUNNING)
    trash = slots.tokens.shape[1] - 1
    index = torch.where(place < count.unsqueeze(1), start.unsqueeze(1) + place, trash)
    slots.tokens[rows.unsqueeze(1), index] = tokens.to(torch.int32)
    slots.length[rows] = start + count
    slots.live[rows] = live & (reason == RUNNING)
    return Decision(
        path=path,
        tokens=tokens,
        count=count,
        reason=reason,
        drafted=torch.where(count > 0, (drafted[:, 1:] >= 0).sum(-1), 0),
        accepted=torch.minimum(count, found - 1),
        start=start,
        moves=_moves(path, count, start, slots.blocks[rows], block_size) if moves else None,
    )


def keep_features(
    features: Tensor, path: Tensor, count: Tensor, rows: Tensor, feature: Tensor
) -> Tensor:
    """Features along the accepted path; that of the last committed token also goes to the slots.

    Args:
        features: [B, N, F].
        path, count: as in `Decision`.
        rows: [B] int64 slots.
        feature: [S, F], written.

    Returns:
        [B, D + 1, F].
    """
    kept = features.gather(1, path.unsqueeze(-1).expand(-1, -1, features.shape[-1]))
    feature[rows] = last_rows(kept, count).squeeze(1)
    return kept


def last_rows(x: Tensor, count: Tensor) -> Tensor:
    """[B, W, H] → [B, 1, H]: row `count - 1` of each request, the first where there is none."""
    last = (count - 1).clamp(min=0).view(-1, 1, 1).expand(-1, 1, x.shape[-1])
    return x.gather(1, last)


def _first(flags: Tensor) -> Tensor:
    """[B] index of the first True in [B, W], or W."""
    width = flags.shape[1]
    place = torch.arange(width, device=flags.device)
    return torch.where(flags, place, width).amin(-1)


def _moves(
    path: Tensor, count: Tensor, start: Tensor, blocks: Tensor, block_size: int
) -> tuple[Tensor, Tensor]:
    """KV of path[j] goes to place j; only the nodes of emitted drafts matter."""
    place = torch.arange(path.shape[1], device=path.device).expand_as(path)
    moving = (place > 0) & (place < count.unsqueeze(1)) & (path != place)
    root = start.unsqueeze(1) - 1
    source = flat_slots(blocks, root + path, block_size, moving)
    return source, flat_slots(blocks, root + place, block_size, moving)


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


def kv_pages(layers: Sequence[LayerKV]) -> tuple[LayerKV, ...]:
    """What `move_kv` works on; made once, when the memory is there."""
    return tuple(layers)


def move_kv(pages: Sequence[LayerKV], source: Tensor, target: Tensor) -> None:
    """Copy KV rows from one flat slot to another in every layer; all reads come before all writes.

    Args:
        pages: what `kv_pages` returned for the layers to move.
        source, target: int64 flat slots (`block * block_size + offset`), of one shape; to move nothing, point both at
            slot 0.
    """
    source, target = source.flatten(), target.flatten()
    for layer in pages:
        for page in (layer.k, layer.v):
            rows = page.view(-1, *page.shape[2:])
            rows.index_copy_(0, target, rows.index_select(0, source))
