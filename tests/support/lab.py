"""Tiny engines: random decoders in float64, built by the same `assemble` as real ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from foretell.config import EngineConfig
from foretell.engine.build import engine_around
from foretell.engine.engine import Delta, Engine
from foretell.model.config import ModelConfig
from foretell.model.decoder import Decoder
from foretell.ops.meta import LayerKV, Meta
from foretell.ops.table import REFERENCE
from foretell.runner.build import Parts, assemble
from foretell.runner.outbox import Ticket
from foretell.runner.plan import LogprobRow, StepResult
from foretell.sampling_params import SamplingParams
from foretell.spec.autoregressive import DraftModelDrafter
from foretell.spec.drafter import (
    Draft,
    Drafter,
    KVSpec,
    KVView,
    Learner,
    NoDrafter,
    PromptRows,
    Window,
)
from foretell.spec.nodes import Shape
from foretell.spec.tree import Tree, chain
from foretell.spec.verify import Acceptance
from foretell.spec.vocabulary import same

VOCABULARY = 96
EOS = 2


def tiny_decoder(
    seed: int, layers: int = 2, hidden: int = 32, vocabulary: int = VOCABULARY
) -> Decoder:
    config = ModelConfig.from_hf(
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": vocabulary,
            "hidden_size": hidden,
            "intermediate_size": 2 * hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "eos_token_id": EOS,
        }
    )
    return Decoder.random(config, seed=seed, dtype=torch.float64)


class ScriptedDrafter:
    """Proposes tokens by a function of (request text, depth): always right, always wrong, or anything else."""

    kv: KVSpec | None = None
    features: tuple[int, ...] = ()

    def __init__(self, script: Callable[[list[int], Tree], list[int]]) -> None:
        self.script = script
        self.calls = 0

    def bind(self, target: Decoder, kv: KVView | None) -> None:
        """Nothing to bind."""

    def observe(self, rows: PromptRows) -> None:
        """Nothing to ingest."""

    def propose(self, window: Window, shape: Shape) -> Draft:
        self.calls += 1
        drafts = []
        for slot, length in zip(window.slots.tolist(), window.length.tolist(), strict=True):
            drafts.append(self.script(window.text[slot, :length].tolist(), shape.tree))
        return Draft(tokens=torch.tensor(drafts, dtype=torch.int64))


@dataclass
class Run:
    """What one request got."""

    tokens: list[int] = field(default_factory=list)
    finish: str | None = None
    stop_reason: int | None = None
    deltas: list[Delta] = field(default_factory=list)
    logprobs: list[LogprobRow] = field(default_factory=list)
    prompt_logprobs: list[LogprobRow] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0


@dataclass
class Lab:
    """An engine under test and how to drive it."""

    engine: Engine

    def add(
        self,
        name: str,
        prompt: Sequence[int],
        params: SamplingParams,
        seed: int = 0,
        **more: object,
    ) -> None:
        self.engine.add(name, prompt, params, seed=seed, **more)  # type: ignore[arg-type]

    def drain(self, runs: dict[str, Run] | None = None) -> dict[str, Run]:
        runs = {} if runs is None else runs
        for _ in range(100_000):
            if not self.engine.has_work():
                break
            self.step(runs)
        assert not self.engine.has_work(), "the engine does not come to an end"
        self.engine.scheduler.check()
        return runs

    def step(self, runs: dict[str, Run]) -> None:
        for delta in self.engine.step():
            run = runs.setdefault(delta.request_id, Run())
            assert run.finish is None, "news after the end"
            run.tokens += delta.token_ids
            run.deltas.append(delta)
            run.logprobs += delta.logprobs or ()
            run.prompt_logprobs += delta.prompt_logprobs or ()
            run.drafted += delta.drafted
            run.accepted += delta.accepted
            run.finish, run.stop_reason = delta.finish_reason, delta.stop_reason
        self.engine.draft_owed()  # so that tests see a step and its drafts together
        self.engine.scheduler.check()

    def solo(
        self, prompt: Sequence[int], params: SamplingParams, seed: int = 0, **more: object
    ) -> Run:
        self.add("solo", prompt, params, seed, **more)
        return self.drain()["solo"]


def make_lab(
    drafter: Drafter | None = None,
    tree: Tree | None = None,
    target: Decoder | None = None,
    acceptance: str = "match",
    longest: int | None = None,
    learner: Learner | None = None,
    grows: bool | None = None,
    draws: bool | None = None,
    scratch: int | None = None,
    **config: object,
) -> Lab:
    """An engine around `target` (default: the tiny decoder of seed 0) and a drafter object.

    Args:
        tree: what is drafted, or the bound of the trees that the drafter grows.
        longest: tokens of the longest text the drafter was made for.
        grows, draws, scratch: see Parts; None = as the drafter says.
        learner: hears the texts of requests that ended, with eight prompt tokens before them.
    """
    target = tiny_decoder(0) if target is None else target
    drafter = NoDrafter() if drafter is None else drafter
    settings: dict[str, object] = {
        "max_model_len": 160,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 256,
        "kv_cache_memory_bytes": 64 << 20,
        "adaptive": False,  # tests of counts want to know what is drafted
    }
    settings.update(config)
    tree = chain(0) if tree is None else tree
    full = EngineConfig(acceptance=acceptance, **settings)  # type: ignore[arg-type]
    parts = Parts(
        target,
        drafter,
        torch.float64,
        tree=tree,
        grows=getattr(drafter, "growth", None) is not None if grows is None else grows,
        draws=getattr(drafter, "draws", False) if draws is None else draws,
        scratch=getattr(drafter, "scratch", 0) if scratch is None else scratch,
        longest=longest,
        learner=learner,
        learned_prompt=8,
    )
    return Lab(engine_around(assemble(full, parts, tokenizer=None), full))


def draft_model(decoder: Decoder, acceptance: str = "match") -> DraftModelDrafter:
    """A draft-model drafter with the target's own vocabulary."""
    size = decoder.config.vocab_size
    return DraftModelDrafter(
        decoder, same(VOCABULARY, size, size, torch.device("cpu")), Acceptance(acceptance)
    )


