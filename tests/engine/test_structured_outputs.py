"""Structured outputs: every node of a tree is masked with its own state, so the text is the same with any drafter."""

from __future__ import annotations

import json

import pytest
import torch
from lab import ScriptedDrafter, behind, make_lab, prompts, tiny_decoder
from tiny_tokenizers import byte_level

from foretell.sampling_params import SamplingParams
from foretell.spec.autoregressive import DraftModelDrafter
from foretell.spec.drafter import Drafter
from foretell.spec.grammar import Grammars, allowed
from foretell.spec.tree import Tree, chain
from foretell.spec.verify import Acceptance
from foretell.spec.vocabulary import same
from foretell.structured_outputs import StructuredOutputsParams

TOKENIZER = byte_level()
V = 272
BUSHY = Tree((-1, 0, 0, 1, 1, 2, 3, 3))
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}, "s": {"enum": ["x", "yy"]}},
    "required": ["n", "s"],
    "additionalProperties": False,
}


def lab_with_grammars(drafter: Drafter | None = None, tree: Tree | None = None, **config: object):
    lab = make_lab(drafter, tree, tiny_decoder(0, vocabulary=V), **config)
    engine = lab.engine
    engine.runner.grammars = Grammars(TOKENIZER, V, engine.eos_token_ids)
    return lab


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def drafting(seed: int) -> DraftModelDrafter:
    """A draft model with the target's vocabulary; seed 0 is the target itself."""
    vocabulary = same(V, V, V, torch.device("cpu"))
    return DraftModelDrafter(tiny_decoder(seed, vocabulary=V), vocabulary, Acceptance.MATCH)


def always(*tokens: int) -> ScriptedDrafter:
    """Proposes these tokens at nodes 1, 2, ..., whatever the tree."""
    return ScriptedDrafter(lambda _, tree: ([-1, *tokens] + [-1] * tree.nodes)[: tree.nodes])


def asking(temperature: float = 0.0, max_tokens: int = 60, **wanted: object) -> SamplingParams:
    return SamplingParams(
        temperature=temperature,
        max_tokens=max_tokens,
        structured_outputs=StructuredOutputsParams(**wanted),  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "wanted",
    [
        {"regex": "[ab]{3,9}c"},
        {"json": SCHEMA},
        {"choice": ["yes", "no", "perhaps"]},
        {"grammar": 'start: "<" (/[0-9]/ | start)+ ">"'},
    ],
)
def test_the_text_is_the_same_with_any_drafter_and_has_its_form(
    wanted: dict[str, object], temperature: float
) -> None:
    params, prompt = asking(temperature, **wanted), prompts(1)[0]
    plain = lab_with_grammars().solo(prompt, params, seed=5)
    drafters = [
        (drafting(0), chain(4)),
        (drafting(3), BUSHY),
        (always(*ids("ab{bn1<")), BUSHY),
        (always(*ids("bca")), chain(3)),
    ]
    for drafter, tree in drafters:
        lab = lab_with_grammars(drafter, tree)
        found = lab.solo(prompt, params, seed=5)
        assert (found.tokens, found.finish) == (plain.tokens, plain.finish)
        late = behind(lab_with_grammars(drafter, tree)).solo(prompt, params, seed=5)
        assert late.tokens == plain.tokens
    if plain.finish == "stop" and "json" in wanted:
        assert set(json.loads(TOKENIZER.decode(plain.tokens[:-1]))) == {"n", "s"}
    if "choice" in wanted:
        assert TOKENIZER.decode(plain.tokens[:-1]) in {"yes", "no", "perhaps"}


def test_a_drafted_end_inside_a_block_and_tokens_behind_it_do_no_harm() -> None:
    """R18: the drafter proposes a, b, a, the end and more."""
    a, b, x, end = *ids("abx"), 2
    params, prompt = asking(regex="[ab]{3}"), prompts(1)[0]
    plain = lab_with_grammars().solo(prompt, params)
    lab = lab_with_grammars(always(a, b, a, end, x, x), chain(6))
    for _ in range(2):  # the next request with the same grammar works too
        found = lab.solo(prompt, params)
        assert found.tokens == plain.tokens
        assert len(found.tokens) == 4
        assert found.finish == "stop"


def test_illegal_drafts_give_one_token_a_step() -> None:
    x = ids("x")[0]
    params, prompt = asking(regex="[ab]{6}"), prompts(1)[0]
    found = lab_with_grammars(always(x, x, x), chain(3)).solo(prompt, params)
    assert found.tokens == lab_with_grammars().solo(prompt, params).tokens
    assert found.accepted == 0
    assert all(len(delta.token_ids) <= 1 for delta in found.deltas)


