"""Is the adaptive engine ever slower? Against plain decoding and every fixed draft length, at forced acceptance.

    PYTHONPATH=src python bench/never_slower.py --model m.gguf --k 8 --batch 1 8 --rate 0 0.3 0.6 0.9 --out FILE
    PYTHONPATH=src python bench/never_slower.py --model m.gguf --spec-model d.gguf --change 0.9 0.1

All requests have one prompt and are greedy, so the target says one text, which is made first. The drafter then runs as
it is, for its cost, and its tokens are replaced: by the right one with the given probability, by a wrong one else. The
text must come out the same every time. Runs of one cell take turns, so that a slow minute meets all of them. Figures
are of the steps after WARM_UP; run it on a quiet machine. One line of JSON last.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from foretell import LLM, SamplingParams
from foretell.bench.machine import Watch, describe
from foretell.doctor.gather import Pinned
from foretell.engine.engine import Engine
from foretell.model.decoder import Decoder
from foretell.runner.graphs import StepGraphs
from foretell.spec.controller import Controller
from foretell.spec.drafter import Draft, Drafter, KVView, PromptRows, Window
from foretell.spec.nodes import Shape

WARM_UP = 64  # steps


class Forced:
    """A drafter whose tokens are right with a given probability, at the cost of another one."""

    def __init__(self, inner: Drafter, truth: Tensor, vocabulary: int) -> None:
        self.inner, self.truth, self.vocabulary = inner, truth, vocabulary
        self.kv, self.features = inner.kv, inner.features
        # A tensor, so that a captured graph reads what it holds now.
        self.rate = torch.zeros((), device=truth.device)

    def bind(self, target: Decoder, kv: KVView | None) -> None:
        """The inner one is bound already."""

    def observe(self, rows: PromptRows) -> None:
        """As the inner one."""
        self.inner.observe(rows)

    def propose(self, window: Window, shape: Shape) -> Draft:
        """Draft as the inner one does, then say what is right or wrong."""
        self.inner.propose(window, shape)
        place = window.length.unsqueeze(1) - 1 + shape.depths  # [B, N]
        right = self.truth[place.clamp(max=self.truth.shape[0] - 1)]
        mixed = (place * 2654435761 + window.slots.unsqueeze(1) * 40503 + 12345) % 1_000_003
        mixed = (mixed * mixed + mixed * 31) % 1_000_003
        hit = mixed.to(torch.float32) < self.rate * 1_000_003
        tokens = torch.where(hit, right, (right + 1) % self.vocabulary)
        return Draft(tokens=torch.where(shape.spine & (shape.depths > 0), tokens, -1))


@dataclass(frozen=True, slots=True)
class Measured:
    """One cell: tokens/s."""

    batch: int
    rate: float
    plain: float  # of an engine without a drafter
    fixed: dict[str, float]  # by draft length, 0 = the drafting engine decoding plainly
    adaptive: float
    same_text: bool

    @property
    def of_best(self) -> float:
        """Adaptive over the best of plain and every fixed length."""
        return self.adaptive / max(self.plain, *self.fixed.values())

    @property
    def of_plain(self) -> float:
        """Adaptive over plain."""
        return self.adaptive / self.plain


def force(engine: Engine, truth: Tensor) -> Forced:
    """Put a forced drafter in the place of the engine's own."""
    runner = engine.runner
    forced = Forced(runner.device.drafter, truth, engine.vocab_size)
    runner.device = replace(runner.device, drafter=forced)
    runner.graphs = StepGraphs(runner.device, runner.shapes, runner.graphs.enabled)
    return forced


def run(
    engine: Engine, prompt: list[int], batch: int, tokens: int, controller: Controller | None
) -> tuple[float, list[int]]:
    """(tokens/s after WARM_UP steps, the text of the first request)."""
    engine.scheduler.controller = controller
    engine.reset_prefix_cache()
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    for row in range(batch):
        engine.add(str(row), prompt, params, seed=row)
    text: list[int] = []
    steps = emitted = 0
    started, seconds, counted = 0.0, 0.0, 0
    while engine.has_work():
        over = False
        for delta in engine.step():
            emitted += len(delta.token_ids)
            over = over or delta.finish_reason is not None
            if delta.request_id == "0":
                text += delta.token_ids
        steps += 1
        now = time.perf_counter()
        if steps == WARM_UP:
            started, counted = now, emitted
        elif steps > WARM_UP and not seconds and over:  # the batch is whole up to here
            seconds, counted = now - started, emitted - counted
    assert seconds > 0, f"too few tokens: {steps} steps; raise --tokens"
    return counted / seconds, text