def prompts(count: int, seed: int = 0, low: int = 3, high: int = 40) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(low, high, (count,), generator=generator).tolist()
    return [torch.randint(3, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


@dataclass(frozen=True)
class ScriptedConfig:
    """The part of a model's configuration that the build reads."""

    vocab_size: int
    max_position: int = 512
    eos_token_ids: tuple[int, ...] = (EOS,)
    hidden_size: int = 2
    intermediate_size: int = 4


class ScriptedTarget(torch.nn.Module):
    """A target whose logits are a function of (position, token): `rows(positions, tokens) -> [..., V]`."""

    kv_shape = (1, 1, 4)
    ops = REFERENCE
    dtype = torch.float64
    device = torch.device("cpu")

    def __init__(
        self, vocabulary: int, rows: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    ) -> None:
        super().__init__()
        self.config = ScriptedConfig(vocabulary)
        self.rows = rows

    def forward(
        self, tokens: torch.Tensor, meta: Meta, kv: Sequence[LayerKV], taps: tuple[int, ...] = ()
    ) -> tuple[torch.Tensor, None]:
        return torch.stack((meta.positions, tokens), dim=-1).double(), None

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.rows(hidden[..., 0].long(), hidden[..., 1].long())

    def feature_width(self, taps: tuple[int, ...]) -> int:
        return 0


def scripted_text(tokens: Sequence[int], start: int, vocabulary: int = 64) -> ScriptedTarget:
    """A target that says `tokens` from position `start` on, then token 1 for ever."""
    table = torch.tensor([*[1] * start, *tokens, *[1] * 600])

    def rows(positions: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot(table[positions + 1], vocabulary).double() * 50

    return ScriptedTarget(vocabulary, rows)


def says(*tokens: int) -> ScriptedDrafter:
    """A drafter that always proposes the same chain."""
    return ScriptedDrafter(
        lambda _, tree: [-1, *tokens[: tree.nodes - 1]] + [-1] * (tree.nodes - 1 - len(tokens))
    )


def knows(tokens: Sequence[int], start: int) -> ScriptedDrafter:
    """A drafter that knows what the target will say from position `start` on."""
    text = [*[1] * start, *tokens, *[1] * 600]
    return ScriptedDrafter(
        lambda known, tree: [-1, *text[len(known) : len(known) + tree.nodes - 1]]
    )


class _Late:
    """A ticket that is never ready early, as on a device that works while the host plans."""

    def __init__(self, ticket: Ticket) -> None:
        self._ticket = ticket

    def ready(self) -> bool:
        return False

    def result(self) -> StepResult:
        return self._ticket.result()


def behind(lab: Lab) -> Lab:
    """Make the host run a step behind the device."""
    launch = lab.engine.runner.launch
    lab.engine.runner.launch = lambda plan: _Late(launch(plan))  # type: ignore[method-assign,assignment,return-value]
    return lab
