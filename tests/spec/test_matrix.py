"""Every checkpoint format, under every sampling option and temperature at once: the text of plain decoding.

One batch mixes all options with all temperatures, so that rows of every kind stand beside each other. Under `match` all
of them must agree with plain decoding token for token; under `rejection` the greedy ones.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import checkpoints as files
import pytest
from lab import Lab, Run, make_lab, prompts, tiny_decoder

from foretell.sampling_params import SamplingParams
from foretell.spec.chained import ChainedDrafter
from foretell.spec.checkpoint.load import Wanted, identify, load_drafter
from foretell.spec.drafter import KVSpec
from foretell.spec.dynamic_tree import Growth
from foretell.spec.suffix import SuffixDrafter, SuffixLimits
from foretell.spec.tree import Tree, chain
from foretell.spec.verify import Acceptance

TARGET = tiny_decoder(0, layers=7, vocabulary=files.V)
TEMPERATURES = (0.0, 0.7, 1.0)
OPTIONS = {
    "plain": SamplingParams(),
    "penalties": SamplingParams(
        repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.3
    ),
    "min_p": SamplingParams(min_p=0.05, top_p=0.9, top_k=20),
    "logit_bias": SamplingParams(logit_bias={5: 3.0, 9: -100.0, 40: 1.5}, min_tokens=4),
    "stop": SamplingParams(stop_token_ids=list(range(10, 40))),
    "logprobs": SamplingParams(logprobs=3),
    "allowed": SamplingParams(allowed_token_ids=list(range(3, 50))),
}
MIX = {
    f"{name} {temperature}": replace(params, temperature=temperature, max_tokens=14)
    for name, params in OPTIONS.items()
    for temperature in TEMPERATURES
}
PROMPTS = prompts(len(MIX), seed=8)


def run_all(lab: Lab, wanted: dict[str, SamplingParams]) -> dict[str, Run]:
    for i, (name, params) in enumerate(MIX.items()):
        if name in wanted:
            bad = [[11], [5, 40]] if i % 3 == 0 else []
            lab.add(name, PROMPTS[i], params, seed=50 + i, bad_words=bad)
    return lab.drain()


@pytest.fixture(scope="module")
def plain() -> dict[str, Run]:
    return run_all(make_lab(target=TARGET), MIX)


def lab_for(
    folder: Path,
    name: str,
    acceptance: str,
    tree: Tree | Growth | None,
    chained: bool = False,
    blocks: int | None = None,
    **config: object,
) -> Lab:
    """An engine with a drafter from a file; `blocks` KV blocks are all it has."""
    files.write(folder, *files.FORMATS[name]())
    found = load_drafter(identify(folder), TARGET, Acceptance(acceptance), Wanted(tree=tree))
    first = SuffixDrafter(SuffixLimits(shortest=1, tokens=4096)) if chained else None
    drafter = found.drafter if first is None else ChainedDrafter(first, found.drafter, found.grows)
    if blocks is not None:
        spec = found.drafter.kv
        own = 0 if spec is None else spec.bytes_per_token(8)
        config["kv_cache_memory_bytes"] = (
            blocks * 16 * (KVSpec(*TARGET.kv_shape).bytes_per_token(8) + own)
        )
    return make_lab(
        drafter,
        found.tree,
        TARGET,
        acceptance,
        longest=found.longest,
        learner=first,
        grows=found.grows,
        draws=found.draws,
        scratch=found.scratch,
        max_num_batched_tokens=600,
        **config,
    )


def compare(runs: dict[str, Run], plain: dict[str, Run]) -> None:
    for name, run in runs.items():
        oracle = plain[name]
        assert run.tokens == oracle.tokens, name
        assert (run.finish, run.stop_reason) == (oracle.finish, oracle.stop_reason), name
        assert len(run.logprobs) == len(oracle.logprobs)
        for ours, theirs in zip(run.logprobs, oracle.logprobs, strict=True):
            assert (ours.token, ours.rank) == (theirs.token, theirs.rank)
            assert list(ours.top) == list(theirs.top)
            assert abs(ours.logprob - theirs.logprob) < 1e-4
    assert sum(run.drafted for run in runs.values()) > 0


BUSHY = Tree((-1, 0, 0, 1, 1, 2, 3))


@pytest.mark.parametrize("name", files.FORMATS)
@pytest.mark.parametrize("chained", [False, True], ids=["alone", "chained"])
def test_every_format_gives_the_text_of_plain_decoding_under_every_option(
    name: str, chained: bool, tmp_path: Path, plain: dict[str, Run]
) -> None:
    lab = lab_for(tmp_path / "d", name, "match", None, chained)
    compare(run_all(lab, MIX), plain)


@pytest.mark.parametrize("name", files.FORMATS)
@pytest.mark.parametrize("tree", [chain(3), BUSHY], ids=["chain", "bushy"])
def test_greedy_rows_are_those_of_plain_decoding_under_rejection(
    name: str, tree: Tree, tmp_path: Path, plain: dict[str, Run]
) -> None:
    """Sampled rows run beside them; theirs is another text of the same law (test_laws.py)."""
    runs = run_all(lab_for(tmp_path / "d", name, "rejection", tree), MIX)
    assert len(runs) == len(MIX)
    compare({k: run for k, run in runs.items() if MIX[k].temperature == 0}, plain)


@pytest.mark.parametrize("name", ["eagle bin", "eagle3"])
@pytest.mark.parametrize("acceptance", ["match", "rejection"])
def test_grown_trees_hold_under_every_option(
    name: str, acceptance: str, tmp_path: Path, plain: dict[str, Run]
) -> None:
    lab = lab_for(tmp_path / "d", name, acceptance, Growth(4, 4, 14), chained=True)
    runs = run_all(lab, MIX)
    held = acceptance == "match"
    compare({k: run for k, run in runs.items() if held or MIX[k].temperature == 0}, plain)


@pytest.mark.parametrize("name", files.FORMATS)
def test_R39_every_format_meets_the_context_limit(name: str, tmp_path: Path) -> None:
    """Prompts of 56 to 63 tokens, a limit of 64, also after preemptions: the rest of the context, to the token."""
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=None)
    texts = [prompts(1, seed=n, low=n, high=n + 1)[0] for n in range(56, 64)]
    plain = make_lab(target=TARGET, max_model_len=64)
    lab = lab_for(tmp_path / "d", name, "match", None, max_model_len=64)
    tight = lab_for(tmp_path / "t", name, "match", None, max_model_len=64, blocks=26)
    for one in (plain, lab, tight):
        for text in texts:
            one.add(str(len(text)), text, params)
    expected, got, resumed = plain.drain(), lab.drain(), tight.drain()
    for length in range(56, 64):
        runs = [all_[str(length)] for all_ in (expected, got, resumed)]
        assert {tuple(run.tokens) for run in runs} == {tuple(runs[0].tokens)}
        assert {(len(run.tokens), run.finish) for run in runs} == {(64 - length, "length")}
    for one in (plain, lab):
        with pytest.raises(ValueError, match="maximum context length is 64"):
            one.add("long", [5] * 64, params)


WISHES = {
    "all": SamplingParams(),
    "none": SamplingParams(num_speculative_tokens=0),
    "off": SamplingParams(speculate=False),
    "one": SamplingParams(num_speculative_tokens=1),
    "two": SamplingParams(num_speculative_tokens=2),
}


@pytest.mark.parametrize("name", files.FORMATS)
@pytest.mark.parametrize("chained", [False, True], ids=["alone", "chained"])
def test_every_format_drafts_for_each_request_as_much_as_it_wants(
    name: str, chained: bool, tmp_path: Path, plain: dict[str, Run]
) -> None:
    """Requests that want nothing, little and everything stand in one batch; nobody's text changes."""
    tree = Tree((-1, 0, 0, 1, 1, 2, 3))
    lab = lab_for(tmp_path / "d", name, "match", tree, chained)
    oracle = make_lab(target=TARGET)
    for i, (wish, params) in enumerate(WISHES.items()):
        for temperature in (0.0, 0.8):
            own = replace(params, temperature=temperature, max_tokens=24, ignore_eos=True)
            for one in (lab, oracle):
                one.add(f"{wish} {temperature}", PROMPTS[i], own, seed=i)
    runs, expected = lab.drain(), oracle.drain()
    deepest = {"all": tree.depth, "none": 0, "off": 0, "one": 1, "two": 2}
    for key, run in runs.items():
        assert run.tokens == expected[key].tokens
        depth = deepest[key.split()[0]]
        most = sum(0 < d <= depth for d in tree.depths)
        assert all(delta.drafted <= most for delta in run.deltas), key
        assert all(delta.accepted <= depth for delta in run.deltas), key
        assert (run.drafted > 0) == (depth > 0), key