def cell(
    plain: Engine,
    engine: Engine,
    forced: Forced,
    given: argparse.Namespace,
    batch: int,
    rate: float,
) -> Measured:
    """All ways at one batch and acceptance, in turns."""
    forced.rate.fill_(rate)
    trees = engine.scheduler.trees
    ways: dict[str, list[float]] = {}
    texts = set()
    for _ in range(given.repeats):
        speed, text = run(plain, given.prompt, batch, given.tokens, None)
        ways.setdefault("plain", []).append(speed)
        texts.add(tuple(text))
        for tree in range(len(trees)):
            speed, text = run(engine, given.prompt, batch, given.tokens, Pinned(trees, tree))
            ways.setdefault(str(trees[tree].nodes - 1), []).append(speed)
            texts.add(tuple(text))
        speed, text = run(engine, given.prompt, batch, given.tokens, Controller(trees))
        ways.setdefault("adaptive", []).append(speed)
        texts.add(tuple(text))
    middle = {name: statistics.median(values) for name, values in ways.items()}
    fixed = {name: value for name, value in middle.items() if name not in ("plain", "adaptive")}
    return Measured(batch, rate, middle["plain"], fixed, middle["adaptive"], len(texts) == 1)


def change(engine: Engine, forced: Forced, given: argparse.Namespace) -> dict[str, object]:
    """Acceptance changes in the middle: the draft lengths of the 64 steps after it, and when the last change came."""
    before, after = given.change
    trees = engine.scheduler.trees
    controller = Controller(trees)
    engine.scheduler.controller = controller
    forced.rate.fill_(before)
    params = SamplingParams(temperature=0.0, max_tokens=given.tokens, ignore_eos=True)
    chosen: list[int] = []
    while len(chosen) < 192:
        if not engine.has_work():  # again from the start, as often as it takes
            engine.add("0", given.prompt, params, seed=0)
        if len(chosen) == 128:
            forced.rate.fill_(after)
        engine.step()
        chosen.append(trees[controller.current].nodes - 1)
    engine.abort("0")
    while engine.has_work():
        engine.step()
    tail = chosen[128:]
    settled = tail[-1]
    last = max((place + 1 for place, k in enumerate(tail) if k != settled), default=0)
    return {"before": before, "after": after, "lengths": tail, "followed_after_steps": last}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model")
    parser.add_argument("--spec-model", help="a draft model, for its cost; left out, n-gram lookup")
    parser.add_argument("--k", type=int, default=6)
    parser.add_argument("--batch", type=int, nargs="*", default=[1])
    parser.add_argument("--rate", type=float, nargs="*", default=[0.0, 0.3, 0.6, 0.9])
    parser.add_argument("--change", type=float, nargs=2)
    parser.add_argument("--tokens", type=int, default=640)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    size = {
        "max_model_len": given.tokens + 128,
        "max_num_seqs": max(given.batch),
        "max_num_batched_tokens": max(512, max(given.batch) * (given.k + 1)),
        "dtype": given.dtype,
        "enable_prefix_caching": False,
    }
    speculation: dict[str, object] = {"num_speculative_tokens": given.k, "adaptive": True}
    if given.spec_model:
        speculation["model"] = given.spec_model
    else:
        speculation["method"] = "ngram"
    watch = Watch()
    plain_llm = LLM(given.model, **size)
    llm = LLM(given.model, speculative_config=speculation, **size)
    plain, engine = plain_llm.parts().driver.engine, llm.parts().driver.engine
    given.prompt = plain_llm.get_tokenizer()("Write a long story about a lighthouse.")["input_ids"]
    _, text = run(plain, given.prompt, 1, given.tokens, None)
    truth = torch.tensor([*given.prompt, *text], device=engine.runner.device.slots.device)
    forced = force(engine, truth)
    rows = []
    for batch in given.batch:
        for rate in given.rate:
            found = cell(plain, engine, forced, given, batch, rate)
            rows.append(asdict(found) | {"of_best": found.of_best, "of_plain": found.of_plain})
            print(
                f"batch {batch} acceptance {rate}: plain {found.plain:.1f}, fixed "
                f"{ {k: round(v, 1) for k, v in found.fixed.items()} }, adaptive {found.adaptive:.1f} = "
                f"{found.of_best:.3f} of the best, {found.of_plain:.3f} of plain; same text {found.same_text}",
                flush=True,
            )
    record = {
        "settings": {k: v for k, v in vars(given).items() if k not in ("prompt", "out")},
        "machine": asdict(describe("cuda" if torch.cuda.is_available() else "cpu")),
        "rows": rows,
        "change": change(engine, forced, given) if given.change else None,
        "busy_cores": watch.stop().cores,
    }
    line = json.dumps(record)
    if given.out:
        given.out.write_text(line + "\n")
    print(line)


if __name__ == "__main__":
    main()
