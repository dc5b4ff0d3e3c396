"""A whole engine on the kernels: with chains and trees, drafted and grown, the text is that of plain decoding."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from kernel_cases import DEVICE

from foretell.config import EngineConfig
from foretell.engine.build import engine_around
from foretell.model.config import ModelConfig
from foretell.model.decoder import Decoder
from foretell.ops.table import REFERENCE, OpTable
from foretell.ops.triton.table import CUDA
from foretell.runner.build import Parts, assemble
from foretell.sampling_params import SamplingParams
from foretell.spec.autoregressive import DraftModelDrafter
from foretell.spec.drafter import Drafter, NoDrafter
from foretell.spec.ngram import NgramDrafter
from foretell.spec.tree import Tree, chain
from foretell.spec.verify import Acceptance
from foretell.spec.vocabulary import same

VOCABULARY = 96
BUSHY = Tree((-1, 0, 0, 1, 1, 3))
PROMPT = [5, 6, 7, 8, 5, 6, 7, 8, 5, 6]


def decoder(ops: OpTable, seed: int) -> Decoder:
    config = ModelConfig.from_hf(
        {
            "model_type": "llama",
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 512,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
        }
    )
    return Decoder.random(config, seed, torch.float32, DEVICE, ops)


def text(ops: OpTable, kind: str, tree: Tree, params: SamplingParams) -> list[int]:
    drafter: Drafter = NoDrafter()
    if kind == "ngram":
        drafter = NgramDrafter(1, 3)
    elif kind == "model":
        # Nearly the target, so that paths are accepted and keys move.
        words = same(VOCABULARY, VOCABULARY, VOCABULARY, DEVICE)
        drafter = DraftModelDrafter(decoder(ops, 1), words, Acceptance.MATCH)
    config = EngineConfig(
        max_model_len=64, max_num_seqs=2, kv_cache_memory_bytes=8 << 20, adaptive=False
    )
    parts = Parts(decoder(ops, 1), drafter, torch.float32, tree=tree)
    engine = engine_around(assemble(config, parts, tokenizer=None), config)
    engine.add("a", PROMPT, params, seed=3)
    found: list[int] = []
    while engine.has_work():
        for delta in engine.step():
            found += delta.token_ids
    return found


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(
    ("kind", "tree"), [("ngram", chain(3)), ("model", chain(3)), ("model", BUSHY)]
)
def test_text_is_that_of_the_reference_without_drafts(
    kind: str, tree: Tree, temperature: float
) -> None:
    params = SamplingParams(
        temperature=temperature, top_p=0.9 if temperature else 1.0, max_tokens=8, ignore_eos=True
    )
    plain = text(REFERENCE, "none", chain(0), params)
    assert len(plain) == 8
    assert text(CUDA, kind, tree, params) == plain
