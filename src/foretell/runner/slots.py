"""Slots: everything the device knows of the running requests, one row each. The host sends rows in, never reads back.

Invariants:
- `tokens[s, :length[s]]` is the committed text, the pending last token included (its KV is not yet computed);
- target KV is valid for key indices below `length - 1`; whatever lies beyond is garbage by definition, so that a
  rejection needs no undo: it is simply not advancing `length`;
- `draft[s]` belongs to the tree that the plan names for the next step; -1 is a missing draft and matches nothing;
- the last row is the dummy row of padded batches: never live, its block table is all null blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foretell.ops.meta import SlotArrays
from foretell.runner.plan import NewBlocks, NewSlot
from foretell.sampling_params import SamplingParams
from foretell.spec.processors import History, Law, Mode

STOP_IDS = 32  # stop tokens a request may have on the device, the model's own end tokens included


@dataclass(frozen=True, slots=True)
class SlotSizes:
    """How large the arrays are."""

    slots: int  # S, running requests at once
    length: int  # L, committed tokens of a request, max_model_len
    blocks: int  # M, width of the block table
    nodes: int  # N, nodes of the largest tree
    depth: int  # D, of the deepest tree
    features: int  # F, width of a target feature, 0 = the drafter reads none
    vocabulary: int  # V
    drafted: int  # longest text that is drafted for


class Slots:
    """The arrays; see the module's invariants. Rows are written by `admit`, `extend_blocks` and the step functions."""

    def __init__(self, sizes: SlotSizes, dtype: torch.dtype, device: torch.device) -> None:
        self.sizes = sizes
        self.device = device
        rows = sizes.slots + 1
        self.tokens = self._ints(
            rows, sizes.length + sizes.depth + 2, dtype=torch.int32
        )  # last column: trash
        self.length = self._ints(rows) + 1  # never 0: the pending token is at `length - 1`
        self.prompt_length = self._ints(rows)
        self.limit = self._ints(rows)
        self.live = torch.zeros(rows, dtype=torch.bool, device=device)
        self.blocks = self._ints(rows, sizes.blocks, dtype=torch.int32)
        self.stop = self._ints(rows, STOP_IDS) - 1
        self.seed = self._ints(rows)
        self.temperature = self._floats(rows, 0.0)
        self.top_k = self._ints(rows)
        self.top_p = self._floats(rows, 1.0)
        self.min_p = self._floats(rows, 0.0)
        self.repetition = self._floats(rows, 1.0)
        self.frequency = self._floats(rows, 0.0)
        self.presence = self._floats(rows, 0.0)
        self.min_tokens = self._ints(rows)
        self.draft = self._ints(rows, sizes.nodes) - 1
        self.most_drafted = self._ints(rows)  # levels of a draft that the request wants
        self.least_match = self._ints(rows)  # tokens of context that a look-up must match for it
        self.draft_parents: Tensor | None = None  # [S + 1, N], only for dynamic trees
        self.draft_probs: Tensor | None = (
            None  # [S + 1, N, V], only for `rejection` with a drawing drafter
        )
        self.seen = self._ints(rows)  # of slots whose drafter rests: tokens that it was shown
        self.feature = torch.zeros(rows, sizes.features, dtype=dtype, device=device)
        self.bias: Tensor | None = None  # [S + 1, V], from the first request that needs it
        self.bad_words: Tensor | None = None  # [S + 1, W, K], likewise

        self.arrays = SlotArrays(
            self.tokens, self.length, self.limit, self.live, self.stop, self.blocks
        )

    def _ints(self, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def _floats(self, rows: int, value: float) -> Tensor:
        return torch.full((rows,), value, dtype=torch.float32, device=self.device)

    def admit(self, news: Sequence[NewSlot]) -> None:
        """Fill the rows of requests that enter them; everything of the previous owners is overwritten."""
        if not news:
            return
        for new in news:
            count = len(new.tokens)
            assert count <= self.sizes.length, (count, self.sizes.length)
            self.tokens[new.slot, :count] = self._send(new.tokens, torch.int32)
        rows = self._send([new.slot for new in news], torch.int64)
        ints = self._send([self._numbers(new) for new in news], torch.int64).unbind(1)
        arrays = (self.length, self.prompt_length, self.limit, self.seed, self.top_k)
        wishes = (self.min_tokens, self.most_drafted, self.least_match)
        for array, values in zip((*arrays, *wishes), ints, strict=True):
            array[rows] = values
        floats = self._send([_fractions(new.params) for new in news], torch.float32).unbind(1)
        weights = (self.repetition, self.frequency, self.presence)
        for array, values in zip(
            (self.temperature, self.top_p, self.min_p, *weights), floats, strict=True
        ):
            array[rows] = values
        self.stop[rows] = self._send([_padded(new.stop_ids) for new in news], torch.int64)
        self.live[rows] = True
        self.blocks[rows] = 0
        self.draft[rows] = -1
        self.feature[rows] = 0
        for new in news:
            self._set_bias(new)
            self._set_bad_words(new)

    def _numbers(self, new: NewSlot) -> list[int]:
        """The integers of a row, in the order that `admit` takes them in."""
        params, depth = new.params, self.sizes.depth
        most = params.num_speculative_tokens
        return [
            len(new.tokens),
            new.prompt_length,
            new.limit,
            new.seed,
            min(params.top_k, self.sizes.vocabulary),
            min(params.min_tokens, new.limit),
            depth if most is None else min(most, depth),
            min(params.prompt_lookup_min or 0, self.sizes.length),
        ]

    def extend_blocks(self, news: Sequence[NewBlocks]) -> None:
        """Write entries of block tables; one copy for all of them."""
        if not news:
            return
        entries = [
            (new.slot, new.start + place, block)
            for new in news
            for place, block in enumerate(new.blocks)
        ]
        slots, places, ids = self._send(entries, torch.int64).unbind(1)
        self.blocks[slots, places] = ids.to(torch.int32)

    def _send(self, values: Sequence[object], dtype: torch.dtype) -> Tensor:
        """Host numbers on the device; a copy from pinned memory waits for nothing."""
        host = torch.tensor(values, dtype=dtype)
        if self.device.type != "cuda":
            return host.to(self.device)
        return host.pin_memory().to(self.device, non_blocking=True)

    def _set_bias(self, new: NewSlot) -> None:
        params = new.params
        wanted = bool(params.logit_bias) or params.allowed_token_ids is not None
        if self.bias is None:
            if not wanted:
                return
            self.bias = torch.zeros(self.sizes.slots + 1, self.sizes.vocabulary, device=self.device)
        row = self.bias[new.slot]
        row.zero_()
        if params.allowed_token_ids is not None:
            row.fill_(-torch.inf)
            row[torch.tensor(params.allowed_token_ids, device=self.device)] = 0.0
        for token, value in (params.logit_bias or {}).items():
            row[token] += value

    def _set_bad_words(self, new: NewSlot) -> None:
        words = new.bad_words
        if self.bad_words is None and not words:
            return
        have = (
            self.bad_words
            if self.bad_words is not None
            else self._ints(self.sizes.slots + 1, 1, 1) - 1
        )
        count = max(len(words), have.shape[1])
        longest = max([len(word) for word in words] + [have.shape[2]])
        table = torch.full(
            (have.shape[0], count, longest), -1, dtype=torch.int64, device=self.device
        )
        table[:, : have.shape[1], longest - have.shape[2] :] = have
        table[new.slot] = -1
        for place, word in enumerate(words):
            table[new.slot, place, longest - len(word) :] = torch.tensor(word, device=self.device)
        self.bad_words = table

    def law(self, rows: Tensor, mode: Mode) -> Law:
        """Sampling parameters of `rows` ([B] int64). Of greedy rows nobody reads more: they get the dummy's."""
        parts = (self.seed, self.temperature, self.top_k, self.top_p, self.min_p)
        if mode.sampled:
            return Law(*(part[rows] for part in parts))
        return Law(*(part[-1:].expand(rows.shape[0]) for part in parts))

    def history(self, rows: Tensor, keys: int, mode: Mode) -> History:
        """Committed text (if `mode` reads it; nothing at or beyond index `keys`) and parameters of `rows`."""
        width = keys if mode.penalties or mode.bad_words else 0
        return History(
            tokens=self.tokens[rows, :width],
            length=self.length[rows],
            prompt_length=self.prompt_length[rows],
            repetition=self.repetition[rows],
            frequency=self.frequency[rows],
            presence=self.presence[rows],
            min_tokens=self.min_tokens[rows],
            stop=self.stop[rows],
            bias=None if self.bias is None else self.bias[rows],
            bad_words=None if self.bad_words is None else self.bad_words[rows],
        )


def _fractions(params: SamplingParams) -> list[float]:
    """The floating numbers of a row, in the order that `Slots.admit` takes them in."""
    return [
        params.temperature,
        params.top_p,
        params.min_p,
        params.repetition_penalty,
        params.frequency_penalty,
        params.presence_penalty,
    ]


def _padded(ids: tuple[int, ...]) -> list[int]:
    assert len(ids) <= STOP_IDS, (len(ids), STOP_IDS)
    return [*ids, *[-1] * (STOP_IDS - len(ids))]
