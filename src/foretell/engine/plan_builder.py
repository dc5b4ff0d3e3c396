"""PlanBuilder: a plan under construction. It writes down what the scheduler decides and decides nothing itself.

Invariant: a request has at most one part in a plan, and the parts cost what `budget` has lost.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from foretell.engine.request import Request
from foretell.runner.plan import Chunk, NewBlocks, NewSlot, Plan
from foretell.spec.tree import Tree


@dataclass(frozen=True, slots=True)
class Entry:
    """One request's part in one launched step."""

    request: Request
    slot: int
    most: int  # tokens it may emit; 0 for a chunk that is not the last
    start: int  # first token of its chunk; 0 for a decoding row
    drafted: bool  # the drafter sees what it commits, now or when it has rested
    verified: int  # the tree that a draft was wanted for and is verified as; -1 = none was


@dataclass(slots=True)
class PlanBuilder:
    """Collects the parts of step `step`."""

    step: int
    budget: int  # tokens left
    tree: int
    next_tree: int
    tail: int  # key indices the next draft may need past the committed length
    drafted_length: int  # longest text that is drafted for
    found: bool = True  # the drafter found something in the step before
    rest: bool = False  # the drafter rests in this step
    keys: int = 0
    new: list[NewSlot] = field(default_factory=list)
    new_blocks: list[NewBlocks] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    decoding: list[int] = field(default_factory=list)
    undrafted: set[int] = field(default_factory=set)
    entries: list[Entry] = field(default_factory=list)
    past: list[tuple[int, ...]] = field(default_factory=list)
    promised: set[bytes] = field(default_factory=set)  # hashes of blocks that the chunks will fill

    def admit(self, request: Request) -> None:
        """The request enters its slot, with the blocks it has."""
        new = NewSlot(
            slot=request.slot,
            tokens=tuple(request.tokens),
            prompt_length=request.prompt_length,
            limit=request.limit,
            params=request.params,
            seed=request.seed,
            cached=request.computed,
            stop_ids=request.stop_ids,
            bad_words=request.bad_words,
        )
        self.new.append(new)
        self.new_blocks.append(NewBlocks(request.slot, 0, tuple(request.blocks)))

    def grow(self, request: Request, fresh: list[int]) -> None:
        """The request's table gets longer."""
        self.new_blocks.append(NewBlocks(request.slot, len(request.blocks), tuple(fresh)))
        request.blocks.extend(fresh)

    def chunk(self, request: Request, count: int) -> None:
        """The next `count` of the request's tokens are computed."""
        start = request.computed
        request.computed += count
        request.ingested = request.computed
        last = request.computed == request.target
        self.chunks.append(Chunk(request.slot, start, count, last))
        self.budget -= count
        self._enter(request, request.target + 1, most=int(last), start=start, verified=-1)

    def decode(self, request: Request, tree: Tree) -> None:
        """The request verifies its draft."""
        self.decoding.append(request.slot)
        self.budget -= tree.nodes
        wanted = request.draft_tree
        # Where the drafter found nothing the step verifies nothing, but a draft was wanted.
        verified = self.tree if self.found and wanted >= 0 else wanted
        self._enter(request, request.low + 1, most=tree.depth + 1, start=0, verified=verified)

    def _enter(self, request: Request, low: int, most: int, start: int, verified: int) -> None:
        """`low` is the least length after the step, if the request emits in it."""
        # With room for one token or none there is nothing to draft. Lengths only grow: who gets no draft any more
        # never gets one again, and its drafter's KV may end here.
        room = low < min(request.limit - 1, self.drafted_length)
        drafted = request.params.speculates and request.drafts and room
        if most and not drafted:
            self.undrafted.add(request.slot)
        self.entries.append(Entry(request, request.slot, most, start, drafted, verified))
        request.in_flight.append(most)
        request.served = self.step

    @property
    def drafts_nothing(self) -> bool:
        """Requests emit in this step, and none of them gets a draft."""
        return bool(self.undrafted) and all(
            e.slot in self.undrafted for e in self.entries if e.most
        )

    def close(self) -> Plan:
        """The finished plan."""
        return Plan(
            step=self.step,
            new=tuple(self.new),
            new_blocks=tuple(self.new_blocks),
            chunks=tuple(self.chunks),
            decode=tuple(self.decoding),
            tree=self.tree,
            next_tree=self.next_tree,
            keys=self.keys,
            undrafted=frozenset(self.undrafted),
            rest=self.rest,
            past=tuple(self.past),
        )
