"""Acceptance, commit and KV moves as kernels: `ops/reference/verify` and what a step does with its verdict.

`decide` is one launch per step: from the target's samples to the accepted path, the tokens written and the slots moved
on. One program per request; every array it writes is indexed by the request's own slot, and rows that are not live
write nothing but what was there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from foretell.ops.meta import LayerKV, SlotArrays
from foretell.ops.reference.verify import Decision, Drafted
from foretell.ops.triton import launch
from foretell.ops.triton.device import ceil_div, dense_rows, power_of_two


@dataclass(frozen=True, slots=True)
class KVPointers:
    """Where the pages of many layers are, for a kernel that visits them all. Make it once, outside any capture."""

    addresses: Tensor  # [2 * layers] int64
    width: int  # 16-bit words of a row
    layers: tuple[LayerKV, ...]  # keeps the memory alive


def kv_pages(layers: Sequence[LayerKV]) -> KVPointers:
    """The addresses of equally shaped layers."""
    first = layers[0].k
    pages = [page for layer in layers for page in (layer.k, layer.v)]
    assert all(page.shape == first.shape and page.is_contiguous() for page in pages)
    addresses = torch.tensor([page.data_ptr() for page in pages], dtype=torch.int64)
    width = first.shape[2] * first.shape[3] * first.element_size() // 2
    return KVPointers(addresses.to(first.device), width, tuple(layers))


def accept_match(
    draft: Tensor, sample: Tensor, parents: Tensor, depths: Tensor, bits: Tensor
) -> Tensor:
    """The deepest node all of whose edges are good; see the reference.

    Args:
        draft, sample: [B, N] int64.
        parents, depths, bits: [B or 1, N] int64.

    Returns:
        [B] int64.
    """
    rows, nodes = draft.shape
    best = torch.empty(rows, dtype=torch.int64, device=draft.device)
    if rows:
        shape = [dense_rows(t) for t in (parents, depths, bits)]
        _accept_kernel[(rows,)](
            draft.contiguous(), sample.contiguous(), *shape, best,
            *(_row_stride(t) for t in shape), nodes, NODES=power_of_two(nodes), num_warps=1,
            **launch.options(draft.device),
        )  # fmt: skip
    return best


def decide(
    drafted: Drafted, slots: SlotArrays, rows: Tensor, block_size: int, moves: bool
) -> Decision:
    """Accept, commit, and say which KV rows must move; see the reference."""
    count, nodes = drafted.tokens.shape
    width = drafted.depth + 1
    shape = [dense_rows(t) for t in (drafted.parents, drafted.depths, drafted.bits)]
    wide = torch.empty(4, count, width, dtype=torch.int64, device=rows.device)
    narrow = torch.empty(5, count, dtype=torch.int64, device=rows.device)
    if count:
        _decide_kernel[(count,)](
            drafted.tokens.contiguous(), drafted.sample.contiguous(), *shape,
            rows, slots.tokens, slots.length, slots.limit, slots.live.view(torch.uint8),
            slots.stop, slots.blocks, wide, narrow,
            *(_row_stride(t) for t in shape), slots.tokens.stride(0), slots.stop.stride(0),
            slots.blocks.stride(0), count, nodes, width, slots.stop.shape[1],
            NODES=power_of_two(nodes), WIDTH=power_of_two(width),
            STOPS=power_of_two(slots.stop.shape[1]), BLOCK_SIZE=block_size, num_warps=1,
            **launch.options(rows.device),
        )  # fmt: skip
    path, tokens, source, target = wide.unbind()
    committed, reason, proposed, accepted, start = narrow.unbind()
    return Decision(
        path=path, tokens=tokens, count=committed, reason=reason, drafted=proposed,
        accepted=accepted, start=start, moves=(source, target) if moves else None,
    )  # fmt: skip


def keep_features(
    features: Tensor, path: Tensor, count: Tensor, rows: Tensor, feature: Tensor
) -> Tensor:
    """Features along the accepted path; that of the last committed token also goes to the slots. See the reference."""
    requests, width = path.shape
    size = features.shape[-1]
    out = torch.empty(requests, width, size, dtype=features.dtype, device=features.device)
    block = min(2048, power_of_two(size))
    if requests:
        features = features.contiguous()
        _feature_kernel[(requests, width, ceil_div(size, block))](
            features, path.contiguous(), count.contiguous(), rows, feature, out,
            features.stride(0), feature.stride(0), width, size, BLOCK=block,
            **launch.options(features.device),
        )  # fmt: skip
    return out


def move_kv(pages: KVPointers, source: Tensor, target: Tensor) -> None:
    """Copy KV rows from one flat slot to another in every layer; one launch.

    Args:
        source, target: [B, W] int64 flat slots, W <= 64; of one request all reads come before all writes, and no
            request's slots are another's. Where both are equal nothing is moved.
    """
    rows, width = source.shape
    if rows == 0:
        return
    moves = power_of_two(width)
    block = max(16, min(power_of_two(pages.width), 8192 // moves))
    _move_kernel[(rows, pages.addresses.shape[0], ceil_div(pages.width, block))](
        pages.addresses, source.contiguous(), target.contiguous(), width, pages.width,
        MOVES=moves, BLOCK=block,
        **launch.options(source.device),
    )  # fmt: skip


def _row_stride(x: Tensor) -> int:
    """0 where one row stands for all."""
    return 0 if x.shape[0] == 1 else x.stride(0)


@triton.jit
@no_type_check
def _best_node(draft, sample, parents, depth, bits, node, inside):
    """(accepted node, its depth); the arguments are a row's pointers, and its loaded depths and bits."""
    token = tl.load(draft + node, mask=inside, other=-1)
    parent = tl.load(parents + node, mask=inside, other=0)
    expected = tl.load(sample + parent, mask=inside, other=-2)
    good = ((token == expected) & (token >= 0)) | (node == 0)
    good_bits = tl.sum(tl.where(good & inside, tl.full([], 1, tl.int64) << node.to(tl.int64), 0), 0)
    accepted = inside & ((bits & ~good_bits) == 0)
    reach = tl.where(accepted, depth, -1)
    deepest = tl.max(reach, 0)
    best = tl.min(tl.where(reach == deepest, node, 64), 0)
    return best, deepest


