"""What a step costs with heads on a small model: trees and chains against plain decoding, in one run on the CPU.

    python bench/drafters.py --models DIR [--rounds N] [--tokens N] [--heads DIR] [--out FILE]

DIR holds smollm2-135m.gguf. The heads are random (EAGLE-3 with a draft vocabulary of 8,192, and five Medusa heads),
written here in their published formats: next to nothing is accepted, so a step emits one token and its time is its
cost; the controller that would stop drafting is off. Sides take turns, and a side's figure is the median over all steps
of all rounds; only ratios within a run are meant to be compared. Wanted: a tree of 26 nodes at most 3 plain steps, a
chain of 5 at most 1.8. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from foretell import LLM, SamplingParams

PROMPT = "Write a short story about a lighthouse keeper who finds a letter in a bottle."
HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 576, 1536, 9, 3, 64, 49152
DRAFTED_VOCABULARY, MEDUSA_HEADS = 8192, 5
WANTED = {"tree": 3.0, "chain": 1.8}


def random(*shape: int) -> Tensor:
    return (torch.randn(shape) * shape[-1] ** -0.5).bfloat16()


def write(folder: Path, name: str, tensors: dict[str, Tensor], config: dict[str, object]) -> Path:
    """A checkpoint's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / name)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_medusa(folder: Path) -> Path:
    """FasterDecoding's format."""
    tensors = {}
    for i in range(MEDUSA_HEADS):
        tensors[f"{i}.0.linear.weight"] = random(HIDDEN, HIDDEN)
        tensors[f"{i}.0.linear.bias"] = torch.zeros(HIDDEN, dtype=torch.bfloat16)
        tensors[f"{i}.1.weight"] = random(VOCABULARY, HIDDEN)
    config = {"medusa_num_heads": MEDUSA_HEADS, "medusa_num_layers": 1}
    return write(folder, "medusa_lm_head.safetensors", tensors, config)


def write_eagle3(folder: Path) -> Path:
    """SafeAILab's format."""
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    ones = torch.ones(HIDDEN, dtype=torch.bfloat16)
    kept = torch.arange(DRAFTED_VOCABULARY) * (VOCABULARY // DRAFTED_VOCABULARY)
    tensors = {
        "fc.weight": random(HIDDEN, 3 * HIDDEN),
        "norm.weight": ones,
        "lm_head.weight": random(DRAFTED_VOCABULARY, HIDDEN),
        "d2t": kept - torch.arange(DRAFTED_VOCABULARY),
        "midlayer.hidden_norm.weight": ones.clone(),
        "midlayer.input_layernorm.weight": ones.clone(),
        "midlayer.post_attention_layernorm.weight": ones.clone(),
        "midlayer.self_attn.q_proj.weight": random(q, 2 * HIDDEN),
        "midlayer.self_attn.k_proj.weight": random(kv, 2 * HIDDEN),
        "midlayer.self_attn.v_proj.weight": random(kv, 2 * HIDDEN),
        "midlayer.self_attn.o_proj.weight": random(HIDDEN, q),
        "midlayer.mlp.gate_proj.weight": random(INNER, HIDDEN),
        "midlayer.mlp.up_proj.weight": random(INNER, HIDDEN),
        "midlayer.mlp.down_proj.weight": random(HIDDEN, INNER),
    }
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "num_hidden_layers": 1,
        "vocab_size": VOCABULARY,
        "draft_vocab_size": DRAFTED_VOCABULARY,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 2048,
    }
    return write(folder, "model.safetensors", tensors, config)


def sides(model: str, heads: Path) -> dict[str, LLM]:
    """Every engine of the comparison."""
    medusa, eagle3 = write_medusa(heads / "medusa"), write_eagle3(heads / "eagle3")
    configs: dict[str, dict[str, object] | None] = {
        "plain": None,
        "medusa tree of 26": {"model": str(medusa), "tree": "eagle", "adaptive": False},
        "medusa chain of 5": {
            "model": str(medusa),
            "tree": "chain",
            "num_speculative_tokens": 5,
            "adaptive": False,
        },
        "eagle3 tree of 26": {"model": str(eagle3), "tree": "eagle", "adaptive": False},
        "eagle3 chain of 5": {"model": str(eagle3), "num_speculative_tokens": 5, "adaptive": False},
    }
    return {
        name: LLM(
            model,
            speculative_config=config,
            max_model_len=1024,
            max_num_seqs=1,
            device="cpu",
            compat="off",
            enable_prefix_caching=False,
        )
        for name, config in configs.items()
    }


def step_times(llm: LLM, tokens: int) -> tuple[list[float], float]:
    """(seconds of each step after the first two, tokens a step)."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    times, last, before = [], time.perf_counter(), llm.get_metrics()
    for _ in llm.stream(PROMPT, params):
        now = time.perf_counter()
        times.append(now - last)
        last = now
    return times[2:], llm.get_metrics().since(before).mean_acceptance_length


def measure(engines: dict[str, LLM], rounds: int, tokens: int) -> list[dict[str, object]]:
    """One row per side."""
    seen: dict[str, list[float]] = {name: [] for name in engines}
    lengths: dict[str, float] = {}
    for llm in engines.values():
        step_times(llm, 8)
    for turn in range(rounds):
        order: Sequence[str] = list(engines)[:: 1 if turn % 2 == 0 else -1]
        for name in order:
            times, lengths[name] = step_times(engines[name], tokens)
            seen[name] += times
    plain = statistics.median(seen["plain"])
    rows: list[dict[str, object]] = []
    for name, times in seen.items():
        middle = statistics.median(times)
        limit = next((limit for kind, limit in WANTED.items() if kind in name), None)
        rows.append(
            {
                "side": name,
                "step_ms": round(1000 * middle, 2),
                "spread_ms": round(1000 * (statistics.quantiles(times, n=10)[8] - middle), 2),
                "steps": len(times),
                "tokens_a_step": round(lengths[name], 3),
                "plain_steps": round(middle / plain, 3),
                "wanted": limit,
                "met": limit is None or middle / plain <= limit,
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument(
        "--heads", type=Path, help="keep the heads here instead of a temporary folder"
    )
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as scratch:
        engines = sides(str(given.models / "smollm2-135m.gguf"), given.heads or Path(scratch))
        rows = measure(engines, given.rounds, given.tokens)
    for row in rows:
        limit = "" if row["wanted"] is None else f" (wanted {row['wanted']})"
        print(
            f"{row['side']:>18}: {row['step_ms']:7.2f} ms a step = {row['plain_steps']} plain{limit}"
        )
    record = {
        "bench": "drafters",
        "model": "smollm2-135m",
        "threads": torch.get_num_threads(),
        "cpu": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "rounds": given.rounds,
        "rows": rows,
    }
    if given.out is not None:
        given.out.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record))


if __name__ == "__main__":
    main()
