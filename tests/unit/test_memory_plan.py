"""The memory plan: the engine's own arithmetic, remedies that work, and a pool that holds what the plan says."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from lab import draft_model, make_lab, tiny_decoder
from typer.testing import CliRunner

from foretell import LLM
from foretell.cli import app
from foretell.config import EngineConfig
from foretell.doctor.evidence import Evidence
from foretell.doctor.findings import diagnose
from foretell.model.config import ModelConfig
from foretell.model.decoder import Decoder
from foretell.planning import Device, decoder_model, plan_memory, read_bytes, refuse_too_large
from foretell.runner.memory import drafter_bytes, weights_bytes
from foretell.runner.memory_plan import GIB, MIB, Model, Shape, divide, explain, make_plan, remedies
from foretell.sampling_params import SamplingParams
from foretell.spec.drafter import KVSpec
from foretell.spec.tree import chain
from foretell.speculation import resolve_speculation

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}
EAGLE3 = {
    **LLAMA,
    "architectures": ["LlamaForCausalLMEagle3"],
    "num_hidden_layers": 1,
    "draft_vocab_size": 32000,
}


def folder(path: Path, config: dict[str, object]) -> str:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


def config_with(model: str, /, **speculation: object) -> EngineConfig:
    drafting = resolve_speculation(speculative_config=speculation or None)
    return EngineConfig(model=model, drafter=drafting.drafter, max_model_len=4096)


def test_an_8b_model_takes_what_its_name_says(tmp_path: Path) -> None:
    plan = plan_memory(config_with(folder(tmp_path / "m", LLAMA)), Device(True, 80 * GIB))
    parameters = 8_030_261_248  # as published for Llama-3.1-8B
    assert plan.target.bytes == pytest.approx(2 * parameters, rel=1e-4)
    assert plan.per_token == 2 * 32 * 8 * 128 * 2
    assert plan.works


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("biased", ["llama", "qwen2"])
def test_planned_weights_are_those_of_the_engine(tied: bool, biased: str) -> None:
    names = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
    small = {
        **LLAMA,
        "architectures": [names[biased]],
        "model_type": biased,
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": tied,
    }
    config = ModelConfig.from_hf(small)
    real = Decoder.random(config, dtype=torch.float32)
    assert decoder_model("m", config, torch.float32, gpu=False).bytes == weights_bytes(real)


def test_a_drafters_weights_are_found_and_the_targets_are_not_counted_twice() -> None:
    decoder = tiny_decoder(1, layers=1)
    drafter = draft_model(decoder)
    assert drafter_bytes(drafter) == weights_bytes(decoder)
    assert drafter_bytes(make_lab().engine.runner.device.drafter) == 0


def test_an_eagle3_head_from_its_config_alone(tmp_path: Path) -> None:
    """fc 3H x H, one layer whose attention reads 2H, a reduced head: the published checkpoint has 0.43 G parameters."""
    target = folder(tmp_path / "m", LLAMA)
    head = folder(tmp_path / "h", EAGLE3)
    plan = plan_memory(config_with(target, model=head, method="eagle3"), Device(True, 80 * GIB))
    assert plan.drafter is not None
    h, inner, kv, vocabulary = 4096, 14336, 1024, 32000
    by_hand = 3 * h * h + 2 * h * (h + 2 * kv) + h * h + 3 * h * inner + vocabulary * h
    assert plan.drafter.bytes == pytest.approx(2 * by_hand, rel=1e-3)
    assert plan.drafter.per_token == 2 * 8 * 128 * 2
    assert plan.shape.features == 3 * h
    assert plan.shape.nodes == 60


def test_medusa_heads_from_their_config_alone(tmp_path: Path) -> None:
    target = folder(tmp_path / "m", LLAMA)
    heads = folder(tmp_path / "h", {"medusa_num_heads": 4, "medusa_num_layers": 1})
    plan = plan_memory(config_with(target, model=heads, method="medusa"), Device(True, 80 * GIB))
    assert plan.drafter is not None
    assert plan.drafter.heads == 4 * 4096 * 128256 * 2
    assert plan.drafter.per_token == 0


def test_no_weights_are_needed_or_read(tmp_path: Path) -> None:
    where = tmp_path / "m"
    plan_memory(config_with(folder(where, LLAMA)), Device(True, 24 * GIB))
    assert [file.name for file in where.iterdir()] == ["config.json"]


SHAPE = Shape(
    hidden=1024,
    inner=4096,
    vocabulary=32000,
    itemsize=2,
    max_num_seqs=32,
    max_num_batched_tokens=2048,
    block_size=16,
    nodes=8,
    depth=7,
)
TARGET = Model("t", 2 * GIB, KVSpec(24, 8, 128), 2)
DRAFTER = Model("d", 1 * GIB, KVSpec(12, 8, 128), 2, heads=200 * MIB)


def test_what_does_not_fit_is_explained_with_remedies_the_cheapest_first() -> None:
    plan = make_plan(TARGET, DRAFTER, SHAPE, 4 * GIB, 0.8, asked=8192, most=8192)
    assert not plan.works
    said = explain(plan)
    order = [
        "raise gpu_memory_utilization from 0.8 to 0.97",
        "lower max_num_seqs from 32 to 8",
        "lower max_model_len from 8192 to 4096",
        "draft 3 tokens instead of 7",
        "a tenth of the target's size",
        "tensor_parallel_size=2",
        "share the target's output layer",
    ]
    places = [said.index(word) for word in order]
    assert places == sorted(places)
    assert "MiB of KV cache" in said


def test_a_remedy_that_is_said_to_be_enough_is_enough() -> None:
    kinds = set()
    for total in range(3500, 5200, 60):
        plan = make_plan(TARGET, DRAFTER, SHAPE, total * MIB, 0.8, asked=8192, most=8192)
        if plan.works:
            continue
        for cure in remedies(plan):
            better = _applied(plan, cure.what, total)
            if better is not None and cure.enough:
                kinds.add(cure.what.split()[0])
                assert better.works, (total, cure)
    assert {"raise", "lower", "use"} <= kinds


def _applied(plan, what: str, total: int):  # type: ignore[no-untyped-def]
    share, target, drafter, shape, asked = 0.8, TARGET, DRAFTER, SHAPE, 8192
    if "gpu_memory_utilization" in what:
        share = 0.97
    elif "max_num_seqs" in what:
        shape = replace(shape, max_num_seqs=8)
    elif "max_model_len" in what:
        asked = 4096
    elif "draft 3" in what:
        shape = replace(shape, nodes=4, depth=3)
    elif "tenth" in what:
        drafter = replace(DRAFTER, bytes=TARGET.bytes // 10)
    else:
        return None
    return make_plan(target, drafter, shape, total * MIB, share, asked=asked, most=8192)


def test_the_engine_and_the_plan_divide_alike() -> None:
    lab = make_lab(draft_model(tiny_decoder(1, layers=1)), chain(3), kv_cache_memory_bytes=1 << 20)
    shape = Shape(32, 64, 96, 8, 8, 256, 16, nodes=4, depth=3)
    per_token = KVSpec(2, 2, 8).bytes_per_token(8) + KVSpec(1, 2, 8).bytes_per_token(8)
    division = divide(1 << 20, per_token, shape, 160, 512)
    assert lab.engine.scheduler.blocks.num_blocks == division.blocks
    assert lab.engine.scheduler.max_model_len == division.longest


def test_as_many_requests_as_planned_run_at_once_without_preemption() -> None:
    lab = make_lab(
        draft_model(tiny_decoder(0)),
        chain(3),
        kv_cache_memory_bytes=600 << 10,
        max_model_len=100,
        max_num_seqs=64,
        enable_prefix_caching=False,
    )
    spec = KVSpec(2, 2, 8)
    shape = Shape(32, 64, 96, 8, 64, 256, 16, nodes=4, depth=3)
    model = Model("m", 0, spec, 8)
    plan = make_plan(model, model, shape, 1 << 30, 0.9, asked=100, most=512, kv_bytes=600 << 10)
    count = plan.requests(100)
    assert 2 <= count < 64
    for place in range(count):
        prompt = [3 + (place * 7 + i) % 80 for i in range(50)]
        params = SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True)
        lab.add(str(place), prompt, params)
    most = 0
    runs: dict[str, object] = {}
    while lab.engine.has_work():
        lab.step(runs)  # type: ignore[arg-type]
        most = max(most, len(lab.engine.scheduler.running))
    assert most == count
    assert lab.engine.scheduler.preemptions == 0


def test_a_given_pool_is_raised_by_its_own_name() -> None:
    plan = make_plan(TARGET, None, SHAPE, 8 * GIB, 0.9, asked=8192, most=8192, kv_bytes=10 * MIB)
    assert not plan.works
    first = remedies(plan)[0]
    assert first.what.startswith("raise kv_cache_memory_bytes from 10,485,760 to")
    assert first.enough
    raised = make_plan(
        TARGET, None, SHAPE, 8 * GIB, 0.9, asked=8192, most=8192, kv_bytes=10 * MIB + first.saved
    )
    assert raised.works


@pytest.mark.parametrize(
    ("text", "expected"),
    [("80GiB", 80 * GIB), ("24 GB", 24 * 10**9), ("16g", 16 * GIB), ("8192MiB", 8 * GIB)],
)
def test_amounts_of_memory(text: str, expected: int) -> None:
    assert read_bytes(text) == expected


def test_an_amount_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="no amount of memory"):
        read_bytes("lots")


def test_the_command_says_what_fits_and_its_exit_code_whether_it_does(tmp_path: Path) -> None:
    model = folder(tmp_path / "m", LLAMA)
    run = CliRunner()
    fits = run.invoke(app, ["plan", "--model", model, "--gpu-memory", "80GiB", "--json"])
    assert fits.exit_code == 0, fits.output
    record = json.loads(fits.stdout)
    assert record["fits"]
    assert record["requests"]["8192"] > record["requests"]["32768"] == 0
    tight = run.invoke(
        app, ["plan", "--model", model, "--gpu-memory", "12GiB", "--max-model-len", "4096"]
    )
    assert tight.exit_code == 3
    assert "tensor_parallel_size=2" in tight.output


def test_a_load_that_does_not_fit_says_what_helps_and_the_doctor_knows_it() -> None:
    with pytest.raises(
        ValueError, match="What helps, the cheapest first: raise kv_cache"
    ) as caught:
        make_lab(draft_model(tiny_decoder(1, layers=1)), chain(6), kv_cache_memory_bytes=20_000)
    said = str(caught.value)
    assert "lower max_model_len from 160 to 80" in said
    assert "draft 3 tokens instead of 6" in said
    assert diagnose(Evidence(method="draft_model", load_error=said))[0].code == "out_of_memory"


def test_a_model_larger_than_the_memory_is_refused_before_it_is_read(tmp_path: Path) -> None:
    """The folder has no weights at all: whoever looks for them fails with another message."""
    huge = folder(tmp_path / "huge", {**LLAMA, "num_hidden_layers": 32_000})
    with pytest.raises(
        ValueError, match=r"'huge' does not fit in memory.*Nothing was read"
    ) as caught:
        LLM(huge)
    said = str(caught.value)
    assert "13,31" in said.split("MiB")[0], "the figure is not that of 32,000 layers"
    assert "a smaller model" in said
    assert diagnose(Evidence(load_error=said))[0].code == "out_of_memory"


def test_the_weights_that_do_not_fit_are_named_with_what_would_make_them_fit(
    tmp_path: Path,
) -> None:
    model, head = folder(tmp_path / "m", LLAMA), folder(tmp_path / "head", EAGLE3)
    config = config_with(model, model=head, method="eagle3", num_speculative_tokens=3)
    refuse_too_large(
        config, Device(True, 18 * GIB)
    )  # fits; how much is left is the engine's to say
    with pytest.raises(ValueError, match="draft without weights, as ngram does") as caught:
        refuse_too_large(config, Device(True, 16 * GIB))
    assert "15,317 MiB and those of its drafter" in str(caught.value)
    assert "14,746 MiB may be used (0.9 of the 16,384 MiB that there are)" in str(caught.value)
    with pytest.raises(ValueError, match=r"raise gpu_memory_utilization to 0\.97"):
        refuse_too_large(config_with(model), Device(True, 16 * GIB))
    wide = replace(config_with(model), dtype="float32")
    with pytest.raises(ValueError, match=r"dtype='bfloat16' \(15,317 MiB\)"):
        refuse_too_large(wide, Device(True, 20 * GIB))