@triton.jit
@no_type_check
def _accept_kernel(
    draft, sample, parents, depths, bits, best, parents_row, depths_row, bits_row, nodes,
    NODES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    launch.start(PDL)
    row = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, NODES)
    inside = node < nodes
    depth = tl.load(depths + row * depths_row + node, mask=inside, other=-1)
    own_bits = tl.load(bits + row * bits_row + node, mask=inside, other=0)
    found, _ = _best_node(
        draft + row * nodes, sample + row * nodes, parents + row * parents_row,
        depth, own_bits, node, inside,
    )  # fmt: skip
    tl.store(best + row, found.to(tl.int64))


@triton.jit
@no_type_check
def _decide_kernel(
    draft, sample, parents, depths, bits,
    rows, text, lengths, limits, lives, stops, blocks, wide, narrow,
    parents_row, depths_row, bits_row, text_row, stop_row, table_row,
    count, nodes, width, stop_count,
    NODES: tl.constexpr, WIDTH: tl.constexpr, STOPS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    launch.start(PDL)
    request = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, NODES)
    inside = node < nodes
    draft += request * nodes
    sample += request * nodes
    depth = tl.load(depths + request * depths_row + node, mask=inside, other=-1)
    own_bits = tl.load(bits + request * bits_row + node, mask=inside, other=0)
    best, deepest = _best_node(
        draft, sample, parents + request * parents_row, depth, own_bits, node, inside
    )
    # The path's node of depth d is the one ancestor that is so deep.
    ancestors = tl.sum(tl.where(node == best, own_bits, 0), 0)
    on_path = ((ancestors >> node.to(tl.int64)) & 1) > 0
    place = tl.arange(0, WIDTH)
    here = on_path[None, :] & inside[None, :] & (depth[None, :] == place[:, None])
    path = tl.sum(tl.where(here, node[None, :], 0), 1)
    path = tl.where(place > deepest, best, path)
    in_row = place < width
    emitted = tl.load(sample + path, mask=in_row, other=-1)

    slot = tl.load(rows + request)
    length = tl.load(lengths + slot)
    limit = tl.load(limits + slot)
    live = tl.load(lives + slot) != 0
    stop_place = tl.arange(0, STOPS)
    stop = tl.load(stops + slot * stop_row + stop_place, mask=stop_place < stop_count, other=-1)
    is_stop = tl.max((emitted[:, None] == stop[None, :]).to(tl.int32), 1) > 0
    is_stop = is_stop & (emitted >= 0) & in_row
    first_stop = tl.min(tl.where(is_stop, place, width), 0)
    found = (deepest + 1).to(tl.int32)
    sick = (emitted < 0) & (place < found) & in_row
    sound = tl.min(tl.where(sick, place, width), 0)
    kept = tl.minimum(tl.minimum(found, first_stop + 1), sound).to(tl.int64)
    kept = tl.maximum(tl.minimum(kept, limit - length), 0)
    kept = tl.where(live, kept, 0)
    reason = tl.where(length + kept >= limit, 2, 0)
    reason = tl.where(first_stop < kept, 1, reason)
    reason = tl.where((reason == 0) & (sound <= kept) & (sound < found), 3, reason)
    reason = tl.where(live, reason, 0)

    tl.debug_barrier()  # every lane has read the slot before it changes
    tl.store(text + slot * text_row + length + place, emitted.to(tl.int32), mask=place < kept)
    tl.store(lengths + slot, length + kept)
    tl.store(lives + slot, (live & (reason == 0)).to(tl.uint8))

    move = (place > 0) & (place < kept) & (path != place)
    table = blocks + slot * table_row
    origin = tl.where(move, length - 1 + path, 0)
    goal = tl.where(move, length - 1 + place, 0)
    origin_block = tl.load(table + origin // BLOCK_SIZE, mask=move, other=0).to(tl.int64)
    goal_block = tl.load(table + goal // BLOCK_SIZE, mask=move, other=0).to(tl.int64)
    source = tl.where(move, origin_block * BLOCK_SIZE + origin % BLOCK_SIZE, 0)
    target = tl.where(move, goal_block * BLOCK_SIZE + goal % BLOCK_SIZE, 0)
    at = request * width + place
    all_rows = tl.cast(count, tl.int64) * width
    tl.store(wide + at, path.to(tl.int64), mask=in_row)
    tl.store(wide + all_rows + at, emitted, mask=in_row)
    tl.store(wide + 2 * all_rows + at, source, mask=in_row)
    tl.store(wide + 3 * all_rows + at, target, mask=in_row)

    token = tl.load(draft + node, mask=inside & (node > 0), other=-1)
    proposed = tl.sum((token >= 0).to(tl.int32), 0)
    tl.store(narrow + request, kept)
    tl.store(narrow + count + request, reason.to(tl.int64))
    tl.store(narrow + 2 * count + request, tl.where(kept > 0, proposed, 0).to(tl.int64))
    tl.store(narrow + 3 * count + request, tl.minimum(kept, deepest.to(tl.int64)))
    tl.store(narrow + 4 * count + request, length)


@triton.jit
@no_type_check
def _feature_kernel(
    features, path, count, rows, feature, out, features_row, feature_row, width, size,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    launch.start(PDL)
    request = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1)
    at = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    node = tl.load(path + request * width + place)
    values = tl.load(features + request * features_row + node * size + at, mask=inside)
    tl.store(out + (request * width + place) * size + at, values, mask=inside)
    last = tl.maximum(tl.load(count + request) - 1, 0)
    if place == last:
        tl.store(feature + tl.load(rows + request) * feature_row + at, values, mask=inside)


@triton.jit
@no_type_check
def _move_kernel(
    addresses,
    source,
    target,
    width,
    words,
    MOVES: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    launch.start(PDL)
    request = tl.program_id(0).to(tl.int64)
    move = tl.arange(0, MOVES)
    origin = tl.load(source + request * width + move, mask=move < width, other=0)
    goal = tl.load(target + request * width + move, mask=move < width, other=0)
    moves = origin != goal
    if tl.max(moves.to(tl.int32), 0) > 0:
        pages = tl.load(addresses + tl.program_id(1)).to(tl.pointer_type(tl.int16))
        place = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
        inside = moves[:, None] & (place < words)[None, :]
        values = tl.load(pages + origin[:, None] * words + place[None, :], mask=inside)
        tl.debug_barrier()  # a row may be one's source and another's target
        tl.store(pages + goal[:, None] * words + place[None, :], values, mask=inside)
