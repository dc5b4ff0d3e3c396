"""Real models on one GPU: plain, with a draft model, with n-grams; beside transformers, plain and assisted.

    python bench/gpu_real.py --models DIR [--prompts 32] [--tokens 128]

DIR holds qwen2.5-coder-1.5b.gguf (the target) and qwen2.5-coder-0.5b.gguf (the draft). Per variant: tokens a second of
one request after the other, mean accepted length, and how many texts equal the plain ones. In the fixed order
(`deterministic=True`) all must be equal; in the fast one a near-tie may fall the other way, and the share of texts and
of tokens that do is reported, with the gap between the two best logits where a text first differs. The last line is one
JSON object.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from foretell import LLM, SamplingParams
from foretell.bench.prompts import load_prompts

TARGET, DRAFT = "qwen2.5-coder-1.5b.gguf", "qwen2.5-coder-0.5b.gguf"


@dataclass
class Ran:
    """One variant."""

    name: str
    texts: list[tuple[int, ...]] = field(default_factory=list)
    seconds: float = 0.0
    accepted_length: float | None = None

    def row(self, plain: Ran) -> dict[str, Any]:
        pairs = list(zip(self.texts, plain.texts, strict=True))
        first = [_first_difference(a, b) for a, b in pairs]
        return {
            "variant": self.name,
            "tokens_per_s": round(sum(map(len, self.texts)) / self.seconds, 1),
            "speedup": round(
                sum(map(len, self.texts))
                / self.seconds
                / (sum(map(len, plain.texts)) / plain.seconds),
                2,
            ),
            "accepted_length": self.accepted_length,
            "texts_equal": sum(a == b for a, b in pairs),
            "texts": len(pairs),
            "first_differences": [place for place in first if place is not None],
        }


def _first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    if a == b:
        return None
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def ours(name: str, folder: Path, prompts: list[list[int]], tokens: int, **options: Any) -> Ran:
    """A variant of this engine."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    ran = Ran(name)
    with LLM(
        str(folder / TARGET), dtype="bfloat16", max_model_len=2048, max_num_seqs=32, **options
    ) as llm:
        for _ in range(2):  # the first pass captures graphs and compiles
            ran.texts, began = [], time.perf_counter()
            for prompt in prompts:
                output = llm.generate({"prompt_token_ids": prompt}, params)[0]
                ran.texts.append(tuple(output.outputs[0].token_ids))
            ran.seconds = time.perf_counter() - began
        seen = llm.get_metrics()
        if seen.num_drafts:
            ran.accepted_length = round(1 + seen.num_accepted_tokens / seen.num_drafts, 3)
    gc.collect()
    torch.cuda.empty_cache()
    return ran


def theirs(folder: Path, prompts: list[list[int]], tokens: int) -> list[Ran]:
    """transformers, plain and assisted, on the same weights."""
    from transformers import AutoModelForCausalLM

    target, draft = (
        AutoModelForCausalLM.from_pretrained(str(folder), gguf_file=file, dtype=torch.bfloat16)
        .cuda()
        .eval()
        for file in (TARGET, DRAFT)
    )
    found = []
    for name, assistant in (("transformers", None), ("transformers assisted", draft)):
        ran = Ran(name)
        for _ in range(2):
            ran.texts = []
            torch.cuda.synchronize()
            began = time.perf_counter()
            for prompt in prompts:
                ids = torch.tensor([prompt], device="cuda")
                out = target.generate(
                    ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=tokens,
                    min_new_tokens=tokens, assistant_model=assistant, pad_token_id=0,
                )  # fmt: skip
                ran.texts.append(tuple(out[0, ids.shape[1] :].tolist()))
            torch.cuda.synchronize()
            ran.seconds = time.perf_counter() - began
        found.append(ran)
    return found


def gaps(
    folder: Path, prompts: list[list[int]], plain: Ran, other: Ran, tokens: int
) -> list[float]:
    """Difference of the two best log-probabilities where texts first part: near 0 for a near-tie."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, logprobs=2)
    found = []
    with LLM(str(folder / TARGET), dtype="bfloat16", max_model_len=2048, max_num_seqs=8) as llm:
        for prompt, a, b in zip(prompts, plain.texts, other.texts, strict=True):
            place = _first_difference(a, b)
            if place is None:
                continue
            output = llm.generate({"prompt_token_ids": prompt}, params)[0].outputs[0]
            best = sorted(
                (entry.logprob for entry in output.logprobs[place].values()), reverse=True
            )
            found.append(round(best[0] - best[1], 4))
    return found


def main() -> None:
    """Every variant in turn."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--without-transformers", action="store_true")
    arguments = parser.parse_args()
    folder, tokens = arguments.models, arguments.tokens
    with LLM(str(folder / TARGET), max_model_len=512, max_num_seqs=1) as llm:
        tokenizer = llm.get_tokenizer()
        prompts = [
            list(
                tokenizer.apply_chat_template(
                    p.messages, add_generation_prompt=True, return_dict=False
                )
            )
            for p in load_prompts("mixed", arguments.prompts)
        ]
    pair = {"model": str(folder / DRAFT), "num_speculative_tokens": 5}
    ngram = {"method": "ngram", "num_speculative_tokens": 5}
    rows: list[dict[str, Any]] = []
    result: dict[str, Any] = {"bench": "gpu_real", "device": torch.cuda.get_device_name()}
    for fixed in (False, True):
        label = " fixed" if fixed else ""
        plain = ours("plain" + label, folder, prompts, tokens, deterministic=fixed)
        variants = [
            ours(
                "draft model" + label,
                folder,
                prompts,
                tokens,
                deterministic=fixed,
                speculative_config=pair,
            ),
            ours(
                "n-gram" + label,
                folder,
                prompts,
                tokens,
                deterministic=fixed,
                speculative_config=ngram,
            ),
        ]
        rows += [ran.row(plain) for ran in (plain, *variants)]
        if fixed:
            result["fixed_all_equal"] = all(ran.texts == plain.texts for ran in variants)
            continue
        result["gaps_where_texts_part"] = gaps(folder, prompts, plain, variants[0], tokens)
        if not arguments.without_transformers:
            rows += [ran.row(plain) for ran in theirs(folder, prompts, tokens)]
    for row in rows:
        print(json.dumps(row), flush=True)
    result["rows"] = rows
    (Path(os.environ.get("OUT", ".")) / "gpu_real.json").write_text(json.dumps(result, indent=1))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
