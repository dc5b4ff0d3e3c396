"""The cost model against the clock: predicted and measured speed-ups over a sweep, on a machine that does nothing else.

    python bench/cost_model.py --model M [--speculate-model D] [--ks 1,3,5,7] [--batches 1,4,8] [--out FILE]

First the step costs of every tree are measured (as `foretell bench steps`), then every fixed draft length runs beside
plain decoding (as `foretell bench sweep`), then each of these runs is simulated from the costs and its own acceptance.
Fails where a prediction is off by more than 10 %. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

from foretell import SamplingParams
from foretell.bench.fleet import Fleet, with_predictions
from foretell.bench.machine import Watch, describe, look
from foretell.bench.offline import WARM_UP_TOKENS, Plan, sweep
from foretell.bench.plots import plots
from foretell.bench.prompts import load_prompts
from foretell.bench.record import Record
from foretell.bench.simulate import Accepting, Shape
from foretell.bench.steps import step_costs
from foretell.bench.variants import given_variant, grid
from foretell.commands.bench_options import accelerator, opener
from foretell.options import EngineOptions

WRONG = 0.10


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--speculate-model", default="ngram")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--ks", default="1,3,5,7")
    parser.add_argument("--batches", default="1,4,8")
    parser.add_argument("--prompts", default="copy", help="a lookup must find something")
    parser.add_argument("--num-prompts", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=192)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plots", type=Path)
    asked = parser.parse_args()
    ks, batches = ([int(x) for x in text.split(",")] for text in (asked.ks, asked.batches))
    engine = EngineOptions(model=asked.model, dtype=asked.dtype, max_model_len=2048)
    on_gpu = accelerator(engine) == "cuda"
    plan = Plan(
        prompts=load_prompts(asked.prompts, asked.num_prompts),
        params=SamplingParams(temperature=0.0, max_tokens=asked.max_tokens, seed=0),
        repeats=asked.repeats,
        warm_up_tokens=None if on_gpu else WARM_UP_TOKENS,
    )
    before, watch = look(), Watch()

    def tell(doing: str) -> None:
        print(doing, file=sys.stderr, flush=True)

    shared = {"prompt_lookup_min": 2, "prompt_lookup_max": 5}
    variants = grid([asked.speculate_model], ks, ["chain"], shared)
    widest = given_variant(
        {**(variants[-1].speculative or {}), "num_speculative_tokens": max(ks)}, True
    )
    costs, _, doubts = step_costs(opener(engine), widest, batches, plan, tell)
    rows = sweep(opener(engine, one_engine=False), variants, batches, plan, tell)
    warnings = [
        busy.warning(when)
        for busy, when in ((before, "before"), (watch.stop(), "during"))
        if busy.voids
    ]
    settings = {
        "model": asked.model,
        "drafts": asked.speculate_model,
        "ks": ks,
        "batches": batches,
        "prompts": asked.prompts,
        "max_tokens": asked.max_tokens,
        "repeats": asked.repeats,
    }
    record = Record.made(
        "sweep", describe(accelerator(engine)), settings, rows, warnings + doubts, costs.as_json()
    )
    model = Fleet(Shape(max_num_seqs=max(batches), behind=on_gpu), costs, Accepting(()))
    record = replace(record, rows=with_predictions(record.rows, model))
    worst = 0.0
    for row in record.rows:
        if row["predicted_speedup"] is None:
            continue
        error = row["predicted_speedup"] / row["speedup"]["median"] - 1
        worst = max(worst, abs(error))
        print(
            f"{row['label']:<24} at once {row['requests']:>3}  predicted {row['predicted_speedup']:.3f}  "
            f"measured {row['speedup']['median']:.3f}  {100 * error:+.1f} %"
        )
    if asked.out is not None:
        record.save(asked.out)
    if asked.plots is not None:
        for plot in plots(record):
            plot.save(asked.plots)
    print(
        json.dumps(
            {
                "worst_error": round(worst, 4),
                "within": worst <= WRONG,
                "warnings": list(record.warnings),
            }
        )
    )
    return 0 if worst <= WRONG else 1


if __name__ == "__main__":
    sys.exit(main())
