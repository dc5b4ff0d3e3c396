"""Speed on the CPU: plain and speculative decoding, batches, first tokens and memory, in one run.

    python bench/cpu.py --models DIR [--prompts N] [--part NAME ...] [--out FILE]

DIR holds smollm2-135m.gguf, and for the part `pair` qwen2.5-coder-1.5b.gguf and qwen2.5-coder-0.5b.gguf. Every
comparison alternates its sides within one run, and reports medians: only the ratios are meant to be compared across
machines. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from foretell import LLM, SamplingParams
from foretell.outputs import RequestOutput

TOKENS = 128
CHAT = [
    "What are the main differences between a virus and a bacterium?",
    "Write a short story about a lighthouse keeper who finds a letter.",
    "How do I make a simple tomato sauce?",
    "Explain how rainbows form to a ten-year-old.",
    "Give me five tips for learning a new language.",
    "Why did the Roman Empire fall?",
    "Describe a morning in a busy train station.",
    "What should I consider when I buy a used bicycle?",
]
PASSAGE = """def read_table(path, separator=","):
    rows = []
    with open(path, encoding="utf-8") as handle:
        header = handle.readline().rstrip("\\n").split(separator)
        for line in handle:
            values = line.rstrip("\\n").split(separator)
            rows.append(dict(zip(header, values)))
    return header, rows


def write_table(path, header, rows, separator=","):
    with open(path, "w", encoding="utf-8") as handle:
        handle.write(separator.join(header) + "\\n")
        for row in rows:
            handle.write(separator.join(str(row[name]) for name in header) + "\\n")
"""
COPY = [
    f"Repeat the following text exactly, without any comment:\n\n{PASSAGE}",
    f"Here is a file:\n\n{PASSAGE}\nPrint the whole file again, with every name `rows` kept as it is.",
    "Quote this paragraph word for word: The harbour was quiet that night. A single lamp burned above the "
    "customs house, and the boats rocked gently against the pier. Nobody saw the small grey ship come in from the "
    "north, and nobody heard the three people who walked up the wet stone steps and vanished into the old town.",
    f"Copy this code and change nothing but the name write_table to save_table:\n\n{PASSAGE}",
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)


def chats(
    llm: LLM, prompts: Sequence[str], params: SamplingParams = GREEDY
) -> tuple[list[list[int]], float]:
    """One request after the other: token ids, and seconds in all."""
    started = time.perf_counter()
    answers = [
        answer(llm.chat([{"role": "user", "content": p}], params, use_tqdm=False)[0])
        for p in prompts
    ]
    return answers, time.perf_counter() - started


def answer(output: RequestOutput) -> list[int]:
    return list(output.outputs[0].token_ids)


def alternate(sides: dict[str, Callable[[], float]], repeats: int) -> dict[str, float]:
    """Median tokens per second of each side, run in turns after one warm-up each."""
    for run in sides.values():
        run()
    seen: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, run in sides.items():
            seen[name].append(run())
    return {name: statistics.median(values) for name, values in seen.items()}


def throughput(llm: LLM, prompts: Sequence[str]) -> Callable[[], float]:
    def run() -> float:
        answers, seconds = chats(llm, prompts)
        return sum(map(len, answers)) / seconds

    return run


def speculative(llm: LLM, plain: LLM, prompts: Sequence[str], repeats: int) -> dict[str, object]:
    """Plain against speculative on the same prompts."""
    before = llm.get_metrics()
    speeds = alternate(
        {"plain": throughput(plain, prompts), "drafted": throughput(llm, prompts)}, repeats
    )
    counted = llm.get_metrics().since(before)
    same = chats(llm, prompts)[0] == chats(plain, prompts)[0]
    return {
        "plain_tokens_per_s": round(speeds["plain"], 1),
        "tokens_per_s": round(speeds["drafted"], 1),
        "speedup": round(speeds["drafted"] / speeds["plain"], 3),
        "acceptance_length": round(counted.mean_acceptance_length, 2),
        "same_text": same,
    }


def hugging_face(path: Path) -> Callable[[], float]:
    """`generate` of transformers on the same file, in bfloat16."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    # Read in float32, which makes the weights dense, then copied into a bfloat16 model: a GGUF file loaded as bfloat16
    # stays packed and is slower than what a user of a plain checkpoint has.
    dense = AutoModelForCausalLM.from_pretrained(
        str(path.parent), gguf_file=path.name, dtype=torch.float32
    )
    model = AutoModelForCausalLM.from_config(dense.config, dtype=torch.bfloat16).eval()
    model.load_state_dict(dense.state_dict())
    del dense

    def run() -> float:
        started, count = time.perf_counter(), 0
        for prompt in CHAT:
            ids = tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=False
            )
            out = model.generate(
                torch.tensor([ids]),
                attention_mask=torch.ones(1, len(ids), dtype=torch.long),
                max_new_tokens=TOKENS,
                min_new_tokens=TOKENS,
                do_sample=False,
                pad_token_id=0,
            )
            count += out.shape[1] - len(ids)
        return count / (time.perf_counter() - started)

    return run


