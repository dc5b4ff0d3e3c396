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
from foretell.ops.group import ALONE, Group
from foretell.ops.meta import RaggedRows, TreeRows
from foretell.ops.reference.rows import Gathered
from foretell.ops.reference.verify import Decision, Drafted, settle
from foretell.ops.table import Opaque
from foretell.runner.kv import KVPool
from foretell.runner.slots import Slots
from foretell.spec import processors, verify
from foretell.spec.drafter import Draft, Drafter, PromptRows, Window
from foretell.spec.nodes import Nodes, Shape, dynamic_shape
from foretell.spec.processors import Mode
from foretell.spec.verify import Acceptance

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
    pages: Opaque  # what `ops.move_kv` moves within
    group: Group = ALONE  # the ranks that take the same step, each with its part of the weights


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
    nodes, found = gather_nodes(device, rows, shape)
    # A draft is tried once: one that was refused no longer follows the law it was drawn from, and where no new one is
    # made (near a request's end) it would be tried again.
    device.slots.draft.index_fill_(0, rows, -1)
    meta = TreeRows(
        positions=found.positions,
        kv_slots=found.kv_slots,
        blocks=found.blocks,
        context=found.context,
        bits=nodes.shape.bits.expand(rows.shape[0], -1),
        tail_positions=found.positions,
        keys=keys,
    )
    hidden, features = device.target(found.tokens, meta, device.kv.target, device.drafter.features)
    return decide(device, rows, nodes, hidden, features, mode, keys, allowed)


def gather_nodes(device: Device, rows: Tensor, shape: Shape) -> tuple[Nodes, Gathered]:
    """The pending token and its drafts, as far as the request wants them, and where they stand."""
    slots = device.slots
    if slots.draft_parents is not None:
        shape = dynamic_shape(shape, slots.draft_parents[rows, : shape.tree.nodes])
    found = device.target.ops.gather(
        slots.arrays,
        slots.draft,
        slots.most_drafted,
        rows,
        shape.depths,
        slots.sizes.drafted,
        device.kv.block_size,
    )
    return Nodes(shape=shape, tokens=found.tokens, positions=found.positions), found


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
    slots, ops = device.slots, device.target.ops
    law = slots.law(rows, mode)
    raw = logits = None
    if _wants_whole_logits(device, mode, allowed):
        raw = logits = device.target.logits(hidden)
        if mode.processed:
            logits = processors.process(raw, nodes, slots.history(rows, keys, mode), mode)
        if allowed is not None:
            logits = torch.where(allowed, logits, -torch.inf)
        decision = _settle(device, rows, logits, nodes, law, mode)
    else:
        own, part = device.target.own_logits(hidden), device.target.rows
        decision = _accept(
            device, rows, verify.shard_samples(own, nodes, law, mode, ops, part), nodes
        )
    if decision.moves is not None:
        ops.move_kv(device.pages, *decision.moves)
    path_features = None
    if features is not None:
        path_features = ops.keep_features(
            features, decision.path, decision.count, rows, slots.feature
        )
    return Outcome(
        tokens=decision.tokens,
        count=decision.count,
        reason=decision.reason,
        drafted=decision.drafted,
        accepted=decision.accepted,
        start=decision.start,
        features=path_features,
        logprobs=None if raw is None else _logprobs(raw, decision, mode),
        nodes=nodes.tokens,
        parents=nodes.shape.parents,
        path=decision.path,
        probs=None if logits is None else _node_probs(device, rows, logits, nodes, law, mode),
    )


def _wants_whole_logits(device: Device, mode: Mode, allowed: Tensor | None) -> bool:
    """Whether more is asked of a row's logits than the winner among them; if not, ranks keep theirs to themselves."""
    if device.group.alone or device.acceptance is not Acceptance.MATCH or allowed is not None:
        return True
    return mode.processed or mode.filtered or mode.traced or mode.logprobs >= 0


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


