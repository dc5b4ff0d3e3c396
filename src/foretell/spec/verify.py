"""Accept rules: from the target's logits at every node to the tokens that are emitted.

`match` (the default) draws the target's own sample after every node and keeps the path that agrees: every emitted token
is the target's sample, keyed by seed and position, so the text is the same with any drafter or none.
`rejection` accepts a drafted token with probability min(1, p/q) and draws from the residual after a rejection
(Leviathan et al. 2023, arXiv 2211.17192, Algorithm 1); siblings are tried one after the other against what is left of p
(SpecInfer, arXiv 2305.09781, section 4.3; without replacement as in arXiv 2402.14160). Same law, other text.
`typical` accepts what the target finds likely enough (Medusa, arXiv 2401.10774, section 2.3.1). It is LOSSY: the output
does not follow the target's law.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from foretell.ops.group import Group, Rows
from foretell.ops.reference.sample import argmax_checked, uniform
from foretell.ops.reference.verify import accept_match, path_to
from foretell.ops.table import OpTable
from foretell.spec import noise, processors, shards
from foretell.spec.nodes import Nodes
from foretell.spec.processors import Law, Mode


class Acceptance(StrEnum):
    """Name of an accept rule."""

    MATCH = "match"
    REJECTION = "rejection"
    TYPICAL = "typical"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a verification decided, before stops and limits."""

    path: Tensor  # [B, D + 1] int64, accepted nodes from the root; repeats the last one below its depth
    count: Tensor  # [B] int64, tokens emitted: accepted drafts and one more
    tokens: Tensor  # [B, D + 1] int64, the emitted tokens; -1 = logits were not finite; junk at and after `count`

    def shared(self, group: Group) -> Verdict:
        """Rank 0's, for every rank."""
        if group.alone:
            return self
        width = self.path.shape[1]
        both = group.share(torch.cat((self.path, self.tokens, self.count.unsqueeze(1)), dim=1))
        return Verdict(both[:, :width], both[:, -1], both[:, width : 2 * width])


@dataclass(frozen=True, slots=True)
class Typical:
    """Thresholds of typical acceptance (Medusa's posterior threshold and alpha)."""

    epsilon: float = 0.09
    alpha: float = 0.3


def match(logits: Tensor, nodes: Nodes, law: Law, mode: Mode, ops: OpTable) -> Verdict:
    """Keep the deepest path of drafts that equal the target's own samples, then emit the sample after it.

    Args:
        logits: [B, N, V] from `processors.process`.
    """
    sample = samples(logits, nodes, law, mode, ops)
    shape = nodes.shape
    best = accept_match(nodes.tokens, sample, shape.parents, shape.depths, shape.bits)
    path = path_to(best, shape.parents, shape.depths, shape.tree.depth)
    count = shape.depths.expand_as(sample).gather(1, best.unsqueeze(1)).squeeze(1) + 1
    return Verdict(path=path, count=count, tokens=sample.gather(1, path))


def samples(logits: Tensor, nodes: Nodes, law: Law, mode: Mode, ops: OpTable) -> Tensor:
    """[B, N] int64, the target's own sample after every node; -1 where its logits are not finite."""
    if ops.draw is None:
        logits = processors.scale_and_filter(logits, law, mode)
        return processors.sample(logits, law, nodes.positions + 1, mode, ops)
    if not mode.sampled:
        return ops.argmax(logits)
    stream = int(noise.Stream.SAMPLE)
    return ops.draw(logits, law, nodes.positions + 1, stream, mode.filtered)


def shard_samples(
    logits: Tensor, nodes: Nodes, law: Law, mode: Mode, ops: OpTable, rows: Rows
) -> Tensor:
    """`samples` where a rank has the logits of its own tokens ([B, N, rows.count]) and there is nothing to filter."""
    ids = torch.arange(rows.start, rows.stop, dtype=torch.int32, device=logits.device)
    return shards.draw(logits, law if mode.sampled else None, nodes.positions + 1, ops, rows, ids)


def rejection(
    logits: Tensor, nodes: Nodes, law: Law, mode: Mode, draft_probs: Tensor | None
) -> Verdict:
    """Accept drafted token x with min(1, p(x) / q(x)); after a rejection p becomes norm(max(p - q, 0)).

    With `draft_probs` None a draft is a point mass at its token, so q(x) = 1, acceptance has probability p(x) and a
    rejection takes x out of p. Siblings drawn without replacement are tried in order: after a rejection x is also
    taken out of q, which is renormalised. Greedy rows follow the same algebra with one-hot p.

    Args:
        logits: [B, N, V] from `processors.process`.
        draft_probs: [B, N, V] or None; row i is the law that the first child of node i's parent was drawn from.
    """
    probs = _law(processors.scale_and_filter(logits, law, mode), law)
    shape, tokens = nodes.shape, nodes.tokens
    rows, count = tokens.shape
    parents = shape.parents.expand(rows, -1)
    accept = uniform(_node_keys(law, nodes))
    current = torch.zeros(rows, dtype=torch.int64, device=tokens.device)
    tried_under = torch.full_like(current, -1)  # the parent whose children q is the law of
    points = (law.temperature == 0) | (
        draft_probs is None
    )  # every sibling is a point mass of its own
    p = q = probs[:, 0]
    for node in range(1, count):
        parent, token = parents[:, node], tokens[:, node].clamp(min=0).unsqueeze(1)
        law_of_first = _draft_law(draft_probs, node, token, law, p)
        starts = (parent != tried_under) | points
        own_q = torch.where(starts.unsqueeze(1), law_of_first, q)
        q_token, p_token = own_q.gather(1, token).squeeze(1), p.gather(1, token).squeeze(1)
        drafted = (parent == current) & (tokens[:, node] >= 0) & (q_token > 0)
        taken = drafted & (accept[:, node] * q_token < p_token)
        refused = drafted & ~taken
        left = _normalise(torch.clamp(p - own_q, min=0), p)
        p = torch.where(
            taken.unsqueeze(1), probs[:, node], torch.where(refused.unsqueeze(1), left, p)
        )
        without = _normalise(own_q.scatter(1, token, 0.0), own_q)
        q = torch.where(refused.unsqueeze(1), without, q)
        current = torch.where(taken, node, current)
        tried_under = torch.where(drafted, parent, tried_under)
    return _emit_residual(p, current, nodes, law)


