"""Random engines under random loads: whatever runs beside it, a request gets what plain decoding gives it alone.

Drafters, trees, pool and batch sizes, late hosts, aborts, cache resets and every sampling parameter are drawn from a
seed; the oracle is an engine without drafts, cache pressure or company.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from lab import (
    VOCABULARY,
    Lab,
    Run,
    ScriptedDrafter,
    behind,
    draft_model,
    make_lab,
    tiny_decoder,
)

from foretell.sampling_params import SamplingParams
from foretell.spec.drafter import Drafter
from foretell.spec.ngram import NgramDrafter
from foretell.spec.tree import Tree, chain

TREES = (chain(1), chain(3), chain(6), Tree((-1, 0, 0, 1, 1, 2)), Tree((-1, 0, 0, 0, 1, 2, 4)))
TARGET = tiny_decoder(0)


@dataclass(frozen=True)
class Asked:
    prompt: list[int]
    params: SamplingParams
    seed: int
    bad_words: list[list[int]] = field(default_factory=list)


def some_drafter(rng: random.Random) -> Drafter:
    def guesses(known: list[int], tree: Tree) -> list[int]:
        return [-1, *(rng.randrange(VOCABULARY) for _ in range(tree.nodes - 1))]

    makers: list[Callable[[], Drafter]] = [
        lambda: draft_model(tiny_decoder(0)),
        lambda: draft_model(tiny_decoder(7, layers=1)),
        lambda: NgramDrafter(1, 3),
        lambda: ScriptedDrafter(guesses),
    ]
    return rng.choice(makers)()


def some_params(rng: random.Random) -> SamplingParams:
    count, ids = rng.randint(1, 24), range(3, VOCABULARY)
    optional: dict[str, object] = {
        "top_k": rng.randint(1, 50),
        "top_p": rng.uniform(0.1, 1.0),
        "min_p": rng.uniform(0.0, 0.5),
        "repetition_penalty": rng.choice([0.7, 1.2, 1.8]),
        "frequency_penalty": rng.uniform(-1.0, 2.0),
        "presence_penalty": rng.uniform(-1.0, 2.0),
        "logit_bias": {rng.choice(ids): rng.uniform(-5.0, 5.0) for _ in range(4)},
        "allowed_token_ids": rng.sample(ids, 40),
        "min_tokens": rng.randint(0, count),
        "stop_token_ids": rng.sample(ids, 3),
        "ignore_eos": True,
        "logprobs": rng.randint(0, 5),
        "prompt_logprobs": rng.randint(0, 3),
        "num_speculative_tokens": rng.randint(0, 4),
        "speculate": False,
    }
    chosen = {name: value for name, value in optional.items() if rng.random() < 0.25}
    temperature = rng.choice([0.0, 0.0, 0.7, 1.0, 1.5])
    return SamplingParams(max_tokens=count, temperature=temperature, **chosen)  # type: ignore[arg-type]


def some_request(rng: random.Random, shared: list[int]) -> Asked:
    head = shared[: rng.randint(1, len(shared))] if rng.random() < 0.5 else []
    tail = [rng.randrange(3, VOCABULARY) for _ in range(rng.randint(1, 20))]
    words = [[rng.randrange(3, VOCABULARY) for _ in range(rng.randint(1, 3))] for _ in range(3)]
    return Asked(
        [*head, *tail][:50],
        some_params(rng),
        rng.randint(0, 5),
        words if rng.random() < 0.2 else [],
    )


def some_lab(rng: random.Random, longest: int) -> Lab:
    drafter, tree = some_drafter(rng), rng.choice(TREES)
    if isinstance(drafter, NgramDrafter):
        tree = chain(tree.depth)
    pool = {"kv_cache_memory_bytes": rng.randint(120_000, 240_000)} if rng.random() < 0.5 else {}
    lab = make_lab(
        drafter,
        tree,
        TARGET,
        max_num_seqs=rng.randint(1, 6),
        max_num_batched_tokens=rng.choice([16, 40, 256]),
        max_model_len=longest,
        block_size=rng.choice([4, 8, 16]),
        enable_prefix_caching=rng.random() < 0.8,
        **pool,
    )
    return behind(lab) if rng.random() < 0.4 else lab


def seen(run: Run) -> tuple[object, ...]:
    """What a caller gets, log-probabilities by their order: their values differ in the last places."""
    rows = [
        [(row.token, row.rank, list(row.top)) for row in rows]
        for rows in (run.logprobs, run.prompt_logprobs)
    ]
    return run.tokens, run.finish, run.stop_reason, rows


@pytest.mark.parametrize("seed", range(8))
def test_every_request_gets_what_plain_decoding_gives_it_alone(seed: int) -> None:
    rng = random.Random(seed)
    longest = rng.choice([64, 96])
    lab, runs = some_lab(rng, longest), dict[str, Run]()
    shared = [rng.randrange(3, VOCABULARY) for _ in range(40)]
    asked, gone = dict[str, Asked](), set[str]()
    for name in map(str, range(12)):
        asked[name] = request = some_request(rng, shared)
        lab.add(name, request.prompt, request.params, request.seed, bad_words=request.bad_words)
        for _ in range(rng.randint(0, 4)):
            lab.step(runs)
        if rng.random() < 0.15:
            gone.add(aborted := rng.choice(list(asked)))
            lab.engine.abort(aborted)
        if rng.random() < 0.1:
            lab.engine.reset_prefix_cache()
        if rng.random() < 0.1:
            lab.engine.runner.note_error()
    lab.drain(runs)
    for name, request in asked.items():
        alone = make_lab(None, chain(0), TARGET, max_model_len=longest).solo(
            request.prompt, request.params, request.seed, bad_words=request.bad_words
        )
        if name not in gone:
            assert seen(runs[name]) == seen(alone), (name, request)
        elif name in runs:
            assert alone.tokens[: len(runs[name].tokens)] == runs[name].tokens