def bandwidth() -> float:
    """Bytes per second read from memory by a matrix-vector product far larger than any cache."""
    matrix, vector = torch.ones(65536, 4096), torch.ones(4096)
    best = 0.0
    for _ in range(3):
        started = time.perf_counter()
        torch.mv(matrix, vector)
        best = max(best, matrix.nbytes / (time.perf_counter() - started))
    return best


def part_plain(models: Path, repeats: int) -> dict[str, object]:
    path = models / "smollm2-135m.gguf"
    llm = LLM(str(path), dtype="bfloat16", max_model_len=2048)
    sides = {"foretell": throughput(llm, CHAT), "transformers": hugging_face(path)}
    speeds = alternate(sides, repeats)
    weights = 2 * 134_515_008
    return {
        **{f"{name}_tokens_per_s": round(value, 1) for name, value in speeds.items()},
        "against_transformers": round(speeds["foretell"] / speeds["transformers"], 2),
        "read_bandwidth_gb_s": round(bandwidth() / 1e9, 1),
        "share_of_bandwidth": round(speeds["foretell"] * weights / bandwidth(), 2),
    }


def part_ngram(models: Path, repeats: int) -> dict[str, object]:
    path = str(models / "smollm2-135m.gguf")
    plain = LLM(path, dtype="bfloat16", max_model_len=2048)
    config = {
        "method": "ngram",
        "num_speculative_tokens": 7,
        "prompt_lookup_min": 2,
        "prompt_lookup_max": 5,
    }
    drafted = LLM(path, dtype="bfloat16", max_model_len=2048, speculative_config=config)
    return {
        "copying": speculative(drafted, plain, COPY, repeats),
        "chat": speculative(drafted, plain, CHAT, repeats),
    }


def part_pair(models: Path, repeats: int) -> dict[str, object]:
    target, draft = str(models / "qwen2.5-coder-1.5b.gguf"), str(models / "qwen2.5-coder-0.5b.gguf")
    plain = LLM(target, dtype="bfloat16", max_model_len=2048, kv_cache_memory_bytes=1 << 29)
    drafted = LLM(
        target,
        speculate_model=draft,
        num_speculative_tokens=4,
        dtype="bfloat16",
        max_model_len=2048,
        kv_cache_memory_bytes=1 << 29,
    )
    prompts = [
        "Write a Python function that checks whether a string is a palindrome.",
        "Write a SQL query that finds the three highest salaries per department.",
    ]
    return speculative(drafted, plain, prompts, repeats)


def part_batch(models: Path, repeats: int) -> dict[str, object]:
    llm = LLM(
        str(models / "smollm2-135m.gguf"),
        dtype="bfloat16",
        max_model_len=2048,
        enable_prefix_caching=False,
    )
    messages = [[{"role": "user", "content": prompt}] for prompt in CHAT]

    def together() -> float:
        started = time.perf_counter()
        outputs = llm.chat(messages, GREEDY, use_tqdm=False)
        return sum(len(answer(o)) for o in outputs) / (time.perf_counter() - started)

    speeds = alternate({"one": throughput(llm, CHAT), "eight": together}, repeats)
    return {
        "one_tokens_per_s": round(speeds["one"], 1),
        "eight_tokens_per_s": round(speeds["eight"], 1),
        "ratio": round(speeds["eight"] / speeds["one"], 2),
    }


def part_first(models: Path, repeats: int) -> dict[str, object]:
    llm = LLM(
        str(models / "smollm2-135m.gguf"),
        dtype="bfloat16",
        max_model_len=2048,
        enable_prefix_caching=False,
    )
    ids = [100 + i for i in range(45)]
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    times = []
    for _ in range(5 * repeats + 2):
        started = time.perf_counter()
        llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
        times.append(time.perf_counter() - started)
    return {"prompt_tokens": 45, "first_token_ms": round(1e3 * statistics.median(times[2:]), 1)}


def part_memory(models: Path, repeats: int) -> dict[str, object]:
    import transformers.tokenization_utils_base  # noqa: F401  libraries are not counted

    import foretell.engine.build  # noqa: F401

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    llm = LLM(
        str(models / "smollm2-135m.gguf"),
        dtype="bfloat16",
        max_model_len=2048,
        kv_cache_memory_bytes=64 << 20,
    )
    chats(llm, CHAT[:2])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    weights = 2 * 134_515_008
    return {
        "before_mib": before // 1024,
        "peak_mib": peak // 1024,
        "over_weights_and_kv": round((peak - before) * 1024 / (weights + (64 << 20)), 3),
    }


PARTS = {
    "memory": part_memory,  # first: a peak is a peak of the whole process
    "plain": part_plain,
    "ngram": part_ngram,
    "batch": part_batch,
    "first": part_first,
    "pair": part_pair,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--part", action="append", choices=PARTS, help="default: all")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=8, help="how many prompts of each kind")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    del CHAT[arguments.prompts :], COPY[arguments.prompts :]
    result: dict[str, object] = {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "machine": platform.processor() or platform.machine(),
    }
    for name in arguments.part or PARTS:
        result[name] = PARTS[name](arguments.models, arguments.repeats)
        print(f"{name}: {json.dumps(result[name])}", flush=True)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
