"""Runner: turns plans into steps on the device. Knows tensors and slots, not requests.

`launch` and `draft` never wait for the device; what a step decided comes back through its Ticket. A step's drafter part
is separate from its target part, so that first tokens leave before any draft is made.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from foretell.ops.meta import RaggedRows, flat_slots
from foretell.runner import outbox
from foretell.runner.graphs import Captured, StepGraphs
from foretell.runner.kv import clear_blocks
from foretell.runner.outbox import Parcel, PromptParcel, Ticket
from foretell.runner.plan import Chunk, NewBlocks, NewSlot, Plan
from foretell.runner.step import (
    CATCH_UP,
    Device,
    Outcome,
    Prefilled,
    catch_up,
    decide,
    decode_step,
    draft_step,
    gather_nodes,
    keep_trail,
    new_trail,
    prefill_step,
    top_logprobs,
)
from foretell.spec import grammar
from foretell.spec.drafter import Learner, NoDrafter, PromptRows
from foretell.spec.grammar import Follower, Grammars
from foretell.spec.nodes import Nodes, Shape, static_shape
from foretell.spec.processors import Mode
from foretell.spec.tree import Tree, chain


@dataclass(slots=True)
class _Drafting:
    """What the drafter's part of the last launched step needs."""

    prompt: PromptRows | None
    slots: list[int]
    outcomes: list[Outcome]
    replayed: Captured | None = None  # the graph that decoded, if one did


