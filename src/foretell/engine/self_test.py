"""The drafter's self-test at the start: a few built-in prompts through the engine that is about to serve.

It runs the very step functions, slots and KV of the engine, with a short tree, eagerly and greedily, once with the
drafter as it is and once with shuffled features; if next to nothing is accepted, also with the readings that are often
meant instead. What it leaves behind is garbage by definition: no slot is live and no block is known. Judging is not
done here (spec/compat.py).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from foretell.config import EngineConfig
from foretell.engine.blocks import BlockManager
from foretell.engine.engine import Engine
from foretell.engine.scheduler import Scheduler
from foretell.runner.build import Built
from foretell.runner.runner import Runner
from foretell.sampling_params import SamplingParams
from foretell.spec.chained import ChainedDrafter
from foretell.spec.compat import (
    WELL,
    CompatReport,
    SelfTest,
    Shuffled,
    find_causes,
    suspects,
    tested,
)
from foretell.spec.drafter import Drafter, KVView
from foretell.spec.tree import Tree, chain

log = logging.getLogger("foretell")

TEXTS = (
    "The water cycle describes how water moves through the world. The sun heats the sea, and",
    "def fibonacci(n):\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n    return",
)
QUESTIONS = (
    "What is the capital of France, and what is it known for?",
    "Write a short list of three things to pack for a day in the mountains.",
)
LONGEST = 24  # tokens of a prompt
DRAFTS = 6  # steps of each prompt that are looked at, fewer where all is clear
CLEAR = 2  # so many of each prompt show a good drafter
PATIENCE = 2.0  # seconds after which one step of each prompt must do
DEPTH = 3  # levels that are drafted
SPARE = 4  # nodes beside the first path, where trees grow


class Tokenizer(Protocol):
    """What is used of a tokenizer of transformers."""

    @property
    def chat_template(self) -> object:
        """None where there is none."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""
        ...

    def apply_chat_template(self, conversation: list[dict[str, Any]], **options: Any) -> Any:
        """A conversation as text."""
        ...


@dataclass(frozen=True, slots=True)
class _Probe:
    """A prompt and its kind."""

    kind: str
    ids: tuple[int, ...]


@dataclass(slots=True)
class _Count:
    drafts: int = 0
    emitted: int = 0

    @property
    def length(self) -> float:
        return self.emitted / self.drafts if self.drafts else 1.0


def prove(built: Built, config: EngineConfig, tokenizer: Tokenizer | None) -> CompatReport | None:
    """What `config.compat` asks for; None where there is no drafter to prove.

    Near-zero acceptance is a warning that names the likely cause; nothing is refused here.
    """
    resolved = built.resolved
    if config.compat == "off" or resolved.method in ("none", "ngram", "suffix"):
        return None
    report = CompatReport(resolved.method, resolved.checkpoint, built.checks)
    if config.compat == "full" and len(built.trees) > 1:
        report = _run(built, config, tokenizer, report)
    _tell(report)
    return report


def _run(
    built: Built, config: EngineConfig, tokenizer: Tokenizer | None, report: CompatReport
) -> CompatReport:
    started = time.perf_counter()
    probes = _probes(tokenizer, built)
    drafter = built.runner.device.drafter
    if isinstance(drafter, ChainedDrafter):
        drafter = drafter.trained
    counts = _accepted(built, config, drafter, probes)
    control = None
    if drafter.features:
        control = _accepted(built, config, Shuffled(drafter), probes)["all"].length
    kinds = {kind: count.length for kind, count in counts.items() if kind != "all" and count.drafts}
    test = SelfTest(
        accepted_length=counts["all"].length,
        control=control,
        drafts=counts["all"].drafts,
        depth=_tree(built).depth,
        by_kind=kinds,
        seconds=time.perf_counter() - started,
    )
    if test.sound:
        return replace(report, self_test=test)
    device = built.runner.device
    tried = []
    for suspect in suspects(drafter, device.target):
        kv = KVView(device.kv.drafter, config.block_size) if suspect.drafter.kv else None
        suspect.drafter.bind(device.target, kv)
        tried.append((suspect, _accepted(built, config, suspect.drafter, probes)["all"].length))
    return replace(report, self_test=test, causes=find_causes(test, tried, report.checks))