def _settle(
    device: Device, rows: Tensor, logits: Tensor, nodes: Nodes, law: processors.Law, mode: Mode
) -> Decision:
    """Accept by the engine's rule, and commit."""
    ops = device.target.ops
    if device.acceptance is Acceptance.MATCH:
        sample = device.group.share(verify.samples(logits, nodes, law, mode, ops))
        return _accept(device, rows, sample, nodes)
    if device.acceptance is Acceptance.TYPICAL:
        verdict = verify.typical(logits, nodes, law, mode, ops, device.typical)
    else:
        probs = device.slots.draft_probs
        drawn = None if probs is None else probs[rows, : nodes.tokens.shape[1]]
        verdict = verify.rejection(logits, nodes, law, mode, drawn)
    verdict = verdict.shared(device.group)
    return settle(
        verdict.path,
        verdict.tokens,
        verdict.count,
        nodes.tokens,
        device.slots.arrays,
        rows,
        device.kv.block_size,
        not nodes.shape.tree.is_chain,
    )


def _accept(device: Device, rows: Tensor, sample: Tensor, nodes: Nodes) -> Decision:
    """Accept what agrees with the target's own samples ([B, N] int64), and commit."""
    shape = nodes.shape
    drafted = Drafted(
        nodes.tokens, sample, shape.parents, shape.depths, shape.bits, shape.tree.depth
    )
    moves = not shape.tree.is_chain
    return device.target.ops.decide(drafted, device.slots.arrays, rows, device.kv.block_size, moves)


def _logprobs(raw: Tensor, decision: Decision, mode: Mode) -> LogprobRows | None:
    """Log-probabilities behind each emitted token, if anybody wants them."""
    if mode.logprobs < 0:
        return None
    path = decision.path.unsqueeze(-1).expand(-1, -1, raw.shape[-1])
    return top_logprobs(raw.gather(1, path), decision.tokens, mode.logprobs)


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


def new_trail(slots: Slots) -> Tensor:
    """[S + 1, CATCH_UP + 1, F], room for features of tokens that a resting drafter has not seen; the last is trash."""
    rows, width = slots.feature.shape
    return torch.zeros(
        rows, CATCH_UP + 1, width, dtype=slots.feature.dtype, device=slots.feature.device
    )


def keep_trail(slots: Slots, trail: Tensor, rows: Tensor, outcome: Outcome) -> None:
    """Keep the features of what `rows` committed, by place after the last token that the drafter has seen."""
    assert outcome.features is not None, "only drafters that read features need them"
    place = torch.arange(outcome.tokens.shape[1], device=rows.device)
    valid = place < outcome.count.unsqueeze(1)
    index = (outcome.start - slots.seen[rows]).unsqueeze(1) + place
    trail[rows.unsqueeze(1), torch.where(valid, index, CATCH_UP)] = outcome.features


def catch_up(
    device: Device,
    rows: Tensor,
    until: Tensor,
    most: int,
    trail: Tensor | None,
    shape: Shape,
    mode: Mode,
    keys: int,
) -> None:
    """Show the drafter what was committed while it rested, CATCH_UP tokens at a time.

    Args:
        rows: [B] int64, slots of requests that it rested for.
        until: [B] int64, tokens below this position are shown; those of the last step come with the draft.
        most: no row has more of them.
        trail: features of those tokens, from `keep_trail`, if the drafter reads any; then there is one pass.
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
            features=None if trail is None else trail[rows, : place.shape[0]],
            live=slots.live[rows],
            blocks=slots.blocks[rows],
            text=slots.tokens,
            law=slots.law(rows, mode),
            mode=mode,
            keys=keys + CATCH_UP,
            ops=device.target.ops,
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
        law=slots.law(rows, mode),
        mode=mode,
        keys=keys,
        ops=device.target.ops,
        least_match=slots.least_match[rows] if mode.lookups else None,
    )
    draft = device.drafter.propose(window, shape).shared(device.group)
    nodes = shape.tree.nodes
    missing = slots.draft.shape[1] - nodes
    slots.draft[rows] = torch.nn.functional.pad(draft.tokens, (0, missing), value=-1)
    if slots.draft_parents is not None and draft.parents is not None:
        slots.draft_parents[rows, :nodes] = draft.parents
    if slots.draft_probs is not None and draft.probs is not None:
        slots.draft_probs[rows, :nodes] = draft.probs.to(slots.draft_probs.dtype)
    return draft