def test_a_grammar_that_begins_after_a_marker_holds_from_the_node_behind_it() -> None:
    """R18: drafts r, m, r, r with the marker m in the middle of a block."""
    grammars = Grammars(TOKENIZER, V, (2,))
    wanted = StructuredOutputsParams(regex="[ab]+", begins_after="m")
    r, m, a = ids("rma")
    masks = grammars.follow(wanted).masks([0, r, m, r, a], [0, 0, 1, 2, 2])
    found = allowed(masks, V)
    assert found[0].all()
    assert found[1].all()
    assert found[2].nonzero().flatten().tolist() == sorted(ids("ab"))
    assert found[3].all()  # r is not allowed there: what would follow it does not matter
    assert found[4].nonzero().flatten().tolist() == sorted([2, *ids("ab")])


def test_a_walk_leaves_the_follower_where_it_was() -> None:
    grammars = Grammars(TOKENIZER, V, (2,))
    follower = grammars.follow(StructuredOutputsParams(regex="a(b|c)d"))
    a, b, c, d = ids("abcd")
    tokens, parents = [0, a, c, b, d, d], [0, 0, 1, 1, 2, 3]
    first = follower.masks(tokens, parents)
    assert torch.equal(first, follower.masks(tokens, parents))
    follower.advance([a])
    assert allowed(follower.masks([a], [0]), V)[0].nonzero().flatten().tolist() == sorted([b, c])


def test_preemption_changes_nothing() -> None:
    params = asking(1.0, max_tokens=40, regex="[abc]{30,60}d")
    alone = [lab_with_grammars().solo(p, params, seed=i) for i, p in enumerate(prompts(6))]
    lab = lab_with_grammars(
        drafting(3),
        BUSHY,
        kv_cache_memory_bytes=260 << 10,
        max_model_len=96,
    )
    for i, prompt in enumerate(prompts(6)):
        lab.add(str(i), prompt, params, seed=i)
    runs = lab.drain()
    assert lab.engine.scheduler.preemptions > 0, "the pool is too large for this test"
    assert [runs[str(i)].tokens for i in range(6)] == [run.tokens for run in alone]


def test_requests_with_and_without_a_grammar_share_a_batch() -> None:
    free = SamplingParams(temperature=1.0, max_tokens=20)
    bound = asking(1.0, max_tokens=20, regex="[ab]{5,30}")
    first, second = prompts(2)
    lab = lab_with_grammars(drafting(0), chain(3))
    lab.add("free", first, free, seed=1)
    lab.add("bound", second, bound, seed=2)
    runs = lab.drain()
    assert runs["free"].tokens == lab_with_grammars().solo(first, free, seed=1).tokens
    assert runs["bound"].tokens == lab_with_grammars().solo(second, bound, seed=2).tokens


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ({"regex": "["}, "regex cannot be used"),
        ({"regex": "(?=a)b"}, "regex cannot be used"),
        ({"json": {"type": "nonsense"}}, "json cannot be used"),
        ({"json": {"$ref": "http://example.org/x"}}, "json cannot be used"),
        ({"grammar": "start: missing_rule"}, "grammar cannot be used"),
    ],
)
def test_a_wrong_grammar_is_refused_before_anything_is_queued(
    wanted: dict[str, object], said: str
) -> None:
    lab = lab_with_grammars()
    with pytest.raises(ValueError, match=said):
        lab.add("a", [5], asking(**wanted))
    assert not lab.engine.has_work()


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ({}, "exactly one"),
        ({"regex": "a", "choice": ["a"]}, "exactly one"),
        ({"choice": []}, "at least one"),
        ({"choice": "abc"}, "list of texts"),
        ({"json": "{"}, "not JSON"),
        ({"json": "[" * 100_000}, "not JSON"),
        ({"json": "3"}, "JSON schema"),
        ({"regex": ""}, "not empty"),
        ({"regex": "a" * 200_000}, "characters"),
        ({"regex": "a", "begins_after": ""}, "begins_after"),
    ],
)
def test_what_is_no_constraint_is_refused(wanted: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        StructuredOutputsParams(**wanted)  # type: ignore[arg-type]


def test_a_bomb_is_refused_or_cheap() -> None:
    import time

    grammars = Grammars(TOKENIZER, V, (2,))
    for regex in (
        "((((a{1,90}){1,90}){1,90}){1,90}){1,90}",
        "(.*a){400}",
        "(x+x+)+y",
        r"\p{L}{9000}",
    ):
        start = time.process_time()
        try:
            follower = grammars.follow(StructuredOutputsParams(regex=regex))
            for _ in range(4):
                follower.masks([0], [0])
                follower.advance(ids("x"))
        except ValueError as error:
            assert "cannot be used" in str(error)  # noqa: PT017
        assert time.process_time() - start < 5, regex