def typical(
    logits: Tensor, nodes: Nodes, law: Law, mode: Mode, ops: OpTable, limits: Typical
) -> Verdict:
    """LOSSY. Accept a drafted token where p(x) > min(epsilon, alpha * exp(-entropy(p))); greedy rows need the arg-max.

    Of the accepted paths the deepest wins; the token after it is the target's own sample (Medusa's section 2.3.1 takes
    the arg-max there; a sample keeps some of the temperature's meaning).
    """
    filtered = processors.scale_and_filter(logits, law, mode)
    probs = torch.softmax(filtered.float(), -1)
    entropy = -(probs * torch.log(probs.clamp(min=1e-20))).sum(-1)  # [B, N]
    threshold = torch.clamp(limits.alpha * torch.exp(-entropy), max=limits.epsilon)
    shape = nodes.shape
    parents = shape.parents.expand_as(nodes.tokens)
    own = probs.gather(1, parents.unsqueeze(-1).expand_as(probs))
    own = own.gather(2, nodes.tokens.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    likely = own > threshold.gather(1, parents)
    best_token = argmax_checked(filtered)
    exact = nodes.tokens == best_token.gather(1, parents)
    good = torch.where((law.temperature > 0).unsqueeze(1), likely, exact) & (nodes.tokens >= 0)
    sample = processors.sample(filtered, law, nodes.positions + 1, mode, ops)
    best = _deepest(good, nodes)
    path = path_to(best, shape.parents, shape.depths, shape.tree.depth)
    return _emit(path, best, nodes, sample.gather(1, best.unsqueeze(1)).squeeze(1))


def _deepest(good: Tensor, nodes: Nodes) -> Tensor:
    """[B] the first deepest node whose whole path is good; `good` is [B, N] and its root entry is ignored."""
    place = torch.arange(good.shape[1], device=good.device)
    good_bits = ((good | (place == 0)).to(torch.int64) << place).sum(-1, keepdim=True)
    accepted = (nodes.shape.bits & ~good_bits) == 0
    return torch.where(accepted, nodes.shape.depths, -1).argmax(-1)


def _law(logits: Tensor, law: Law) -> Tensor:
    """Probabilities: softmax for sampled rows, one-hot at the arg-max for greedy ones (NaN stays NaN)."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    probs = torch.softmax(logits, -1)
    best = logits.argmax(-1, keepdim=True)
    one_hot = torch.zeros_like(probs).scatter_(-1, best, 1.0) + logits.amax(-1, keepdim=True) * 0
    return torch.where((law.temperature == 0).view(-1, 1, 1), one_hot, probs)


def _node_keys(law: Law, nodes: Nodes) -> Tensor:
    """Keys of the accept numbers: by position, and by rank among siblings so that each try has its own number."""
    return noise.key(law.seed, nodes.positions, noise.Stream.ACCEPT, nodes.shape.ranks)


def _draft_law(draft_probs: Tensor | None, node: int, token: Tensor, law: Law, p: Tensor) -> Tensor:
    """[B, V] the law the first sibling was drawn from; a draft that was not drawn is a point mass at its token.

    Greedy rows draft deterministically, whatever the drafter says of its probabilities.
    """
    point = torch.zeros_like(p).scatter_(1, token, 1.0)
    if draft_probs is None:
        return point
    return torch.where((law.temperature == 0).unsqueeze(1), point, draft_probs[:, node].to(p.dtype))


def _normalise(weights: Tensor, otherwise: Tensor) -> Tensor:
    """Rows summing to 1; a row without mass (p == q, reached only by rounding) falls back to `otherwise`."""
    total = weights.sum(-1, keepdim=True)
    return torch.where(total > 0, weights / torch.where(total > 0, total, 1.0), otherwise)


def _emit_residual(p: Tensor, current: Tensor, nodes: Nodes, law: Law) -> Verdict:
    """Draw the last token from what is left of p at the deepest accepted node."""
    shape = nodes.shape
    position = nodes.positions.gather(1, current.unsqueeze(1)) + 1
    logits = torch.log(p).unsqueeze(1)
    drawn = argmax_checked(
        processors.perturb(logits, law, position, noise.Stream.RESIDUAL)
    ).squeeze(1)
    drawn = torch.where(torch.isnan(p).any(-1), -1, drawn)
    path = path_to(current, shape.parents, shape.depths, shape.tree.depth)
    return _emit(path, current, nodes, drawn)


def _emit(path: Tensor, last: Tensor, nodes: Nodes, fresh: Tensor) -> Verdict:
    """Accepted drafts along the path, then the fresh token."""
    depth = nodes.shape.depths.expand_as(nodes.tokens).gather(1, last.unsqueeze(1)).squeeze(1)
    place = torch.arange(path.shape[1], device=path.device)
    after = nodes.tokens.gather(1, torch.roll(path, -1, dims=1))
    tokens = torch.where(place == depth.unsqueeze(1), fresh.unsqueeze(1), after)
    return Verdict(path=path, count=depth + 1, tokens=tokens)
