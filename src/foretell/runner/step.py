"""One generation step: target, sample, verify, commit; then the drafter's part. The page to read first.

A step is a function of weights, slots and plan tensors. No `.item()`, no shape that depends on data, writes only in
place. Plain decoding is the same function with a one-node tree; prefill ends in the same `decide`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from foretell.model.decoder import Decoder
from foretell.ops.meta import RaggedRows, TreeRows, flat_slots
from foretell.ops.reference.verify import move_kv
from foretell.runner.kv import KVPool
from foretell.runner.slots import Slots
from foretell.spec import processors, verify
from foretell.spec.drafter import Draft, Drafter, PromptRows, Window
from foretell.spec.nodes import Nodes, Shape, dynamic_shape
from foretell.spec.processors import Mode
from foretell.spec.verify import Acceptance, Verdict

RUNNING, STOPPED, FULL, BROKEN = (
    0,
    1,
    2,
    3,
)  # why a request ended in a step, as the outbox carries it

CATCH_UP = 32  # tokens that a drafter that rested is shown in one pass


@dataclass(frozen=True, slots=True)
class Device:
    """What every step works on: allocated once, written in place."""

    target: Decoder
    drafter: Drafter
    slots: Slots
    kv: KVPool
    acceptance: Acceptance
    typical: verify.Typical


@dataclass(frozen=True, slots=True)
class LogprobRows:
    """Log-probabilities of the target's raw logits at many places: the chosen token first, then the K likeliest."""

    values: Tensor  # [..., 1 + K] float32
    ids: Tensor  # [..., 1 + K] int64
    ranks: Tensor  # [...] int64, of the chosen token: 1 + how many tokens have a greater logit

    def each(self, change: Callable[[Tensor], Tensor]) -> LogprobRows:
        """The rows with every tensor changed alike."""
        return LogprobRows(change(self.values), change(self.ids), change(self.ranks))


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step decided for its rows: the host's news, and the drafter's window."""

    tokens: Tensor  # [B, D + 1] int64, emitted tokens; junk at and after `count`
    count: Tensor  # [B] int64, 0 for rows that were not live
    reason: Tensor  # [B] int64: RUNNING, STOPPED, FULL or BROKEN
    drafted: Tensor  # [B] int64, draft tokens verified
    accepted: Tensor  # [B] int64, how many of the emitted tokens were drafted
    start: Tensor  # [B] int64, position of tokens[:, 0]
    features: Tensor | None  # [B, D + 1, F], feature of the node that emitted each token
    logprobs: LogprobRows | None  # [B, D + 1] rows, one for each emitted token
    nodes: Tensor  # [B, N] int64, tokens that were verified, the root first
    parents: Tensor  # [B or 1, N] int64
    path: Tensor  # [B, D + 1] int64, accepted nodes from the root; repeats the last one
    probs: Tensor | None = (
        None  # [B, 2, N] float32, of each node: under the target's law, under the draft's (-1 = none)
    )


def decode_step(
    device: Device,
    rows: Tensor,
    shape: Shape,
    mode: Mode,
    keys: int,
    allowed: Tensor | None = None,
) -> Outcome:
    """Verify the drafts of `rows` ([B] int64 slots) and commit what is accepted. `keys` bounds every key index.

    `allowed` ([B, N, V] bool) says which tokens may follow each node, where grammars hold.
    """
    slots, tree = device.slots, shape.tree
    nodes = gather_nodes(slots, rows, shape)
    # A draft is tried once: one that was refused no longer follows the law it was drawn from, and where no new one is
    # made (near a request's end) it would be tried again.
    slots.draft.index_fill_(0, rows, -1)
    indices = slots.length[rows].unsqueeze(1) - 1 + torch.arange(tree.nodes, device=rows.device)
    blocks = slots.blocks[rows]
    live = slots.live[rows].unsqueeze(1).expand_as(indices)
    meta = TreeRows(
        positions=nodes.positions,
        kv_slots=flat_slots(blocks, indices, device.kv.block_size, live),
        blocks=blocks,
        context=slots.length[rows] - 1,
        bits=nodes.shape.bits.expand(rows.shape[0], -1),
        tail_positions=nodes.positions,
        keys=keys,
    )
    hidden, features = device.target(nodes.tokens, meta, device.kv.target, device.drafter.features)
    return decide(device, rows, nodes, hidden, features, mode, keys, allowed)


def gather_nodes(slots: Slots, rows: Tensor, shape: Shape) -> Nodes:
    """The pending token and its drafts, as far as the request wants them and the drafter was made for texts so long."""
    length = slots.length[rows].unsqueeze(1)
    root = slots.tokens[rows.unsqueeze(1), length - 1].to(torch.int64)
    if slots.draft_parents is not None:
        shape = dynamic_shape(shape, slots.draft_parents[rows, : shape.tree.nodes])
    deepest = torch.minimum(slots.most_drafted[rows], slots.sizes.drafted - slots.length[rows])
    wanted = shape.depths[:, 1:] <= deepest.unsqueeze(1)
    drafted = torch.where(wanted, slots.draft[rows, 1 : shape.tree.nodes], -1)
    tokens = torch.cat((root, drafted), dim=1)
    return Nodes(shape=shape, tokens=tokens, positions=length - 1 + shape.depths)


def decide(
    device: Device,
    rows: Tensor,
    nodes: Nodes,
    hidden: Tensor,
    features: Tensor | None,
    mode: Mode,
    keys: int,
    allowed: Tensor | None = None,
) -> Outcome:
    """Sample, accept and commit.

    Args:
        rows: [B] int64, slots.
        hidden: [B, N, H], the target's final hidden state of each node.
        features: [B, N, F] or None, what the drafter reads.
        allowed: [B, N, V] bool or None, what may follow each node.
    """
    slots = device.slots
    raw = device.target.logits(hidden)
    history, law = slots.history(rows, keys, mode), slots.law(rows)
    logits = processors.process(raw, nodes, history, mode)
    if allowed is not None:
        logits = torch.where(allowed, logits, -torch.inf)
    verdict = _accept(device, rows, logits, nodes, law, mode)
    start = slots.length[rows]
    count, reason = commit(slots, rows, verdict)
    if not nodes.shape.tree.is_chain:
        _compact(device, rows, start, verdict.path, count)
    path_features = None
    if features is not None:
        path_features = features.gather(
            1, verdict.path.unsqueeze(-1).expand(-1, -1, features.shape[-1])
        )
        last = (count - 1).clamp(min=0).view(-1, 1, 1).expand(-1, 1, features.shape[-1])
        slots.feature[rows] = path_features.gather(1, last).squeeze(1)
    return Outcome(
        tokens=verdict.tokens,
        count=count,
        reason=reason,
        drafted=torch.where(count > 0, (nodes.tokens[:, 1:] >= 0).sum(-1), 0),
        accepted=torch.minimum(count, verdict.count - 1),
        start=start,
        features=path_features,
        logprobs=_logprobs(raw, verdict, mode),
        nodes=nodes.tokens,
        parents=nodes.shape.parents,
        path=verdict.path,
        probs=_node_probs(device, rows, logits, nodes, law, mode),
    )


def _node_probs(
    device: Device, rows: Tensor, logits: Tensor, nodes: Nodes, law: processors.Law, mode: Mode
) -> Tensor | None:
    """How probable each drafted token was where it was drafted, if steps are traced; the root has no meaning."""
    if not mode.traced:
        return None
    probs = torch.softmax(processors.scale_and_filter(logits, law, mode).float(), -1)
    parents = nodes.shape.parents.expand_as(nodes.tokens)
    above = probs.gather(1, parents.unsqueeze(-1).expand(-1, -1, probs.shape[-1]))
    token = nodes.tokens.clamp(min=0).unsqueeze(-1)
    target = above.gather(2, token).squeeze(-1)
    drawn = device.slots.draft_probs
    if drawn is None:
        return torch.stack((target, torch.full_like(target, -1.0)), dim=1)
    own = drawn[rows, : token.shape[1]].gather(2, token).squeeze(-1)
    return torch.stack((target, own.float()), dim=1)


def _accept(
    device: Device, rows: Tensor, logits: Tensor, nodes: Nodes, law: processors.Law, mode: Mode
) -> Verdict:
    ops = device.target.ops
    match device.acceptance:
        case Acceptance.MATCH:
            return verify.match(logits, nodes, law, mode, ops)
        case Acceptance.REJECTION:
            probs = device.slots.draft_probs
            drawn = None if probs is None else probs[rows, : nodes.tokens.shape[1]]
            return verify.rejection(logits, nodes, law, mode, drawn)
        case Acceptance.TYPICAL:
            return verify.typical(logits, nodes, law, mode, ops, device.typical)


def commit(slots: Slots, rows: Tensor, verdict: Verdict) -> tuple[Tensor, Tensor]:
    """Write the emitted tokens: cut at the first stop token, then at the limit, in front of a NaN.

    Returns:
        (count [B] int64, reason [B] int64). A stop inside the limit is a stop, even on the limit's last place.
    """
    tokens, live = verdict.tokens, slots.live[rows]
    place = torch.arange(tokens.shape[1], device=tokens.device)
    stops = (tokens.unsqueeze(-1) == slots.stop[rows].unsqueeze(1)).any(-1) & (tokens >= 0)
    length = slots.length[rows]
    first_stop = _first(stops)
    sound = _first((tokens < 0) & (place < verdict.count.unsqueeze(1)))
    room = slots.limit[rows] - length
    count = torch.minimum(torch.minimum(verdict.count, first_stop + 1), torch.minimum(room, sound))
    count = torch.where(live, count.clamp(min=0), 0)
    full = length + count >= slots.limit[rows]
    reason = torch.where(first_stop < count, STOPPED, torch.where(full, FULL, RUNNING))
    reason = torch.where(
        (reason == RUNNING) & (sound <= count) & (sound < verdict.count), BROKEN, reason
    )
    reason = torch.where(live, reason, RUNNING)
    trash = slots.tokens.shape[1] - 1
    index = torch.where(place < count.unsqueeze(1), length.unsqueeze(1) + place, trash)
    slots.tokens[rows.unsqueeze(1), index] = tokens.to(torch.int32)
    slots.length[rows] = length + count
    slots.live[rows] = live & (reason == RUNNING)
    return count, reason


def _first(flags: Tensor) -> Tensor:
    """[B] index of the first True in [B, W], or W."""
    width = flags.shape[1]
    place = torch.arange(width, device=flags.device)
    return torch.where(flags, place, width).amin(-1)


def _compact(device: Device, rows: Tensor, start: Tensor, path: Tensor, count: Tensor) -> None:
    """Move the KV of accepted nodes to their places: path[j] goes to j; only the nodes of emitted drafts matter."""
    blocks = device.slots.blocks[rows]
    place = torch.arange(path.shape[1], device=path.device).expand_as(path)
    moves = (place > 0) & (place < count.unsqueeze(1)) & (path != place)
    root = start.unsqueeze(1) - 1
    source = flat_slots(blocks, root + path, device.kv.block_size, moves)
    target = flat_slots(blocks, root + place, device.kv.block_size, moves)
    move_kv(device.kv.target, source.flatten(), target.flatten())


def _logprobs(raw: Tensor, verdict: Verdict, mode: Mode) -> LogprobRows | None:
    """Log-probabilities behind each emitted token, if anybody wants them."""
    if mode.logprobs < 0:
        return None
    path = verdict.path.unsqueeze(-1).expand(-1, -1, raw.shape[-1])
    return top_logprobs(raw.gather(1, path), verdict.tokens, mode.logprobs)


def top_logprobs(logits: Tensor, chosen: Tensor, count: int) -> LogprobRows:
    """Log-probabilities of `logits` ([..., V]): of the `chosen` tokens ([...] int64) and of the `count` likeliest."""
    index = chosen.clamp(min=0).unsqueeze(-1)
    ids = torch.cat((index, logits.topk(count, dim=-1).indices), -1)
    return LogprobRows(
        values=torch.log_softmax(logits.float(), -1).gather(-1, ids),
        ids=ids,
        ranks=(logits > logits.gather(-1, index)).sum(-1) + 1,
    )


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A prefill's products."""

    hidden: Tensor  # [R, H]
    ends: Tensor  # [B] int64, the last row of each chunk
    features: Tensor | None  # [B, 1, F] of those rows
    prompt: PromptRows  # what the drafter observes


