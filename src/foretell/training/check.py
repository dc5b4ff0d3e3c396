"""How well a drafter does in the engine itself: acceptance by position on prompts it never saw, and what that is worth.

The drafter is loaded from its files, as a user would load it. Acceptance does not depend on the machine (up to
near-ties); the cost of a step does, and together they predict the speed-up at one request.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretell.config import DraftCheckpoint, EngineConfig, TreeSpec
from foretell.engine.build import engine_around
from foretell.engine.engine import Engine
from foretell.model.hub import Kind, ModelSource
from foretell.model.load import load_model
from foretell.runner.build import Parts, assemble
from foretell.sampling_params import SamplingParams
from foretell.spec.autoregressive import DraftModelDrafter
from foretell.spec.checkpoint.load import Wanted, identify, load_drafter
from foretell.spec.checkpoint.recognise import Family
from foretell.spec.drafter import NoDrafter
from foretell.spec.tree_spec import read_tree
from foretell.spec.verify import Acceptance
from foretell.spec.vocabulary import same

if TYPE_CHECKING:
    from foretell.model.decoder import Decoder

KV_BYTES = 2 << 30


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt that is never trained on."""

    category: str
    prompt: tuple[int, ...]


@dataclass(slots=True)
class Accepted:
    """Counts of the steps that had drafts."""

    drafts: int = 0
    emitted: int = 0
    by_position: list[int] = field(default_factory=list)

    def add(self, emitted: int, accepted: int) -> None:
        """One step."""
        self.drafts += 1
        self.emitted += emitted
        self.by_position.extend([0] * (accepted - len(self.by_position)))
        for place in range(accepted):
            self.by_position[place] += 1

    @property
    def mean(self) -> float:
        """Tokens a step with drafts emits, the target's own included."""
        return self.emitted / self.drafts if self.drafts else 1.0

    def record(self) -> dict[str, Any]:
        """As numbers."""
        shares = [round(n / self.drafts, 4) for n in self.by_position] if self.drafts else []
        return {"mean": round(self.mean, 4), "by_position": shares, "drafts": self.drafts}


def measure(
    engine: Engine, questions: Sequence[Question], max_tokens: int
) -> Mapping[str, Accepted]:
    """Greedy answers to all questions at once; counts by category, and for "all"."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, detokenize=False)
    for place, question in enumerate(questions):
        engine.add(str(place), question.prompt, params, seed=place)
    found: dict[str, Accepted] = defaultdict(Accepted)
    while engine.has_work():
        for delta in engine.step():
            if delta.drafted and delta.token_ids:
                category = questions[int(delta.request_id)].category
                for name in (category, "all"):
                    found[name].add(len(delta.token_ids), delta.accepted)
    return dict(found)


class Checker:
    """An engine's target, and what is asked of drafters for it.

    Args:
        target: on the operations that serve.
        questions: prompts never trained on.
        tree: what to draft; None = a chain of `tokens`.
    """

    def __init__(
        self,
        target: Decoder,
        questions: Sequence[Question],
        max_tokens: int = 128,
        tokens: int = 5,
        tree: TreeSpec | None = None,
        max_model_len: int | None = None,
    ) -> None:
        self.target, self.questions, self.max_tokens = target, questions, max_tokens
        self.tokens, self.tree = tokens, tree
        longest = max((len(q.prompt) for q in questions), default=64) + max_tokens + 8
        self.max_model_len = max_model_len or longest

    def engine(self, folder: Path | None, eager: bool = True, requests: int = 64) -> Engine:
        """An engine that drafts with a folder's drafter, or plainly."""
        config = EngineConfig(
            max_model_len=self.max_model_len,
            max_num_seqs=requests,
            max_num_batched_tokens=max(2048, 64 * requests),  # else large trees are not drafted
            kv_cache_memory_bytes=KV_BYTES,
            enforce_eager=eager,
            drafter=None
            if folder is None
            else DraftCheckpoint(
                model=str(folder), num_speculative_tokens=None if self.tree else self.tokens
            ),
            tree=None if folder is None else self.tree,
            adaptive=False,  # what the drafter can do, and not what would be fastest here
        )
        return engine_around(assemble(config, self._parts(folder, config), tokenizer=None), config)

    def _parts(self, folder: Path | None, config: EngineConfig) -> Parts:
        """The target and what drafts for it."""
        if folder is None:
            return Parts(self.target, NoDrafter(), self.target.dtype)
        identified = identify(folder)
        if identified.family is Family.DRAFT_MODEL:
            return self._draft_model(folder)
        tree = None if config.tree is None else read_tree(config.tree, None)
        wanted = Wanted(tree=tree, tokens=self.tokens if tree is None else None)
        loaded = load_drafter(identified, self.target, Acceptance.MATCH, wanted)
        return Parts(
            self.target,
            loaded.drafter,
            self.target.dtype,
            tree=loaded.tree,
            grows=loaded.grows,
            draws=loaded.draws,
            scratch=loaded.scratch,
            longest=loaded.longest,
        )

    def _draft_model(self, folder: Path) -> Parts:
        """A model that was distilled here: it has the target's own tokens."""
        target, source = self.target, ModelSource(folder, Kind.DIRECTORY, folder.name)
        dtype = str(target.dtype).removeprefix("torch.")
        model = load_model(source, dtype=dtype, device=target.device, ops=target.ops)
        size = target.config.vocab_size
        vocabulary = same(size, model.config.vocab_size, size, target.device)
        drafter = DraftModelDrafter(model, vocabulary, Acceptance.MATCH)
        return Parts(
            target,
            drafter,
            model.dtype,
            draws=drafter.draws,
            longest=model.config.max_position,
        )

    def acceptance(self, folder: Path) -> Mapping[str, Accepted]:
        """What a folder's drafter reaches."""
        return measure(self.engine(folder), self.questions, self.max_tokens)

    def step_costs(self, folder: Path, eager: bool = False) -> tuple[float, float]:
        """(seconds of a plain step, seconds of a step with drafts), one request."""
        plain = _step_seconds(self.engine(None, eager, 1), self.questions[0].prompt)
        return plain, _step_seconds(self.engine(folder, eager, 1), self.questions[0].prompt)


def _step_seconds(engine: Engine, prompt: Sequence[int], steps: int = 24) -> float:
    """Median time of a decode step after a few to warm up."""
    room = engine.max_model_len - len(prompt)
    params = SamplingParams(
        temperature=0.0, max_tokens=min(room, 512), ignore_eos=True, detokenize=False
    )
    engine.add("cost", prompt, params, seed=0)
    times: list[float] = []
    while engine.has_work() and len(times) < steps + 6:
        begin = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - begin)
    engine.abort("cost")
    while engine.has_work():
        engine.step()
    return sorted(times[6:] or times)[len(times[6:] or times) // 2]
