"""What drafts in an engine, as it was found out at the start: for status pages, the doctor and traces. Plain data."""

from __future__ import annotations

from dataclasses import dataclass

from foretell.spec.dynamic_tree import Growth
from foretell.spec.tree import Tree


@dataclass(frozen=True, slots=True)
class Resolved:
    """What the configuration came to.

    Args:
        method: "none", "ngram", "suffix", or the family of the checkpoint.
        first: in a chain, the model-free drafter before it.
        checkpoint: its name.
        evidence: what the family was told by.
        acceptance: the accept rule.
        tree: what is drafted; of trees that grow, the bound that steps are planned with.
        growth: how trees grow, if they do.
        target_features: which target states are read: -1 the final one, j the hidden state after j layers.
        draft_vocabulary: tokens the drafter can propose; 0 = all of the target's.
        longest: tokens of the longest text that is drafted for; 0 = no limit of its own.
        notes: every decision that was taken while reading the checkpoint.
    """

    method: str = "none"
    first: str | None = None
    checkpoint: str | None = None
    evidence: str = ""
    acceptance: str = "match"
    tree: Tree = Tree((-1,))  # noqa: RUF009  (frozen)
    growth: Growth | None = None
    target_features: tuple[int, ...] = ()
    draft_vocabulary: int = 0
    longest: int = 0
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, object]:
        """The same as JSON can hold it."""
        grown = self.growth
        return {
            "method": self.method if self.first is None else f"{self.first}+{self.method}",
            "checkpoint": self.checkpoint,
            "evidence": self.evidence,
            "acceptance": self.acceptance,
            "tree": {
                "kind": "grown" if grown else "chain" if self.tree.is_chain else "static",
                "parents": list(self.tree.parents),
                "ranks": list(self.tree.ranks),
                "drafted_tokens": self.tree.nodes - 1,
                "depth": self.tree.depth,
                "top_k": None if grown is None else grown.top_k,
            },
            "target_features": list(self.target_features),
            "draft_vocabulary": self.draft_vocabulary or None,
            "longest_drafted_text": self.longest or None,
            "notes": list(self.notes),
        }
