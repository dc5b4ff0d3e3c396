"""One request driven through a drafter by the protocol alone: prompt chunks, windows of accepted tokens, drafts.

Target features are random, so that a network can be compared row by row; the KV is poisoned first, and places that a
window must not write are checked by what later rows see.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from foretell.model.decoder import Decoder
from foretell.ops.meta import LayerKV, Meta, RaggedRows, flat_slots
from foretell.spec.autoregressive import Autoregressive, Net
from foretell.spec.drafter import Draft, Drafter, KVView, PromptRows, Window
from foretell.spec.nodes import Shape, static_shape
from foretell.spec.processors import Law, Mode
from foretell.spec.tree import Tree

BLOCK = 4
BLOCKS = 40
CPU = torch.device("cpu")


def law(rows: int = 1, temperature: float = 0.0, seed: int = 5) -> Law:
    return Law(
        seed=torch.arange(rows) + seed,
        temperature=torch.full((rows,), temperature),
        top_k=torch.zeros(rows, dtype=torch.int64),
        top_p=torch.ones(rows),
        min_p=torch.zeros(rows),
    )


@dataclass
class Seen:
    """A network's outputs, in the order of its calls."""

    net: Net
    ingested: list[Tensor] = field(default_factory=list)
    extended: list[Tensor] = field(default_factory=list)

    def ingest(
        self, tokens: Tensor, features: Tensor | None, meta: Meta, kv: Sequence[LayerKV]
    ) -> Tensor:
        self.ingested.append(self.net.ingest(tokens, features, meta, kv))
        return self.ingested[-1]

    def extend(self, tokens: Tensor, above: Tensor, meta: Meta, kv: Sequence[LayerKV]) -> Tensor:
        self.extended.append(self.net.extend(tokens, above, meta, kv))
        return self.extended[-1]

    def logits(self, hidden: Tensor) -> Tensor:
        return self.net.logits(hidden)


class Request:
    """A request in slot 0 with blocks in a scrambled order."""

    def __init__(self, drafter: Drafter, target: Decoder, width: int, poison: float = 1e4) -> None:
        self.drafter = drafter
        self.width = width
        self.view: KVView | None = None
        if drafter.kv is not None:
            shape = (BLOCKS, BLOCK, drafter.kv.heads, drafter.kv.head_dim)
            pages = [
                LayerKV(
                    torch.full(shape, poison, dtype=torch.float64),
                    torch.full(shape, poison, dtype=torch.float64),
                )
                for _ in range(drafter.kv.layers)
            ]
            self.view = KVView(tuple(pages), BLOCK)
        drafter.bind(target, self.view)
        self.seen: Seen | None = None
        procedure = getattr(drafter, "_procedure", None)
        if isinstance(procedure, Autoregressive):
            self.seen = Seen(procedure.net)
            procedure.net = self.seen
        order = torch.randperm(BLOCKS - 1, generator=torch.Generator().manual_seed(2)) + 1
        self.blocks = order.to(torch.int32).unsqueeze(0)
        self.tokens: list[int] = []

    def observe(self, tokens: Sequence[int], before: Tensor | None) -> None:
        """A prompt chunk; `before` [R, F] are the features before its tokens."""
        start, count = len(self.tokens), len(tokens)
        place = torch.arange(start, start + count)
        meta = RaggedRows(
            positions=place,
            kv_slots=flat_slots(
                self.blocks, place.unsqueeze(0), BLOCK, torch.ones(1, count, dtype=torch.bool)
            ).squeeze(0),
            blocks=self.blocks,
            starts=torch.tensor([start]),
            offsets=torch.tensor([0, count]),
            lengths=((start, count),),
        )
        self.tokens += tokens
        self.drafter.observe(PromptRows(torch.tensor(tokens), before, meta))

    def window(
        self,
        tokens: Sequence[int],
        features: Tensor | None,
        rule: Law | None = None,
        rows: int | None = None,
    ) -> Window:
        """The window of newly committed tokens, padded with junk to `rows` rows."""
        rows = rows or self.width
        count, start = len(tokens), len(self.tokens)
        junk = torch.full((rows - count,), 7)
        if features is not None:
            rubbish = torch.full((rows - count, features.shape[-1]), 1e3, dtype=features.dtype)
            features = torch.cat((features, rubbish)).unsqueeze(0)
        self.tokens += tokens
        text = torch.zeros(1, BLOCKS * BLOCK, dtype=torch.int32)
        text[0, : len(self.tokens)] = torch.tensor(self.tokens, dtype=torch.int32)
        rule = rule or law()
        return Window(
            slots=torch.tensor([0]),
            tokens=torch.cat((torch.tensor(tokens), junk)).unsqueeze(0),
            start=torch.tensor([start]),
            count=torch.tensor([count]),
            features=features,
            live=torch.tensor([True]),
            blocks=self.blocks,
            text=text,
            law=rule,
            mode=Mode(sampled=bool((rule.temperature > 0).any())),
            keys=len(self.tokens) + rows + 66,
        )

    def propose(
        self,
        tokens: Sequence[int],
        features: Tensor | None,
        tree: Tree | Shape,
        rule: Law | None = None,
    ) -> Draft:
        shape = static_shape(tree, CPU) if isinstance(tree, Tree) else tree
        return self.drafter.propose(self.window(tokens, features, rule), shape)


class NoHost(TorchDispatchMode):
    """Refuses operations whose result, or its shape, the host would have to wait for."""

    REFUSED = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2")

    def __torch_dispatch__(
        self, func: object, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> object:  # type: ignore[type-arg]
        name = str(func).split(".")[1]
        assert name not in self.REFUSED, f"{func} waits for the device"
        return func(*args, **(kwargs or {}))  # type: ignore[operator]
