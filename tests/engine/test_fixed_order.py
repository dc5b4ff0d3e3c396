"""`deterministic=True` on a CPU: in bfloat16 and float32 every bit of a text is that of plain decoding alone.

Log-probabilities are compared for equality, so one differing bit anywhere in the target fails, near-tie or not.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch

pytest.importorskip("numba")

from lab import VOCABULARY, Lab, Run, ScriptedDrafter, prompts

from foretell.config import EngineConfig
from foretell.engine.build import engine_around
from foretell.model.config import ModelConfig
from foretell.model.decoder import Decoder
from foretell.ops.table import table_for
from foretell.runner.build import Parts, assemble
from foretell.sampling_params import SamplingParams
from foretell.spec.drafter import Drafter, NoDrafter
from foretell.spec.ngram import NgramDrafter
from foretell.spec.presets import preset
from foretell.spec.tree import Tree, chain

CPU = torch.device("cpu")
DTYPES = [torch.bfloat16, torch.float32]
PROMPTS = prompts(6, seed=4, low=4, high=90)
PARAMS = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=2)


@cache
def target(dtype: torch.dtype, experts: bool = False) -> Decoder:
    """Wide enough for products to be divided among tiles and threads."""
    shape = {
        "model_type": "mixtral" if experts else "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": 192,
        "intermediate_size": 1536,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }
    if experts:
        shape |= {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 256}
    ops = table_for(CPU, deterministic=True)
    return Decoder.random(ModelConfig.from_hf(shape), seed=1, dtype=dtype, ops=ops)


def lab(of: Decoder, drafter: Drafter, tree: Tree, **config: object) -> Lab:
    settings = {"max_model_len": 160, "kv_cache_memory_bytes": 64 << 20, "adaptive": False}
    full = EngineConfig(**(settings | config))  # type: ignore[arg-type]
    parts = Parts(of, drafter, of.dtype, tree=tree)
    return Lab(engine_around(assemble(full, parts, tokenizer=None), full))


@cache
def alone(dtype: torch.dtype, experts: bool = False) -> tuple[Run, ...]:
    """Plain decoding, one request after the other, whole prompts, no prefix cache."""
    plain = lab(target(dtype, experts), NoDrafter(), chain(0), enable_prefix_caching=False)
    return tuple(plain.solo(prompt, PARAMS) for prompt in PROMPTS)


def foresight(dtype: torch.dtype, tree: Tree, experts: bool = False) -> ScriptedDrafter:
    """Right tokens along the last children, so that accepted nodes lie scattered; wrong ones elsewhere."""
    texts = [
        prompt + run.tokens for prompt, run in zip(PROMPTS, alone(dtype, experts), strict=True)
    ]
    path, node = [0], 0
    while children := [i for i, parent in enumerate(tree.parents) if parent == node]:
        node = children[-1]
        path.append(node)

    def script(known: list[int], shape: Tree) -> list[int]:
        assert shape == tree
        whole = next(text for text in texts if text[: len(known)] == known)
        drafts = [-1] + [(known[-1] + i) % VOCABULARY for i in range(1, tree.nodes)]
        for depth, place in enumerate(path[1:]):
            ahead = whole[len(known) + depth : len(known) + depth + 1]
            # Every other step is refused half-way.
            if ahead and (depth < 1 or len(known) % 2):
                drafts[place] = ahead[0]
        return drafts

    return ScriptedDrafter(script)


def together(machine: Lab) -> list[Run]:
    for i, prompt in enumerate(PROMPTS):
        machine.add(str(i), prompt, PARAMS)
    runs = machine.drain()
    return [runs[str(i)] for i in range(len(PROMPTS))]


def assert_equal(runs: list[Run], expected: tuple[Run, ...]) -> None:
    for run, wanted in zip(runs, expected, strict=True):
        assert run.tokens == wanted.tokens
        assert run.logprobs == wanted.logprobs, "the same text by other bits"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["chain", "medusa"])
def test_any_tree_in_any_company_has_the_bits_of_plain_decoding_alone(
    dtype: torch.dtype, name: str
) -> None:
    tree = chain(5) if name == "chain" else preset("mc_sim_7b_63")
    runs = together(lab(target(dtype), foresight(dtype, tree), tree))
    assert sum(run.accepted for run in runs) > 2 * len(runs), "nothing was accepted"
    assert_equal(runs, alone(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_n_grams_in_a_batch_of_small_chunks_have_the_bits_of_plain_decoding_alone(
    dtype: torch.dtype,
) -> None:
    small = lab(target(dtype), NgramDrafter(1, 3), chain(4), max_num_batched_tokens=40)
    assert_equal(together(small), alone(dtype))
    assert_equal(together(small), alone(dtype))  # again, with prompts from the prefix cache


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_text_computed_again_after_a_preemption_keeps_its_bits(dtype: torch.dtype) -> None:
    of = target(dtype)
    block = 2 * 2 * 2 * 32 * 8 * of.dtype.itemsize  # layers, K and V, heads, channels, tokens
    sizes = {"block_size": 8, "kv_cache_memory_bytes": 36 * block, "max_model_len": 116}
    tight = lab(of, NoDrafter(), chain(0), **sizes)
    runs = together(tight)
    assert tight.engine.scheduler.preemptions > 0, "the pool was ample"
    assert_equal(runs, alone(dtype))


def test_experts_keep_their_bits() -> None:
    tree = preset("mc_sim_7b_63")
    drafter = foresight(torch.bfloat16, tree, experts=True)
    runs = together(lab(target(torch.bfloat16, experts=True), drafter, tree))
    assert_equal(runs, alone(torch.bfloat16, experts=True))
