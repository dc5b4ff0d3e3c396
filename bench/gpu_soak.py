"""A soak of one engine on a GPU: requests of all kinds come, end and are aborted for minutes; every text is checked.

    python bench/gpu_soak.py [--minutes 5] [--shape tiny] [--drafter eagle3]

float32 weights, random but small. Each request's text is compared with what it was alone, without drafts; after each
round nothing may run, no block may be in use, and memory may not have grown since the second round. The last line is
one JSON object; the exit code is 1 where anything was wrong.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from dataclasses import dataclass

import torch

from foretell.engine.engine import Engine
from foretell.sampling_params import SamplingParams
from foretell.spec.drafter import Drafter, NoDrafter
from foretell.spec.ngram import NgramDrafter
from gpu import config_of, eagle3, engine_of, target_of

KINDS = 24  # different requests; each is run alone once


@dataclass(frozen=True)
class Ask:
    """A request."""

    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int


def asks(vocabulary: int) -> list[Ask]:
    """Requests that differ in length, in how they are sampled, and in how they end."""
    chance = random.Random(0)
    found = []
    for i in range(KINDS):
        unit = [chance.randrange(3, vocabulary) for _ in range(chance.randrange(2, 40))]
        prompt = (unit * 12)[: chance.randrange(4, 250)]
        params = SamplingParams(
            temperature=chance.choice((0.0, 0.7, 1.0)),
            top_p=chance.choice((1.0, 0.9)),
            top_k=chance.choice((0, 40)),
            repetition_penalty=chance.choice((1.0, 1.0, 1.2)),
            max_tokens=chance.randrange(1, 200),
            stop_token_ids=[chance.randrange(3, vocabulary) for _ in range(8)],
            ignore_eos=True,
        )
        found.append(Ask(tuple(prompt), params, i))
    return found


def alone(engine: Engine, ask: Ask) -> list[int]:
    """Its text, with nobody beside it."""
    engine.add("alone", list(ask.prompt), ask.params, seed=ask.seed)
    text: list[int] = []
    while engine.has_work():
        for delta in engine.step():
            text += delta.token_ids
    return text


def one_round(
    engine: Engine, known: list[Ask], expected: list[list[int]], chance: random.Random, count: int
) -> list[str]:
    """So many requests, some aborted; what was wrong."""
    waiting = [(f"r{i}", chance.randrange(len(known))) for i in range(count)]
    texts: dict[str, list[int]] = {}
    which = dict(waiting)
    aborted: set[str] = set()
    while waiting or engine.has_work():
        while waiting and chance.random() < 0.4:
            name, kind = waiting.pop()
            ask = known[kind]
            texts[name] = []
            engine.add(name, list(ask.prompt), ask.params, seed=ask.seed)
        if texts and chance.random() < 0.02:
            name = chance.choice(sorted(texts))
            engine.abort(name)
            aborted.add(name)
        for delta in engine.step() if engine.has_work() else ():
            texts[delta.request_id] += delta.token_ids
    wrong = []
    for name, text in texts.items():
        whole = expected[which[name]]
        if text != (whole[: len(text)] if name in aborted else whole):
            wrong.append(f"{name}, kind {which[name]}: {len(text)} tokens, {len(whole)} alone")
    return wrong


def main() -> None:
    """Rounds until the time is over."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--shape", default="tiny")
    parser.add_argument("--drafter", choices=("none", "ngram", "eagle3"), default="eagle3")
    parser.add_argument("--k", type=int, default=5)
    parser.add_argument("--requests", type=int, default=64, help="of one round")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    target = target_of(arguments.shape, torch.float32, device)
    words = config_of(arguments.shape).vocab_size
    known = asks(words)
    solo = engine_of(target, NoDrafter(), 0, 1, eager=True)
    expected = [alone(solo, ask) for ask in known]
    made: dict[str, Drafter] = {
        "none": NoDrafter(), "ngram": NgramDrafter(1, 3), "eagle3": eagle3(target, words // 2)
    }  # fmt: skip
    k = 0 if arguments.drafter == "none" else arguments.k
    engine = engine_of(target, made[arguments.drafter], k, 16)
    chance, until = random.Random(1), time.monotonic() + 60 * arguments.minutes
    wrong: list[str] = []
    memory: list[int] = []
    rounds = 0
    while time.monotonic() < until or rounds == 0:
        wrong += one_round(engine, known, expected, chance, arguments.requests)
        rounds += 1
        blocks = engine.scheduler.blocks
        blocks.check()
        if blocks.available != blocks.usable:
            wrong.append(
                f"round {rounds}: {blocks.usable - blocks.available} blocks are in use, and nothing runs"
            )
        memory.append(torch.cuda.memory_allocated() if device.type == "cuda" else 0)
    if len(memory) > 3 and memory[-1] > memory[1] + (1 << 20):
        wrong.append(f"memory grew from {memory[1]} to {memory[-1]} bytes")
    print("\n".join(wrong[:20]))
    print(
        json.dumps(
            {
                "bench": "gpu_soak", "rounds": rounds, "requests": arguments.requests * rounds, "wrong": len(wrong),
                "memory": [memory[0], memory[-1]], "replays": engine.runner.graphs.replays,
            }
        )
    )  # fmt: skip
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