class Runner:
    """Executes plans.

    Args:
        device: weights, slots, KV and drafter.
        trees: the trees that plans refer to by index.
        eager: no CUDA graphs; on a CPU there are none anyway.
        learner: hears the texts of requests that ended.
        traced: every step reports what was verified, with probabilities.
    """

    def __init__(
        self,
        device: Device,
        trees: Sequence[Tree],
        eager: bool = False,
        learner: Learner | None = None,
        traced: bool = False,
    ) -> None:
        self.device = device
        self._learner = learner
        self._traced = traced
        self.shapes: tuple[Shape, ...] = tuple(
            static_shape(tree, device.slots.device) for tree in trees
        )
        self._root = static_shape(chain(0), device.slots.device)
        captures = device.slots.device.type == "cuda" and not eager
        self.graphs = StepGraphs(device, self.shapes, captures)
        self.grammars: Grammars | None = None  # whoever has the tokenizer brings them
        # Of the slots whose request has a grammar; rank 0 follows it and tells the others what is allowed.
        self._followers: dict[int, Follower | None] = {}
        self._asked: dict[int, NewSlot] = {}  # what each occupied slot's request asked for
        self._drafting = _Drafting(prompt=None, slots=[], outcomes=[])
        self._drafted: dict[int, int] = {}  # slots with a draft, and the tree it was made for
        self._unseen: dict[
            int, int
        ] = {}  # slots the drafter rests for: most tokens it has not seen
        self._trail: Tensor | None = None  # [S + 1, CATCH_UP + 1, F], features of those tokens
        self._dirty = False

    @torch.inference_mode()
    def launch(self, plan: Plan) -> Ticket:
        """Start the target's part of a step: admissions, prompt chunks, verification, commit."""
        slots = self.device.slots
        if self._learner is not None:
            for text in plan.past:
                self._learner.learn(torch.tensor(text, dtype=torch.int32))
        slots.admit(plan.new)
        for new in plan.new:
            self._asked[new.slot] = new
            self._drafted.pop(new.slot, None)
            self._unseen.pop(new.slot, None)
            self._follow(new)
        slots.extend_blocks(plan.new_blocks)
        if self._dirty:
            for blocks in plan.new_blocks:
                clear_blocks(
                    (*self.device.kv.target, *self.device.kv.drafter), self._fresh(plan, blocks)
                )
        parcels: list[Parcel] = []
        prompts: list[PromptParcel] = []
        self._drafting = _Drafting(prompt=None, slots=[], outcomes=[])
        self._recall_features([new for new in plan.new if new.cached > 0])
        if plan.chunks:
            self._prefill(plan.chunks, parcels, prompts)
        if plan.decode:
            self._drop_stale(plan)
            self._keep(plan.decode, self._decode(plan), parcels)
        return Ticket(plan.step, parcels, prompts, self._event())

    @torch.inference_mode()
    def draft(self, plan: Plan, ended: Collection[int]) -> bool | None:
        """Run the drafter's part of the step just launched, less the slots that need no draft.

        Returns:
            Whether any token was drafted for the next step; None where only the device knows.
        """
        drafter, work = self.device.drafter, self._drafting
        shape = self.shapes[plan.next_tree]
        if isinstance(drafter, NoDrafter):
            return False
        if work.prompt is not None:
            drafter.observe(work.prompt)
        left = [s for s in work.slots if s not in plan.undrafted and s not in ended]
        if not left or (shape.tree.nodes == 1 and drafter.kv is None):
            return False
        if plan.rest:
            self._rest(left, plan)
            return False
        self._drafted.update(dict.fromkeys(left, plan.next_tree))
        late = self._catch_up(left, plan)
        if work.replayed is not None and left == list(plan.decode) and not late:
            self.graphs.draft(work.replayed, plan.next_tree, self._mode(left))
            return None
        outcome = _merge(work.outcomes)
        if len(left) < len(work.slots):
            outcome = _select(outcome, self._rows([work.slots.index(s) for s in left]))
        keys = max(plan.keys, max((c.start + c.count for c in plan.chunks), default=0))
        keys += outcome.tokens.shape[1] + shape.tree.nodes
        draft = draft_step(self.device, self._rows(left), outcome, shape, self._mode(left), keys)
        return bool((draft.tokens >= 0).any()) if draft.tokens.device.type == "cpu" else None

    def _decode(self, plan: Plan) -> Outcome:
        rows, mode = self._rows(plan.decode), self._mode(plan.decode)
        shape = self.shapes[plan.tree]
        allowed = None
        if any(slot in self._followers for slot in plan.decode):
            allowed = self._allowed(plan.decode, gather_nodes(self.device, rows, shape)[0])
        if allowed is not None or not self.graphs.covers(len(plan.decode), mode):
            return decode_step(self.device, rows, shape, mode, plan.keys, allowed)
        self._drafting.replayed, outcome = self.graphs.decode(rows, plan.tree, mode)
        return outcome

    def _drop_stale(self, plan: Plan) -> None:
        """Drafts made for another tree, or verified before, are dropped: a draft is verified once, as what it is."""
        tree = self.shapes[plan.tree].tree
        made = [self._drafted.pop(slot, None) for slot in plan.decode]
        if tree.nodes == 1:
            return
        stale = [s for s, m in zip(plan.decode, made, strict=True) if not self._fits(m, plan.tree)]
        if stale:
            self.device.slots.draft[self._rows(stale)] = -1

    def _fits(self, made: int | None, tree: int) -> bool:
        """A draft made for one tree can be verified as another: nodes that both have are the same ones."""
        if made is None or made == tree:
            return made is not None
        small, large = sorted(
            (self.shapes[made].tree, self.shapes[tree].tree), key=lambda t: t.nodes
        )
        return self.device.slots.draft_parents is None and small.begins(large)

    def _rest(self, left: Sequence[int], plan: Plan) -> None:
        """Remember what the drafter is not shown; of features there is room for CATCH_UP, then it is shown them."""
        work = self._drafting
        outcome = _merge(work.outcomes)
        width = outcome.tokens.shape[1]
        kept = outcome.features is not None
        if kept and max(self._unseen.get(slot, 0) for slot in left) + width > CATCH_UP:
            self._catch_up(left, plan)
        fresh = [slot for slot in left if slot not in self._unseen]
        if fresh:
            places = self._rows([work.slots.index(slot) for slot in fresh])
            self.device.slots.seen[self._rows(fresh)] = outcome.start[places]
        for slot in left:
            self._unseen[slot] = self._unseen.get(slot, 0) + width
        if kept:
            if self._trail is None:
                self._trail = new_trail(self.device.slots)
            places = self._rows([work.slots.index(slot) for slot in left])
            keep_trail(self.device.slots, self._trail, self._rows(left), _select(outcome, places))

    def _catch_up(self, left: Sequence[int], plan: Plan) -> bool:
        """Show the drafter what it missed before this step; whether there was anything."""
        late = [slot for slot in left if slot in self._unseen]
        if not late:
            return False
        most = max(self._unseen.pop(slot) for slot in late)
        work = self._drafting
        places = self._rows([work.slots.index(slot) for slot in late])
        until = _merge(work.outcomes).start[places]
        keys = max(plan.keys, max((c.start + c.count for c in plan.chunks), default=0))
        shape, mode = self._root, self._mode(late)
        catch_up(self.device, self._rows(late), until, most, self._trail, shape, mode, keys)
        return True

    def drop_drafts(self, slots: Collection[int]) -> None:
        """The drafter failed for these slots: what they hold is no draft."""
        self.device.slots.draft[self._rows(sorted(slots))] = -1

    def _fresh(self, plan: Plan, blocks: NewBlocks) -> tuple[int, ...]:
        """Those of a slot's new blocks that hold nothing yet: a prefix-cache hit brings blocks that do."""
        cached = next((new.cached for new in plan.new if new.slot == blocks.slot), 0)
        held = -(-cached // self.device.kv.block_size)
        return blocks.blocks[max(0, held - blocks.start) :]

    def note_error(self) -> None:
        """A NaN was seen: blocks handed out from now on are cleared first."""
        self._dirty = True

    def _recall_features(self, hits: Sequence[NewSlot]) -> None:
        """After a prefix-cache hit of h tokens, the target feature of token h - 1 is missing: run that token again.

        Its KV is in the cache, so nothing is written; entry h of the drafter's KV becomes what it is without a hit.
        """
        taps = self.device.drafter.features
        if not hits or not taps:
            return
        chunks = [Chunk(new.slot, new.cached - 1, 1, last=False) for new in hits]
        rows = self._rows([new.slot for new in hits])
        row_slots, positions, meta = self._chunk_rows(chunks, rows)
        meta = replace(meta, kv_slots=torch.zeros_like(meta.kv_slots))
        tokens = self.device.slots.tokens[row_slots, positions].to(torch.int64)
        _, features = self.device.target(tokens, meta, self.device.kv.target, taps)
        self.device.slots.feature[rows] = features

    def _prefill(
        self, chunks: Sequence[Chunk], parcels: list[Parcel], prompts: list[PromptParcel]
    ) -> None:
        rows = self._rows([c.slot for c in chunks])
        done = prefill_step(self.device, rows, *self._chunk_rows(chunks, rows))
        self._drafting.prompt = done.prompt
        self._prompt_logprobs(chunks, done, prompts)
        last = [i for i, c in enumerate(chunks) if c.last]
        if not last:
            return
        slots = tuple(chunks[i].slot for i in last)
        picked = self._rows(last)
        keys = max(chunks[i].start + chunks[i].count for i in last)
        features = None if done.features is None else done.features[picked]
        hidden = done.hidden[done.ends[picked]].unsqueeze(1)
        nodes = self._roots(self._rows(slots))
        outcome = decide(
            self.device,
            self._rows(slots),
            nodes,
            hidden,
            features,
            self._mode(slots),
            keys,
            self._allowed(slots, nodes),
        )
        self._keep(slots, outcome, parcels)

    def _roots(self, rows: Tensor) -> Nodes:
        slots = self.device.slots
        last = (slots.length[rows] - 1).unsqueeze(1)
        return Nodes(self._root, slots.tokens[rows.unsqueeze(1), last].to(torch.int64), last)

    def _chunk_rows(
        self, chunks: Sequence[Chunk], rows: Tensor
    ) -> tuple[Tensor, Tensor, RaggedRows]:
        """(slot of each row [R], position of each row [R], what attention must know)."""
        slots = self.device.slots
        counts = self._rows([c.count for c in chunks])
        starts = self._rows([c.start for c in chunks])
        offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
        total = sum(c.count for c in chunks)
        place = torch.arange(total, device=slots.device)
        owner = torch.repeat_interleave(counts, output_size=total)
        positions = place - offsets[owner] + starts[owner]
        row_slots = rows[owner]
        size = self.device.kv.block_size
        kv_slots = flat_slots(
            slots.blocks[row_slots],
            positions.unsqueeze(1),
            size,
            slots.live[row_slots].unsqueeze(1),
        )
        meta = RaggedRows(
            positions=positions,
            kv_slots=kv_slots.squeeze(1),
            blocks=slots.blocks[rows],
            starts=starts,
            offsets=offsets,
            lengths=tuple((c.start, c.count) for c in chunks),
        )
        return row_slots, positions, meta

    def _prompt_logprobs(
        self, chunks: Sequence[Chunk], done: Prefilled, prompts: list[PromptParcel]
    ) -> None:
        """Log-probabilities of the prompt tokens that follow each row of the chunks that want them."""
        slots, offset = self.device.slots, 0
        for chunk in chunks:
            wanted = self._asked[chunk.slot].params.prompt_logprobs
            rows = (
                chunk.count - chunk.last
            )  # the row of the last prompt token speaks of no prompt token
            if wanted is not None and rows > 0:
                first = chunk.start + 1
                chosen = slots.tokens[chunk.slot, first : first + rows].to(torch.int64)
                logits = self.device.target.logits(done.hidden[offset : offset + rows])
                count = logits.shape[-1] if wanted < 0 else wanted
                prompts.append(PromptParcel(chunk.slot, top_logprobs(logits, chosen, count)))
            offset += chunk.count

    def _keep(self, slots: Sequence[int], outcome: Outcome, parcels: list[Parcel]) -> None:
        self._drafting.slots.extend(slots)
        self._drafting.outcomes.append(outcome)
        if not self.device.group.first:
            return  # the host is rank 0's
        wanted = tuple(self._wanted_logprobs(s) for s in slots)
        reports = tuple(self._traced or self._asked[s].params.report_drafts for s in slots)
        parcels.append(outbox.pack(tuple(slots), outcome, wanted, reports))

    def _follow(self, new: NewSlot) -> None:
        """The grammar of a request that enters a slot starts anew; what the request has said is read in its step."""
        self._followers.pop(new.slot, None)
        wanted = new.params.structured_outputs
        if wanted is not None and not self.device.group.first:
            self._followers[new.slot] = None
        elif wanted is not None:
            assert self.grammars is not None, "a grammar without a tokenizer: refused by Engine.add"
            self._followers[new.slot] = self.grammars.follow(wanted)

    def _allowed(self, slots: Sequence[int], nodes: Nodes) -> Tensor | None:
        """[B, N, V] bool, what may follow each node; None where no slot has a grammar.

        The grammar is followed on the host, so these steps wait for the device: committed text and drafts are read.
        """
        if not any(slot in self._followers for slot in slots):
            return None
        device, rows = self.device.slots, self._rows(slots)
        lengths, tokens = device.length[rows].tolist(), nodes.tokens.tolist()
        parents = nodes.shape.parents.expand_as(nodes.tokens).tolist()
        vocabulary = device.sizes.vocabulary
        masks = torch.full(
            (*nodes.tokens.shape, -(-vocabulary // grammar.WORD)), -1, dtype=torch.int32
        )
        for row, slot in enumerate(slots):
            follower = self._followers.get(slot)
            if follower is not None:
                start = self._asked[slot].prompt_length + follower.seen
                follower.advance(device.tokens[slot, start : lengths[row]].tolist())
                masks[row] = follower.masks(tokens[row], parents[row])
        shared = self.device.group.share(masks.to(device.device))
        return grammar.allowed(shared, vocabulary)

    def _wanted_logprobs(self, slot: int) -> int:
        wanted = self._asked[slot].params.logprobs
        if wanted is None:
            return -1
        return self.device.slots.sizes.vocabulary if wanted < 0 else wanted

    def _mode(self, slots: Sequence[int]) -> Mode:
        """The parts of sampling that these slots need."""
        asked = [self._asked[s] for s in slots]
        params = [new.params for new in asked]
        return Mode(
            sampled=any(p.temperature > 0 for p in params),
            filtered=any(p.top_p < 1 or p.top_k > 0 or p.min_p > 0 for p in params),
            penalties=any(
                p.repetition_penalty != 1 or p.frequency_penalty != 0 or p.presence_penalty != 0
                for p in params
            ),
            bias=any(p.logit_bias or p.allowed_token_ids is not None for p in params),
            bad_words=any(new.bad_words for new in asked),
            min_tokens=any(p.min_tokens > 0 for p in params),
            logprobs=max(self._wanted_logprobs(s) for s in slots),
            traced=self._traced,
            lookups=any(p.prompt_lookup_min is not None for p in params),
        )

    def _rows(self, values: Sequence[int]) -> Tensor:
        """Host integers on the device; a copy from pinned memory does not wait for the steps before it."""
        host = torch.tensor(values, dtype=torch.int64)
        device = self.device.slots.device
        return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host

    def _event(self) -> torch.cuda.Event | None:
        if self.device.slots.device.type != "cuda":
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event


def _select(outcome: Outcome, rows: Tensor) -> Outcome:
    return replace(
        outcome,
        tokens=outcome.tokens[rows],
        count=outcome.count[rows],
        start=outcome.start[rows],
        features=None if outcome.features is None else outcome.features[rows],
    )


def _merge(outcomes: Sequence[Outcome]) -> Outcome:
    """One outcome of all rows, padded to the widest; only what the drafter reads is merged."""
    if len(outcomes) == 1:
        return outcomes[0]
    width = max(o.tokens.shape[1] for o in outcomes)
    features = None
    if all(o.features is not None for o in outcomes):
        features = torch.cat(
            [_widen(o.features, width) for o in outcomes if o.features is not None]
        )
    return replace(
        outcomes[0],
        tokens=torch.cat([_widen(o.tokens, width) for o in outcomes]),
        count=torch.cat([o.count for o in outcomes]),
        start=torch.cat([o.start for o in outcomes]),
        features=features,
    )


def _widen(tensor: Tensor, width: int) -> Tensor:
    """Pad dimension 1 with zeros up to `width`."""
    missing = width - tensor.shape[1]
    if missing == 0:
        return tensor
    padding = tensor.new_zeros(tensor.shape[0], missing, *tensor.shape[2:])
    return torch.cat((tensor, padding), dim=1)
