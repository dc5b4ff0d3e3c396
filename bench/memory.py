"""Planned memory against measured peak, for one model and drafter, with as many requests as the plan says fit.

    PYTHONPATH=src python bench/memory.py --model m.gguf [--spec-model d.gguf --spec-tokens 5] [--max-model-len 1024]

On a GPU the peak is what torch reserved beside the driver's share; on a CPU it is the process's resident memory. Pages
of KV that nothing was written to take no memory on a CPU, so requests fill the pool. One line of JSON last.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys

import torch

from foretell import LLM, SamplingParams
from foretell.planning import Device, plan_memory


def resident() -> int:
    """Bytes of this process now."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


def peak_resident() -> int:
    """The most it ever had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    """Plan, load, fill, compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model")
    parser.add_argument("--spec-model")
    parser.add_argument("--spec-tokens", type=int, default=5)
    parser.add_argument("--max-model-len", type=int, default=512)
    parser.add_argument("--max-num-seqs", type=int, default=16)
    parser.add_argument("--max-num-batched-tokens", type=int, default=512)
    parser.add_argument("--dtype", default="auto")
    given = parser.parse_args()
    settings = {
        "max_model_len": given.max_model_len,
        "max_num_seqs": given.max_num_seqs,
        "max_num_batched_tokens": given.max_num_batched_tokens,
        "dtype": given.dtype,
    }
    if given.spec_model:
        settings["speculate_model"] = given.spec_model
        settings["num_speculative_tokens"] = given.spec_tokens
    gpu = torch.cuda.is_available()
    torch.zeros(1, device="cuda" if gpu else "cpu")
    base = resident()
    llm = LLM(given.model, **settings)
    after_load = resident()
    length, count = given.max_model_len, given.max_num_seqs
    prompts = [
        {"prompt_token_ids": [7 + (i * 31 + j * 17) % 900 for j in range(length // 2)]}
        for i in range(count)
    ]
    params = SamplingParams(temperature=1.0, max_tokens=length - length // 2, ignore_eos=True)
    llm.generate(prompts, params, use_tqdm=False)
    preempted = llm.get_metrics().preemptions
    measured = torch.cuda.max_memory_reserved() if gpu else peak_resident()
    # After the peak was read: a plan of a GGUF file reads its header, which takes memory too.
    plan = plan_memory(llm.config, Device(gpu, torch.cuda.mem_get_info()[1]) if gpu else None)
    planned = sum(part.bytes for part in plan.parts if part.name != "runtime")
    record = {
        "planned_mib": round(planned / 2**20, 1),
        "measured_mib": round(measured / 2**20, 1),
        "ratio": round(measured / planned, 4),
        "after_load_mib": round((after_load - base) / 2**20, 1),
        "end_mib": round((resident() - base) / 2**20, 1),
        "base_mib": round(base / 2**20, 1),
        "requests": count,
        "requests_planned": plan.requests(length),
        "length": length,
        "preemptions": preempted,
        "parts": {part.name: round(part.bytes / 2**20, 1) for part in plan.parts},
    }
    print(json.dumps(record))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
