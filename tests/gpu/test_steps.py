"""What holds on a GPU only: captured steps are the plain ones, nothing in a step waits, the fixed order is fixed."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from foretell.config import EngineConfig, Ngram
from foretell.engine.build import engine_around
from foretell.engine.engine import Engine
from foretell.model.config import ModelConfig
from foretell.model.decoder import Decoder
from foretell.ops.table import OpTable, table_for
from foretell.runner.build import Parts, assemble
from foretell.runner.step import decode_step, draft_step
from foretell.sampling_params import SamplingParams
from foretell.spec.autoregressive import DraftModelDrafter
from foretell.spec.drafter import Drafter, NoDrafter
from foretell.spec.ngram import NgramDrafter
from foretell.spec.processors import Mode
from foretell.spec.verify import Acceptance
from foretell.spec.vocabulary import same

DEVICE, WORDS = torch.device("cuda"), 300
PROMPTS = [[3 + (7 * i + j * j) % 290 for j in range(20 + 5 * i)] for i in range(5)]


def model(layers: int, dtype: torch.dtype, ops: OpTable | None = None) -> Decoder:
    config = ModelConfig.from_hf(
        {
            "model_type": "llama",
            "vocab_size": WORDS,
            "hidden_size": 256,
            "intermediate_size": 512,
            "num_hidden_layers": layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
        }
    )
    return Decoder.random(config, seed=layers, dtype=dtype, device=DEVICE, ops=ops)


def drafter_of(kind: str, target: Decoder) -> Drafter:
    if kind == "none":
        return NoDrafter()
    if kind == "ngram":
        return NgramDrafter(1, 3)
    draft = model(1, target.dtype, target.ops)
    words = same(WORDS, WORDS, WORDS, DEVICE)
    return DraftModelDrafter(draft, words, Acceptance.MATCH)


def engine_of(target: Decoder, kind: str, eager: bool = False, slots: int = 8) -> Engine:
    config = EngineConfig(
        max_model_len=256,
        max_num_seqs=slots,
        kv_cache_memory_bytes=1 << 28,
        enforce_eager=eager,
        adaptive=False,
        drafter=None if kind == "none" else Ngram(num_speculative_tokens=4),
    )
    built = assemble(config, Parts(target, drafter_of(kind, target), target.dtype), tokenizer=None)
    return engine_around(built, config)


def texts(
    engine: Engine, temperature: float, prompts: list[list[int]] = PROMPTS
) -> list[list[int]]:
    params = SamplingParams(temperature=temperature, max_tokens=40, ignore_eos=True)
    for i, prompt in enumerate(prompts):
        engine.add(str(i), prompt, params, seed=i)
    found: list[list[int]] = [[] for _ in prompts]
    while engine.has_work():
        for delta in engine.step():
            found[int(delta.request_id)] += delta.token_ids
    return found


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("kind", ["none", "ngram", "model"])
def test_captured_steps_write_what_plain_ones_write(kind: str, temperature: float) -> None:
    target = model(2, torch.float32)
    plain = texts(engine_of(target, "none", eager=True), temperature)
    engine = engine_of(target, kind)
    assert texts(engine, temperature) == plain
    assert engine.runner.graphs.replays > 0


@pytest.mark.parametrize("kind", ["none", "ngram", "model"])
def test_a_step_never_waits_for_the_device(kind: str) -> None:
    engine = engine_of(model(2, torch.float32), kind, eager=True)
    texts(engine, 0.8)  # what is made once is made
    runner = engine.runner
    rows = torch.arange(4, device=DEVICE)
    shape, mode = runner.shapes[-1], Mode(sampled=True, filtered=True)

    def once() -> None:
        with torch.inference_mode():
            outcome = decode_step(runner.device, rows, shape, mode, 128)
            if kind != "none":
                draft_step(runner.device, rows, outcome, shape, mode, 140)

    once()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        once()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.get_sync_debug_mode() == 0


@pytest.mark.parametrize("kind", ["ngram", "model"])
def test_in_the_fixed_order_bfloat16_text_is_the_same_alone_together_and_with_drafts(
    kind: str,
) -> None:
    target = model(2, torch.bfloat16, table_for(DEVICE, deterministic=True))
    together = texts(engine_of(target, "none"), 0.0)
    assert texts(engine_of(target, kind), 0.0) == together
    engine = engine_of(target, "none", slots=1)
    assert [texts(engine, 0.0, [prompt])[0] for prompt in PROMPTS] == together
