"""Trees that grow where the drafter is sure (EAGLE-2, arXiv 2406.16858, section 4; EAGLE-3 does the same).

Growth: level after level, the best nodes by the product of probabilities on their path get `top_k` children each.
Re-ranking: of all candidates the best ones, as many as the tree has nodes, are kept. A child is never more probable
than its parent, and ties go to the parent, so what is kept is a connected tree, parents first. Everything happens on
the device, in shapes that do not depend on data.

Nodes that were grown are run in scratch entries behind the committed text, at most 63 of them (one 64-bit ancestor set,
the root included). With ten children and seven levels the originals run 70; here the levels are then 9 nodes wide.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from foretell.spec.autoregressive import Autoregressive, Spot
from foretell.spec.drafter import Draft, Window
from foretell.spec.nodes import Shape
from foretell.spec.tree import MAX_NODES, Tree


@dataclass(frozen=True, slots=True)
class Growth:
    """How dynamic trees grow.

    Args:
        top_k: children of a node, and nodes of a level that get children.
        depth: D, levels below the root.
        nodes: N, the budget, the root included.

    Raises:
        ValueError: a number is out of range, or the budget exceeds what can grow.
    """

    top_k: int = 10
    depth: int = 6
    nodes: int = 60

    def __post_init__(self) -> None:
        if self.top_k < 1:
            raise ValueError(f"tree: top_k must be at least 1, got {self.top_k}")
        if not 1 <= self.depth < MAX_NODES:
            raise ValueError(f"tree: depth must be between 1 and {MAX_NODES - 1}, got {self.depth}")
        if not self.depth < self.nodes <= MAX_NODES:
            raise ValueError(
                f"tree: a dynamic tree of depth {self.depth} needs more than {self.depth} and at most {MAX_NODES} "
                f"nodes (the root included), got {self.nodes}"
            )
        if self.top_k > 1 and self.nodes == self.depth + 1:
            raise ValueError(
                f"tree: {self.nodes} nodes of depth {self.depth} leave nothing to choose; use a chain, or more nodes"
            )
        grown = self.top_k + (self.depth - 1) * self.beam * self.top_k
        if self.nodes - 1 > grown:
            raise ValueError(
                f"tree: {self.nodes - 1} drafted nodes do not grow from top_k={self.top_k} and depth={self.depth}, "
                f"which make {grown}; lower the node budget or raise top_k"
            )

    @property
    def beam(self) -> int:
        """Nodes of a level that get children."""
        return min(self.top_k, (MAX_NODES - 1) // max(self.depth - 1, 1))

    @property
    def scratch(self) -> int:
        """KV entries needed behind the committed text, the pending token's included."""
        return 1 + (self.depth - 1) * self.beam

    @property
    def bound(self) -> Tree:
        """A static tree with as many nodes and as deep: what the engine plans with."""
        return Tree((*range(-1, self.depth), *[0] * (self.nodes - 1 - self.depth)))


EAGLE2 = Growth(
    top_k=10, depth=6, nodes=60
)  # the originals' depth counts the levels after the first
EAGLE3 = Growth(top_k=10, depth=8, nodes=60)


@dataclass(frozen=True, slots=True)
class _Candidates:
    """Grown nodes in the order they were grown; entry 0 is the root."""

    tokens: Tensor  # [B, C] int64, target ids, -1 where the target has no such token
    parents: Tensor  # [B, C] int64
    scores: Tensor  # [B, C] float, log-probability of the path


def propose(procedure: Autoregressive, window: Window, shape: Shape, growth: Growth) -> Draft:
    """Ingest the window, then grow a tree of the depth and the node count of `shape`'s bounding tree."""
    assert shape.tree.depth <= growth.depth, (shape.tree.depth, growth.depth)
    hidden = procedure.run_window(window)
    tree = shape.tree
    if tree.nodes == 1:
        return Draft(tokens=torch.full_like(window.start.unsqueeze(1), -1))
    return rerank(_grow(procedure, hidden, window, tree.depth, growth), tree.nodes)