def _tree(built: Built) -> Tree:
    """A small tree of the kind that the drafter fills."""
    full = built.trees[-1]
    depth = min(DEPTH, full.depth)
    if not built.resolved.growth or full.is_chain:
        return chain(depth)
    return Tree((*range(-1, depth), *[0] * (min(full.nodes, depth + 1 + SPARE) - depth - 1)))


def _probes(tokenizer: Tokenizer | None, built: Built) -> list[_Probe]:
    room = min(LONGEST, built.max_model_len // 2)
    numbers = [[(7 * i + 3 * j) % built.vocab_size for j in range(12)] for i in range(4)]
    plain = [_Probe("text", tuple(ids[:room])) for ids in numbers]
    if tokenizer is None:
        return plain
    found = [_Probe("text", tuple(tokenizer.encode(text)[:room])) for text in TEXTS]
    for question in QUESTIONS:
        ids = tuple(tokenizer.encode(question)[:room])
        kind = "text"
        if tokenizer.chat_template:
            kind, ids = "chat", _rendered(tokenizer, question) or ids
        found.append(_Probe(kind, ids[: built.max_model_len // 2]))
    known = range(built.vocab_size)
    fit = [probe for probe in found if probe.ids and all(token in known for token in probe.ids)]
    return fit or plain


def _rendered(tokenizer: Tokenizer, question: str) -> tuple[int, ...]:
    """A question as a chat; nothing where the template wants something else."""
    messages = [{"role": "user", "content": question}]
    try:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    except (
        Exception
    ) as error:  # a template is a program of the model's authors: anything may come of it
        log.info("self-test: the chat template does not take a single question (%s)", error)
        return ()
    return tuple(tokenizer.encode(text, add_special_tokens=False))


def _accepted(
    built: Built, config: EngineConfig, drafter: Drafter, probes: Sequence[_Probe]
) -> dict[str, _Count]:
    """Counts by kind of prompt, and of "all"."""
    tree = _tree(built)
    engine = _engine(built, config, drafter, tree)
    tokens = 1 + DRAFTS * (tree.depth + 1)
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    for place, probe in enumerate(probes):
        engine.add(str(place), probe.ids, params, seed=place)
    counts = {"all": _Count()} | {probe.kind: _Count() for probe in probes}
    seen = [0] * len(probes)
    started = time.perf_counter()
    while engine.has_work():
        for delta in engine.step():
            place = int(delta.request_id)
            if not delta.drafted or seen[place] >= DRAFTS:
                continue
            seen[place] += 1
            for key in ("all", probes[place].kind):
                counts[key].drafts += 1
                counts[key].emitted += len(delta.token_ids)
            if seen[place] == DRAFTS:
                engine.abort(delta.request_id)
        if _is_clear(counts["all"], len(probes), time.perf_counter() - started):
            for place in range(len(probes)):
                engine.abort(str(place))
    return counts


def _is_clear(count: _Count, probes: int, seconds: float) -> bool:
    """More steps would tell no more."""
    good = count.drafts >= CLEAR * probes and count.length >= WELL
    return good or (count.drafts >= probes and seconds > PATIENCE)


def _engine(built: Built, config: EngineConfig, drafter: Drafter, tree: Tree) -> Engine:
    """An engine on the same device state that drafts the small tree with another drafter, and shares no cache."""
    trees = (chain(0), tree)
    device = replace(built.runner.device, drafter=drafter)
    scheduler = Scheduler(
        blocks=BlockManager(built.blocks, config.block_size, False),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=max(config.max_num_batched_tokens, tree.nodes),
        max_model_len=built.max_model_len,
        trees=trees,
        scratch=built.scratch,
        drafter_kv=built.drafter_kv,
        drafted_length=built.drafted_length,
    )
    runner = Runner(device, trees, eager=True)
    return Engine(runner, scheduler, built.eos_token_ids, built.vocab_size, built.max_stop_ids)


def _tell(report: CompatReport) -> None:
    """A line if all is well, a warning with everything known if it is not."""
    name = report.checkpoint or report.method
    if report.ok:
        test = report.self_test
        if test is not None and test.drafts:
            log.info("speculative model %s: %s", name, tested(test))
        return
    lines = "\n  ".join(line for line in report.lines() if not line.startswith("ok"))
    log.warning(
        "speculative model %s does not seem to belong to this target: next to nothing of what it drafts is accepted, "
        "so it costs time and gains none. The text is right all the same.\n  %s",
        name,
        lines,
    )
