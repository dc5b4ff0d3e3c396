"""What to train, for whom, on what: a run's settings, and nothing that runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from foretell.training.data import OnBroken
from foretell.training.draft import DistilSettings
from foretell.training.eagle import EagleSettings
from foretell.training.loop import LoopSettings
from foretell.training.medusa import MedusaSettings

Kind = Literal["eagle3", "eagle", "medusa", "draft"]


@dataclass(frozen=True, slots=True)
class AnswerSettings:
    """How the target answers.

    Args:
        max_tokens: longest answer.
        temperature: 0 = greedy.
        requests: that run at a time.
        minutes: stop then with what is there; None = answer all.
        shard: (which, of how many): only every so-manieth prompt.
        kv_bytes: of the engine that answers; None = what is left of the memory.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    requests: int = 64
    minutes: float | None = None
    shard: tuple[int, int] = (0, 1)
    kv_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """What to train, for whom, on what.

    Args:
        model: the target, as LLM takes it.
        data: prompt files; empty = the target writes `synthetic` prompts.
        answers: answer files that exist already, instead of `data`.
        checked_with: prompt files for the checks, never trained on; empty = some of the data are kept from training.
        length: tokens of a packed row; longer texts are cut.
        draft_vocab_size: EAGLE-3's, 0 = the target's.
        memory: bytes of captured features kept on the device; `capture_dir` keeps them on disk instead.
        tokens: draft tokens per step, in the checks and as the drafter's own suggestion.
    """

    kind: Kind
    out: Path
    model: str | None = None
    data: tuple[Path, ...] = ()
    answers: tuple[Path, ...] = ()
    synthetic: int = 0
    checked_with: tuple[Path, ...] = ()
    checked: int = 32
    on_broken: OnBroken = "stop"
    device: str = "auto"
    dtype: str = "auto"
    length: int = 1024
    limit: int | None = None
    draft_vocab_size: int = 8192
    intermediate: int | None = None
    layers: int = 1
    taps: tuple[int, ...] | None = None
    memory: int = 0
    capture_dir: Path | None = None
    capture_bytes: int = 0
    tokens: int = 5
    check_tokens: int = 128
    predict: bool = True
    initial: Path | None = None
    loop: LoopSettings = field(default_factory=lambda: LoopSettings(steps=1000))
    answer: AnswerSettings = field(default_factory=AnswerSettings)
    eagle: EagleSettings = field(default_factory=EagleSettings)
    medusa: MedusaSettings = field(default_factory=MedusaSettings)
    distil: DistilSettings = field(default_factory=DistilSettings)

    @property
    def work(self) -> Path:
        """Where the run keeps what it needs to go on."""
        return self.out / "training"