def _grow(
    procedure: Autoregressive, hidden: Tensor, window: Window, depth: int, growth: Growth
) -> _Candidates:
    rows, device = window.start.shape[0], hidden.device
    beam = growth.beam
    places = torch.arange(1 + (depth - 1) * beam, device=device)
    tail_depths = ((places + beam - 1) // beam).unsqueeze(0)  # the root, then `beam` nodes a level
    root = torch.zeros(rows, 1, dtype=torch.int64, device=device)
    ancestors = root + 1  # [B, m], bit 0 is the root
    owners, scores = root, root.to(torch.float32)  # of the nodes that were run last
    tokens, parents, all_scores = [root - 1], [root], [scores]
    first = 1  # index of the level's first candidate
    for level in range(1, depth + 1):
        children = _children(procedure, hidden, window, level, growth.top_k)
        level_scores = (scores.unsqueeze(2) + children[1]).flatten(1)  # [B, m * k]
        level_tokens = children[0].flatten(1)
        width = children[0].shape[2]
        tokens.append(level_tokens)
        parents.append(owners.repeat_interleave(width, dim=1))
        all_scores.append(level_scores)
        if level == depth:
            break
        # A stable sort, so that equal scores do not depend on the device.
        scores, best = level_scores.sort(dim=1, descending=True, stable=True)
        kept = min(beam, best.shape[1])
        scores, best = scores[:, :kept], best[:, :kept]
        from_node = best // width
        place = places[1 + (level - 1) * beam :][:kept]
        ancestors = ancestors.gather(1, from_node) | (torch.ones_like(place) << place)
        above = hidden.gather(1, from_node.unsqueeze(-1).expand(-1, -1, hidden.shape[-1]))
        spot = Spot(place, ancestors, tail_depths)
        hidden = procedure.run_nodes(level_tokens.gather(1, best), above, window, spot)
        owners = first + best
        first += level_tokens.shape[1]
    return _Candidates(torch.cat(tokens, 1), torch.cat(parents, 1), torch.cat(all_scores, 1))


def _children(
    procedure: Autoregressive, hidden: Tensor, window: Window, level: int, top_k: int
) -> tuple[Tensor, Tensor]:
    """(target ids [B, m, k], log-probabilities [B, m, k]) of the best children of each node.

    With shared noise the probabilities are those of the perturbed logits: how likely each token is to be the target's
    sample, now that the noise is known.
    """
    decided = window.length.unsqueeze(1) - 1 + level
    scores, _ = procedure.scoring.scores(procedure.net.logits(hidden), window, decided)
    logprobs = (
        torch.log_softmax(scores, -1).clamp(max=0).nan_to_num(nan=-torch.inf, neginf=-torch.inf)
    )
    best = logprobs.topk(min(top_k, logprobs.shape[-1]), dim=-1)
    return procedure.scoring.vocabulary.to_target(best.indices), best.values


def rerank(candidates: _Candidates, nodes: int) -> Draft:
    """Keep the best `nodes - 1` candidates and the root, in the order they were grown.

    Equal scores are kept in the order of growth, so a parent goes before its child.
    """
    grown = candidates.tokens.shape[1]
    kept = min(nodes, grown)
    _, order = candidates.scores[:, 1:].sort(dim=1, descending=True, stable=True)
    chosen = (order[:, : kept - 1] + 1).sort(dim=1).values
    root = torch.zeros_like(chosen[:, :1])
    chosen = torch.cat((root, chosen), dim=1)  # [B, N]
    parents = torch.searchsorted(chosen, candidates.parents.gather(1, chosen))
    tokens = candidates.tokens.gather(1, chosen)
    impossible = candidates.scores.gather(1, chosen) == -torch.inf
    tokens = torch.where(impossible, -1, tokens)
    missing = nodes - kept  # a vocabulary smaller than top_k grows fewer
    tokens = torch.nn.functional.pad(tokens, (0, missing), value=-1)
    return Draft(tokens=tokens, parents=torch.nn.functional.pad(parents, (0, missing)))