def prefill_step(
    device: Device, rows: Tensor, row_slots: Tensor, positions: Tensor, meta: RaggedRows
) -> Prefilled:
    """Run prompt chunks through the target.

    Args:
        rows: [B] int64, slots of the chunks.
        row_slots: [R] int64, slot of each flat row.
        positions: [R] int64, position of each flat row.
    """
    slots = device.slots
    tokens = slots.tokens[row_slots, positions].to(torch.int64)
    hidden, features = device.target(tokens, meta, device.kv.target, device.drafter.features)
    ends = meta.offsets[1:] - 1
    before = None
    if features is not None:
        before = torch.roll(features, 1, dims=0)
        before[meta.offsets[:-1]] = slots.feature[rows]
        slots.feature[rows] = features[ends]
    return Prefilled(
        hidden=hidden,
        ends=ends,
        features=None if features is None else features[ends].unsqueeze(1),
        prompt=PromptRows(tokens=tokens, features=before, meta=meta),
    )


def catch_up(
    device: Device, rows: Tensor, until: Tensor, most: int, shape: Shape, mode: Mode, keys: int
) -> None:
    """Show the drafter what was committed while it rested, CATCH_UP tokens at a time.

    Args:
        rows: [B] int64, slots of requests that it rested for.
        until: [B] int64, tokens below this position are shown; those of the last step come with the draft.
        most: no row has more of them.
        shape: of the tree with one node.
    """
    slots = device.slots
    place = torch.arange(min(most, CATCH_UP), device=rows.device)
    for _ in range(-(-most // CATCH_UP)):
        start = slots.seen[rows]
        index = (start.unsqueeze(1) + place).clamp(max=slots.tokens.shape[1] - 1)
        count = (until - start).clamp(0, CATCH_UP)
        window = Window(
            slots=rows,
            tokens=slots.tokens[rows.unsqueeze(1), index].to(torch.int64),
            start=start,
            count=count,
            features=None,
            live=slots.live[rows],
            blocks=slots.blocks[rows],
            text=slots.tokens,
            law=slots.law(rows),
            mode=mode,
            keys=keys + CATCH_UP,
        )
        device.drafter.propose(window, shape)
        slots.seen[rows] = start + count


def draft_step(
    device: Device, rows: Tensor, outcome: Outcome, shape: Shape, mode: Mode, keys: int
) -> Draft:
    """Show the drafter what was committed and keep its proposal for the next step."""
    slots = device.slots
    window = Window(
        slots=rows,
        tokens=outcome.tokens,
        start=outcome.start,
        count=outcome.count,
        features=outcome.features,
        live=slots.live[rows],
        blocks=slots.blocks[rows],
        text=slots.tokens,
        law=slots.law(rows),
        mode=mode,
        keys=keys,
    )
    draft = device.drafter.propose(window, shape)
    nodes = shape.tree.nodes
    missing = slots.draft.shape[1] - nodes
    slots.draft[rows] = torch.nn.functional.pad(draft.tokens, (0, missing), value=-1)
    if slots.draft_parents is not None and draft.parents is not None:
        slots.draft_parents[rows, :nodes] = draft.parents
    if slots.draft_probs is not None and draft.probs is not None:
        slots.draft_probs[rows, :nodes] = draft.probs.to(slots.draft_probs.dtype)
    return draft
