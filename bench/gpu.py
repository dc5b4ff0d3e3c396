"""Speed on one GPU: dummy models of a named shape, plain and with EAGLE-3, whole requests, prefill included.

    python bench/gpu.py [--shape llama-3.1-8b] [--batch 1 8 32 128] [--k 5] [--mean 4.0] [--check] [--profile]

Weights are random, prompts are random token ids, and acceptance is forced (here, by replacing the accept rule in this
process; no server or library call can do it), so the figures say what a step costs and nothing about quality. The floor
is the time to read the weights once at the measured copy bandwidth. `--check` first compares graph, eager and
speculative text on a small model. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from dataclasses import replace
from pathlib import Path

import torch

from foretell.bench import profiler
from foretell.commands.profile import table
from foretell.config import EngineConfig, Ngram
from foretell.engine.build import engine_around
from foretell.engine.engine import Engine
from foretell.model.config import ModelConfig
from foretell.model.decoder import Decoder
from foretell.model.layers import fill
from foretell.ops.meta import SlotArrays
from foretell.ops.reference.verify import Decision, Drafted
from foretell.ops.table import OpTable, table_for
from foretell.ops.triton.fixed import FIXED
from foretell.runner.build import Parts, assemble
from foretell.sampling_params import SamplingParams
from foretell.spec.drafter import Drafter, NoDrafter
from foretell.spec.eagle import Concat, Eagle3Net, EagleDrafter
from foretell.spec.eagle import Parts as NetParts
from foretell.spec.ngram import NgramDrafter
from foretell.spec.verify import Acceptance
from foretell.spec.vocabulary import Vocabulary

SHAPES: dict[str, dict[str, object]] = {
    "llama-3.1-8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "rope_theta": 500000.0,
    },
    "llama-2-7b": {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "vocab_size": 32000,
    },
    "mistral-7b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
    },
    "qwen2.5-1.5b": {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
    },
    "mixtral-8x7b": {
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "tiny": {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 1000,
    },
}
DRAFT_VOCABULARY = 32000
PROMPT, OUTPUT, BATCHED = 256, 256, 8192


def config_of(shape: str) -> ModelConfig:
    common = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "eos_token_id": 2,
    }
    return ModelConfig.from_hf({**common, **SHAPES[shape]})


def fill_noise(model: torch.nn.Module, device: torch.device, seed: int = 0) -> None:
    generator = torch.Generator(device=device).manual_seed(seed)
    for name, parameter in list(model.named_parameters()):
        if parameter.dim() == 1:
            values = torch.ones(parameter.shape, dtype=parameter.dtype, device=device)
        else:
            values = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
            values.normal_(0, parameter.shape[-1] ** -0.5, generator=generator)
        fill(model, name, values)


def target_of(
    shape: str, dtype: torch.dtype, device: torch.device, ops: OpTable | None = None
) -> Decoder:
    model = Decoder(config_of(shape), dtype, device, ops or table_for(device))
    fill_noise(model, device)
    return model


def eagle3(target: Decoder, vocabulary: int) -> EagleDrafter:
    """A one-layer EAGLE-3 head with a reduced vocabulary."""
    layer = replace(target.config, layers=1, windows=(None,), layer_ropes=(0,), experts=0)
    vocabulary = min(vocabulary, target.config.vocab_size)
    parts = NetParts(layer=layer, own_embedding=0, own_head=vocabulary)
    net = Eagle3Net(
        parts, Concat(target_hidden=target.config.hidden_size), target.dtype, target.ops
    )
    fill_noise(net, target.device, seed=1)
    draft_of = torch.arange(target.config.vocab_size, device=target.device) % vocabulary
    target_of = torch.arange(vocabulary, device=target.device)
    layers = target.config.layers
    taps = (2, layers // 2, layers - 1) if layers < 7 else (2, layers // 2, layers - 3)
    pairs = Vocabulary(draft_of, target_of, target.config.vocab_size)
    return EagleDrafter(net, taps, pairs, Acceptance.MATCH)


def forced(mean: float, table: OpTable) -> OpTable:
    """A table whose commit finds chains accepted so that their emitted lengths have this mean; all else is done."""

    def decide(
        drafted: Drafted, slots: SlotArrays, rows: torch.Tensor, block_size: int, moves: bool
    ) -> Decision:
        if drafted.depth > 0:
            whole, rest = int(mean), mean - int(mean)
            turn = (slots.length[rows].unsqueeze(1) * 7919) % 1000
            count = torch.where(turn < 1000 * rest, whole + 1, whole)
            place = torch.arange(drafted.depth + 1, device=rows.device)
            right = torch.roll(drafted.sample, 1, dims=1)
            drafted = replace(drafted, tokens=torch.where(place < count, right, -1))
        return table.decide(drafted, slots, rows, block_size, moves)

    return replace(table, decide=decide)


def engine_of(target: Decoder, drafter: Drafter, k: int, batch: int, eager: bool = False) -> Engine:
    config = EngineConfig(
        max_model_len=PROMPT + OUTPUT + 64,
        max_num_seqs=batch,
        max_num_batched_tokens=BATCHED,
        kv_cache_memory_bytes=40 << 30 if target.config.hidden_size > 1000 else 1 << 30,
        enable_prefix_caching=False,
        enforce_eager=eager,
        adaptive=False,
        drafter=Ngram(num_speculative_tokens=k) if k else None,
    )
    built = assemble(config, Parts(target, drafter, target.dtype), tokenizer=None)
    return engine_around(built, config)


def run(
    engine: Engine, prompts: list[list[int]], output: int, temperature: float = 0.0
) -> tuple[list[list[int]], float, int]:
    params = SamplingParams(temperature=temperature, max_tokens=output, ignore_eos=True)
    torch.cuda.synchronize()
    started, steps = time.perf_counter(), 0
    for i, prompt in enumerate(prompts):
        engine.add(str(i), prompt, params, seed=i)
    texts: list[list[int]] = [[] for _ in prompts]
    while engine.has_work():
        for delta in engine.step():
            texts[int(delta.request_id)] += delta.token_ids
        steps += 1
    torch.cuda.synchronize()
    return texts, time.perf_counter() - started, steps


def random_prompts(count: int, vocabulary: int, length: int = PROMPT) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randint(3, vocabulary, (length,), generator=generator).tolist() for _ in range(count)
    ]


def bandwidth(device: torch.device) -> float:
    source = torch.empty(1 << 32, dtype=torch.uint8, device=device)
    copy = torch.empty_like(source)
    times = []
    for _ in range(8):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        copy.copy_(source)
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return 2 * source.nbytes / statistics.median(times)


def check(device: torch.device) -> dict[str, object]:
    """Graph, eager and speculative text on a small float32 model."""
    target = target_of("tiny", torch.float32, device)
    prompts = random_prompts(5, 1000, 40)
    plain = run(engine_of(target, NoDrafter(), 0, 8), prompts, 48)[0]
    found: dict[str, object] = {
        "eager": run(engine_of(target, NoDrafter(), 0, 8, eager=True), prompts, 48)[0] == plain
    }
    for k in (1, 5):
        for eager in (False, True):
            engine = engine_of(target, eagle3(target, 500), k, 8, eager)
            found[f"eagle3 k={k} eager={eager}"] = run(engine, prompts, 48)[0] == plain
            found[f"replays k={k} eager={eager}"] = engine.runner.graphs.replays
    found["n-gram"] = run(engine_of(target, NgramDrafter(1, 3), 5, 8), prompts, 48)[0] == plain
    sampled = run(engine_of(target, NoDrafter(), 0, 8), prompts, 48, 0.8)[0]
    drafted = run(engine_of(target, eagle3(target, 500), 5, 8), prompts, 48, 0.8)[0]
    found["sampled"] = drafted == sampled and sampled != plain
    found["fixed"] = fixed(device, prompts)
    cpu = target_of("tiny", torch.float32, torch.device("cpu"))
    for ours, theirs in zip(cpu.parameters(), target.parameters(), strict=True):
        ours.data.copy_(theirs.data)
    reference = run(engine_of(cpu, NoDrafter(), 0, 8), prompts, 48)[0]
    found["cpu reference"] = sum(a == b for a, b in zip(reference, plain, strict=True))
    return found


def fixed(device: torch.device, prompts: list[list[int]]) -> bool:
    """bfloat16 text with and without drafts, and one by one, in the fixed order of addition."""
    target = target_of("tiny", torch.bfloat16, device, FIXED)
    plain = run(engine_of(target, NoDrafter(), 0, 8), prompts, 48)[0]
    drafted = run(engine_of(target, eagle3(target, 500), 5, 8), prompts, 48)[0]
    engine = engine_of(target, NoDrafter(), 0, 1)
    alone = [run(engine, [prompt], 48)[0][0] for prompt in prompts]
    return plain == drafted == alone


def floors(
    target: Decoder, drafter: Drafter, k: int, batch: int, bandwidth: float
) -> dict[str, float]:
    """Milliseconds that a decode step needs to read weights and keys once: of the target, and of the drafter's passes.

    A mixture of experts counts whole: with few rows a step reads less.
    """
    layers, heads, dim = target.kv_shape
    keys = batch * (PROMPT + OUTPUT / 2) * 2 * heads * dim * target.dtype.itemsize
    weights = sum(p.nbytes for part in (target.layers, target.head) for p in part.parameters())
    found = {"target": weights + layers * keys}
    if isinstance(drafter, EagleDrafter):
        parts = dict(drafter.net.named_parameters())
        every = sum(p.nbytes for name, p in parts.items() if not name.startswith("fc."))
        once = sum(p.nbytes for name, p in parts.items() if name.startswith("fc."))
        found["draft"] = once + k * (every + keys)
    return {name: 1e3 * nbytes / bandwidth for name, nbytes in found.items()}


def measure(
    target: Decoder, k: int, batch: int, repeats: int, bandwidth: float
) -> dict[str, object]:
    drafter: Drafter = eagle3(target, DRAFT_VOCABULARY) if k else NoDrafter()
    engine = engine_of(target, drafter, k, batch)
    prompts = random_prompts(batch, target.config.vocab_size)
    run(engine, prompts, 32)
    run(engine, prompts, OUTPUT)
    prefill = statistics.median(run(engine, prompts, 1)[1] for _ in range(max(repeats, 3)))
    seconds, steps = [], 0
    for _ in range(repeats):
        texts, elapsed, steps = run(engine, prompts, OUTPUT)
        assert all(len(text) == OUTPUT for text in texts)
        seconds.append(elapsed)
    middle = statistics.median(seconds)
    prompt_steps = -(-batch * PROMPT // BATCHED)
    decode = 1e3 * (middle - prefill) / (steps - prompt_steps)
    floor = sum(floors(target, drafter, k, batch, bandwidth).values())
    return {
        "k": k,
        "requests": batch,
        "tokens_per_s": round(batch * OUTPUT / middle, 1),
        "seconds": [round(s, 4) for s in seconds],
        "steps": steps,
        "ms_per_step": round(1e3 * middle / steps, 3),
        "prefill_s": round(prefill, 5),  # the same prompts with one token each
        "decode_ms": round(decode, 3),
        "floor_ms": round(floor, 3),
        "floor_share": round(floor / decode, 3),
        "replays": engine.runner.graphs.replays,
    }


def profile(target: Decoder, k: int, batch: int, out: Path, bandwidth: float) -> dict[str, object]:
    """Phases and kernels of a few steps, as a table in a file; the phases beside their floors."""
    drafter: Drafter = eagle3(target, DRAFT_VOCABULARY) if k else NoDrafter()
    engine = engine_of(target, drafter, k, batch)
    prompts = random_prompts(batch, target.config.vocab_size)
    run(engine, prompts, 32)
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True)
    found = profiler.profile(engine, prompts, params, steps=10, warm=8)
    (out / f"profile_k{k}_b{batch}.txt").write_text(table(found))
    floor = floors(target, drafter, k, batch, bandwidth)
    return {
        "k": k,
        "requests": batch,
        "ms_per_step": round(found.ms_per_step, 3),
        "phases": {part.name: round(part.ms, 4) for part in found.phases},
        "floors": {name: round(ms, 4) for name, ms in floor.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--k", type=int, default=5)
    parser.add_argument("--mean", type=float, default=4.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    out = Path(os.environ.get("OUT", "."))
    result: dict[str, object] = {"torch": torch.__version__, "shape": arguments.shape}
    if arguments.check:
        result["check"] = check(device)
        print("check", json.dumps(result["check"]), flush=True)
    result["device"] = torch.cuda.get_device_name(device)
    bytes_per_s = bandwidth(device)
    result["copy_bandwidth"] = bytes_per_s
    ops = forced(arguments.mean, table_for(device))
    target = target_of(arguments.shape, torch.bfloat16, device, ops)
    rows = []
    for batch in arguments.batch:
        for k in (0, arguments.k):
            try:
                rows.append(measure(target, k, batch, arguments.repeats, bytes_per_s))
            except Exception as error:  # a variant that fails must not lose the others' figures
                rows.append(
                    {"k": k, "requests": batch, "error": f"{type(error).__name__}: {error}"[:500]}
                )
            print(json.dumps(rows[-1]), flush=True)
            torch.cuda.empty_cache()
    if arguments.profile:
        result["profiles"] = [
            profile(target, k, batch, out, bytes_per_s)
            for k in (0, arguments.k)
            for batch in dict.fromkeys((1, arguments.batch[-1]))
        ]
    result["rows"] = rows
    (out / "gpu.json").write_text(json.dumps(result, indent=1))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
