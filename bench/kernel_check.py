"""Every kernel but products (products.py) against its reference and its floor, at Llama-3.1-8B's shapes, on one GPU.

    python bench/kernel_check.py [--only attention sample ...] [--seconds 220]

A kernel is checked first, then timed (see `kernel_timing.py`). The floor is the bytes that must move over the copy
bandwidth measured here. A case that fails says so and the next one runs. The last line is one JSON object; with OUT
set, all rows are written to $OUT/kernels.json and the table to $OUT/kernels.txt.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from foretell.ops.meta import LayerKV, RaggedRows, SlotArrays, TreeRows, flat_slots
from foretell.ops.reference import attention as reference_attention
from foretell.ops.reference import layers as reference_layers
from foretell.ops.reference import linear as reference_linear
from foretell.ops.reference import sample as reference_sample
from foretell.ops.reference.verify import Drafted
from foretell.ops.triton import attention, experts, layers, ngram, sample, verify
from foretell.ops.triton.attention import FAST, FIXED, Tuning
from kernel_timing import (
    DEVICE,
    DTYPE,
    Bench,
    Call,
    copies,
    copy_bandwidth,
    randn,
    relative,
)

HIDDEN, HEADS, KV_HEADS, DIM, INNER, VOCABULARY, BLOCK = 4096, 32, 8, 128, 14336, 128256, 16


@dataclass(frozen=True, slots=True)
class Verification:
    """Inputs of attention over a chain of N nodes."""

    q: Tensor
    kv: LayerKV
    metas: list[TreeRows]  # the same rows over different blocks
    nbytes: float


def verification(rows: int, nodes: int, context: int) -> Verification:
    """B requests of one context length, blocks shuffled, several sets of blocks in one pool."""
    nbytes = rows * (context + nodes) * KV_HEADS * DIM * 2 * 2 + 2 * rows * nodes * HEADS * DIM * 2
    sets, per = copies(nbytes), -(-(context + nodes) // BLOCK)
    shape = (sets * rows * per + 1, BLOCK, KV_HEADS, DIM)
    kv = LayerKV(randn(*shape), randn(*shape))
    order = (torch.randperm(sets * rows * per, device=DEVICE) + 1).view(sets, rows, per)
    start = torch.full((rows,), context, device=DEVICE)
    place = torch.arange(nodes, device=DEVICE)
    positions = start.unsqueeze(1) + place
    bits = ((torch.ones_like(place) << (place + 1)) - 1).unsqueeze(0).expand(rows, -1)
    metas = []
    for table in order.to(torch.int32):
        slots = flat_slots(table, positions, BLOCK, positions >= 0)
        # The bound of a captured graph is the longest text there may be, not this one.
        metas.append(
            TreeRows(positions, slots, table, start, bits, positions, 2 * (context + nodes))
        )
    return Verification(randn(rows * nodes, HEADS, DIM), kv, metas, nbytes)


def attend(
    case: Verification, meta: TreeRows, plan: attention.Plan, q: Tensor | None = None
) -> Tensor:
    """Run the kernel."""
    q = case.q if q is None else q
    return attention.attention(q, case.kv, meta, plan, None, DIM**-0.5, None)


def attention_error(case: Verification, nodes: int, tuning: Tuning) -> float:
    """Against the reference, for the first requests."""
    meta = case.metas[0]
    few = min(4, meta.context.shape[0])
    keys = int(meta.context.max()) + nodes
    short = replace(
        meta, positions=meta.positions[:few], kv_slots=meta.kv_slots[:few], blocks=meta.blocks[:few],
        context=meta.context[:few], bits=meta.bits[:few], tail_positions=meta.tail_positions[:few], keys=keys,
    )  # fmt: skip
    group = HEADS // KV_HEADS
    out = attend(case, meta, attention.mask(meta, None, BLOCK, group, DTYPE, tuning))
    blocks = short.blocks.flatten().unique()
    table = torch.searchsorted(blocks, short.blocks.contiguous()).to(torch.int32)
    wide = LayerKV(case.kv.k[blocks.long()].float(), case.kv.v[blocks.long()].float())
    short = replace(short, blocks=table)
    mask = reference_attention.mask(short, None, BLOCK, group, torch.float32)
    q = case.q[: few * nodes].float()
    expected = reference_attention.attention(q, wide, short, mask, None, DIM**-0.5, None)
    return relative(out[: few * nodes], expected)


DIVIDED = ((1, 1), (1, 6), (8, 1), (8, 6), (32, 1), (32, 6), (128, 1), (128, 6))
VARIANTS = {
    "att splits 1": Tuning(splits=1), "att splits 2": Tuning(splits=2), "att splits 4": Tuning(splits=4),
    "att splits 8": Tuning(splits=8), "att n 32": Tuning(block_n=32), "att n 128": Tuning(block_n=128),
    "att n 32 s1": Tuning(block_n=32, splits=1), "att p2": Tuning(stages=2), "att p3": Tuning(stages=3),
    "att p3 s1": Tuning(stages=3, splits=1), "att w8": Tuning(warps=8),
    "att n 128 w8": Tuning(block_n=128, warps=8, stages=2), "att w2": Tuning(warps=2), "att fixed": FIXED,
}  # fmt: skip


def bench_divided(bench: Bench) -> None:
    """Ways to divide attention over few hundred keys."""
    for rows, nodes in DIVIDED:
        bench.try_case(
            f"divided {rows} {nodes}",
            lambda r=rows, n=nodes: _attention_case(
                bench, r, n, 384, {"attention": FAST, **VARIANTS}
            ),
        )


def _compile_part(part: int, of: int) -> None:
    cases = [(r, n, t) for r, n in DIVIDED for t in (FAST, *VARIANTS.values())]
    for rows, nodes, tuning in cases[part::of]:
        case = verification(rows, nodes, 384)
        try:
            plan = attention.mask(case.metas[0], None, BLOCK, HEADS // KV_HEADS, DTYPE, tuning)
            attend(case, case.metas[0], plan)
        except Exception as error:  # reported where it is timed
            print(f"compile {rows} {nodes} {tuning}: {str(error)[:200]}")
    torch.cuda.synchronize()


def bench_attention(bench: Bench) -> None:
    """Decode and verification."""
    for rows in (1, 8, 32, 128):
        for nodes in (1, 6, 26):
            for context in (256, 1024, 4096):
                bench.try_case(
                    f"attention {rows} {nodes} {context}",
                    lambda r=rows, n=nodes, c=context: _attention_case(
                        bench, r, n, c, {"attention": FAST}
                    ),
                )


def _attention_case(
    bench: Bench, rows: int, nodes: int, context: int, tunings: dict[str, Tuning]
) -> None:
    case = verification(rows, nodes, context)
    for name, tuning in tunings.items():

        def one(name: str = name, tuning: Tuning = tuning) -> None:
            plans = [
                attention.mask(m, None, BLOCK, HEADS // KV_HEADS, DTYPE, tuning) for m in case.metas
            ]
            calls: list[Call] = [
                lambda m=m, p=p: attend(case, m, p) for m, p in zip(case.metas, plans, strict=True)
            ]
            error = attention_error(case, nodes, tuning)
            bench.add(name, f"B {rows} N {nodes} L {context}", calls, case.nbytes, error)

        bench.try_case(f"{name} {rows} {nodes} {context}", one)


def bench_prefill(bench: Bench) -> None:
    """Ragged attention, beside PyTorch's dense one."""
    for chunks in ([(0, 256)], [(0, 256)] * 8, [(0, 2048)], [(3584, 512)], [(4000, 16)] * 4):
        bench.try_case(f"prefill {chunks[:2]}", lambda c=chunks: _prefill_case(bench, c))


def _prefill_case(bench: Bench, chunks: list[tuple[int, int]]) -> None:
    ends = [start + rows for start, rows in chunks]
    per = -(-max(ends) // BLOCK)
    order = (
        (torch.randperm(len(chunks) * per, device=DEVICE) + 1)
        .view(len(chunks), per)
        .to(torch.int32)
    )
    shape = (len(chunks) * per + 1, BLOCK, KV_HEADS, DIM)
    kv = LayerKV(randn(*shape), randn(*shape))
    total = sum(rows for _, rows in chunks)
    counts = torch.tensor([rows for _, rows in chunks], device=DEVICE)
    meta = RaggedRows(
        positions=torch.cat([torch.arange(s, s + n, device=DEVICE) for s, n in chunks]),
        kv_slots=torch.zeros(total, dtype=torch.int64, device=DEVICE),
        blocks=order,
        starts=torch.tensor([start for start, _ in chunks], device=DEVICE),
        offsets=F.pad(counts.cumsum(0), (1, 0)),
        lengths=tuple(chunks),
    )
    q = randn(total, HEADS, DIM)
    mask = reference_attention.mask(meta, None, BLOCK, HEADS // KV_HEADS, torch.float32)
    wide = LayerKV(kv.k.float(), kv.v.float())
    expected = reference_attention.attention(q.float(), wide, meta, mask, None, DIM**-0.5, None)

    plan = attention.mask(meta, None, BLOCK, HEADS // KV_HEADS, DTYPE)

    def call() -> Tensor:
        return attention.attention(q, kv, meta, plan, None, DIM**-0.5, None)

    error = relative(call(), expected)
    pairs = sum(rows * start + rows * (rows + 1) / 2 for start, rows in chunks)
    nbytes = sum(ends) * KV_HEADS * DIM * 4 + 2 * q.nbytes
    label = f"{len(chunks)} x {chunks[0]}"
    us = bench.add("prefill", label, [call], nbytes, error)
    bench.lines.append(f"    {4 * pairs * HEADS * DIM / us / 1e6:.0f} TFLOP/s")
    if all(start == 0 for start, _ in chunks):
        rows = chunks[0][1]
        dense = randn(len(chunks), HEADS, rows, DIM)
        keys = randn(len(chunks), HEADS, rows, DIM)
        calls: list[Call] = [
            lambda: F.scaled_dot_product_attention(dense, keys, keys, is_causal=True)
        ]
        bench.add("prefill sdpa", label, calls, nbytes, note="dense, heads repeated")


def bench_layers(bench: Bench) -> None:
    """Norms, rotation, activation, embedding."""
    for rows in (1, 6, 48, 192, 768):
        for case in (_norm_case, _rope_case, _act_case, _embed_case):
            bench.try_case(f"{case.__name__} {rows}", lambda c=case, r=rows: c(bench, r))


def _norm_case(bench: Bench, rows: int) -> None:
    x, delta, weight = randn(rows, HIDDEN), randn(rows, HIDDEN), randn(HIDDEN, dtype=torch.float32)
    total, normed = layers.add_rms_norm(x, delta, weight, 1e-5)
    expected = reference_layers.rms_norm(x + delta, weight, 1e-5)
    error = max(relative(normed, expected), relative(total, x + delta))
    bench.add(
        "add_rms_norm",
        f"R {rows}",
        [lambda: layers.add_rms_norm(x, delta, weight, 1e-5)],
        4 * x.nbytes,
        error,
    )
    parts = randn(4, rows, HIDDEN, dtype=torch.float32)
    calls: list[Call] = [lambda: layers.add_rms_norm(x, parts, weight, 1e-5)]
    bench.add("add_rms_norm parts", f"R {rows} S 4", calls, 3 * x.nbytes + parts.nbytes)
    error = relative(layers.rms_norm(x, weight, 1e-5), reference_layers.rms_norm(x, weight, 1e-5))
    bench.add(
        "rms_norm", f"R {rows}", [lambda: layers.rms_norm(x, weight, 1e-5)], 2 * x.nbytes, error
    )


def _rope_case(bench: Bench, rows: int) -> None:
    every = HEADS + 2 * KV_HEADS
    qkv = randn(rows, every, DIM)
    angle = randn(rows, 1, DIM // 2, dtype=torch.float32)
    cos, sin = angle.cos(), angle.sin()
    cos, sin = torch.cat((cos, cos), -1).to(DTYPE), torch.cat((-sin, sin), -1).to(DTYPE)
    slots = torch.randperm(rows + 64, device=DEVICE)[:rows]
    pages = randn(-(-(rows + 64) // BLOCK), BLOCK, KV_HEADS, DIM)
    kv, plain = (LayerKV(torch.zeros_like(pages), torch.zeros_like(pages)) for _ in range(2))
    expected = reference_attention.rope_store(
        qkv.clone(), HEADS, None, 1e-5, cos, sin, plain, slots
    )
    out = layers.rope_store(qkv.clone(), HEADS, None, 1e-5, cos, sin, kv, slots)
    error = max(relative(out, expected), relative(kv.k, plain.k), relative(kv.v, plain.v))
    calls: list[Call] = [lambda: layers.rope_store(qkv, HEADS, None, 1e-5, cos, sin, kv, slots)]
    bench.add("rope_store", f"R {rows}", calls, 2 * qkv.nbytes, error)


def _act_case(bench: Bench, rows: int) -> None:
    x = randn(rows, 2 * INNER)
    error = relative(layers.act_mul(x, "silu"), reference_layers.act_mul(x, "silu"))
    bench.add("act_mul", f"R {rows}", [lambda: layers.act_mul(x, "silu")], 1.5 * x.nbytes, error)


def _embed_case(bench: Bench, rows: int) -> None:
    weight = randn(VOCABULARY, HIDDEN)
    tokens = torch.randint(0, VOCABULARY, (rows,), device=DEVICE)
    error = relative(layers.embed(tokens, weight, 1.0), reference_layers.embed(tokens, weight, 1.0))
    calls: list[Call] = [lambda: layers.embed(tokens, weight, 1.0)]
    bench.add("embed", f"R {rows}", calls, 2 * rows * HIDDEN * 2, error)


def bench_sample(bench: Bench) -> None:
    """Arg-max, sampling without and with filters."""
    for rows, nodes in ((1, 1), (1, 6), (8, 6), (32, 6), (128, 6)):
        bench.try_case(f"sample {rows} {nodes}", lambda r=rows, n=nodes: _sample_case(bench, r, n))


def _sample_case(bench: Bench, rows: int, nodes: int) -> None:
    logits = 3 * randn(rows, nodes, VOCABULARY)
    positions = torch.arange(rows * nodes, device=DEVICE).view(rows, nodes)
    ones = torch.ones(rows, device=DEVICE)
    law = sample.Laws(
        torch.arange(rows, device=DEVICE) + 7,
        ones,
        torch.full((rows,), 50, device=DEVICE),
        0.9 * ones,
        0 * ones,
    )
    label = f"B {rows} N {nodes}"
    wrong = (
        (sample.argmax_checked(logits) != reference_sample.argmax_checked(logits)).float().mean()
    )
    bench.add("argmax", label, [lambda: sample.argmax_checked(logits)], logits.nbytes, float(wrong))
    bench.add("sample", label, [lambda: sample.sample(logits, law, positions)], logits.nbytes)
    error = None
    if rows * nodes <= 48:
        kept = reference_sample.filter_logits(logits.float(), law.top_k, law.top_p, law.min_p)
        drawn = sample.sample(logits, law, positions, filtered=True)
        outside = kept.gather(-1, drawn.unsqueeze(-1)).isinf() | (drawn < 0).unsqueeze(-1)
        error = float(outside.float().mean())
    calls: list[Call] = [lambda: sample.sample(logits, law, positions, filtered=True)]
    bench.add("sample filtered", label, calls, logits.nbytes, error, "top_k 50, top_p 0.9")


def bench_verify(bench: Bench) -> None:
    """Decision, KV moves of all layers, n-gram match: small kernels, whose floor is a launch."""
    for rows in (1, 32, 128):
        for nodes in (6, 26):
            bench.try_case(
                f"verify {rows} {nodes}", lambda r=rows, n=nodes: _verify_case(bench, r, n)
            )


def _verify_case(bench: Bench, rows: int, nodes: int) -> None:
    def ints(high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, device=DEVICE)

    place = torch.arange(nodes, device=DEVICE).unsqueeze(0)
    parents, depths = (place - 1).clamp(min=0), place
    bits = (torch.ones_like(place) << (place + 1)) - 1
    drafted = Drafted(ints(2, rows, nodes), ints(2, rows, nodes), parents, depths, bits, nodes - 1)
    per = 4096 // BLOCK
    length = torch.full((rows,), 300, device=DEVICE)
    slots = SlotArrays(
        tokens=ints(500, rows, 4096).int(), length=length, limit=length + (1 << 40),
        live=torch.ones(rows, dtype=torch.bool, device=DEVICE), stop=torch.full((rows, 32), -1, device=DEVICE),
        blocks=torch.arange(rows * per, device=DEVICE, dtype=torch.int32).view(rows, per) % 4000 + 1,
    )  # fmt: skip
    which = torch.arange(rows, device=DEVICE)
    label = f"B {rows} N {nodes}"

    # The text must not run out of its row while the clock runs, so the length is set back in the same graph.
    def decide() -> object:
        slots.length.fill_(300)
        return verify.decide(drafted, slots, which, BLOCK, True)

    bench.add("decide + fill", label, [decide], 0)
    pool = [
        LayerKV(randn(4001, BLOCK, KV_HEADS, DIM), randn(4001, BLOCK, KV_HEADS, DIM))
        for _ in range(8)
    ] * 4
    pages = verify.kv_pages(pool)
    depth = min(6, nodes)
    source = (which.unsqueeze(1) * 64 % 60000 + BLOCK) + torch.arange(depth, device=DEVICE) * 2
    target = (which.unsqueeze(1) * 64 % 60000 + BLOCK) + torch.arange(depth, device=DEVICE)
    moved = 2 * 2 * len(pool) * rows * (depth - 1) * KV_HEADS * DIM * 2
    bench.add("move_kv 32 layers", label, [lambda: verify.move_kv(pages, source, target)], moved)
    long = torch.full((rows,), 4000, device=DEVICE)
    spine = torch.ones(nodes, dtype=torch.bool, device=DEVICE)
    calls: list[Call] = [lambda: ngram.draft(slots.tokens, which, long, 4000, depths, spine, 2, 4)]
    bench.add("ngram L 4000", label, calls, rows * 16000)


def bench_experts(bench: Bench) -> None:
    """Mixtral's experts: 8 of 4096 x 14336, two a row."""
    packed = experts.pack_experts(
        randn(8, 2 * INNER, HIDDEN) * HIDDEN**-0.5, randn(8, HIDDEN, INNER) * INNER**-0.5
    )
    plain = reference_linear.pack_experts(packed.gate_up, packed.down)
    for rows in (1, 8, 48, 192):

        def one(rows: int = rows) -> None:
            x, router = randn(rows, HIDDEN), randn(rows, 8)
            out = experts.experts(x, router, packed, 2, "silu")
            error = relative(out, reference_linear.experts(x, router, plain, 2, "silu"))
            hit = int(router.topk(2, -1).indices.unique().numel())
            nbytes = hit * 3 * HIDDEN * INNER * 2
            calls: list[Call] = [lambda: experts.experts(x, router, packed, 2, "silu")]
            bench.add("experts", f"R {rows} of {hit}", calls, nbytes, error)

        bench.try_case(f"experts {rows}", one)


SECTIONS: dict[str, Callable[[Bench], None]] = {
    "layers": bench_layers,
    "verify": bench_verify,
    "sample": bench_sample,
    "experts": bench_experts,
    "prefill": bench_prefill,
    "attention": bench_attention,
    "divided": bench_divided,
}


def main() -> None:
    """Run the sections and print one JSON line last."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", choices=list(SECTIONS), default=list(SECTIONS))
    parser.add_argument(
        "--seconds", type=float, default=220.0, help="time for everything, compilation included"
    )
    parser.add_argument(
        "--compile",
        type=int,
        nargs=2,
        metavar=("PART", "OF"),
        help="only compile a part of `divided`",
    )
    arguments = parser.parse_args()
    torch.manual_seed(0)
    if arguments.compile:
        _compile_part(*arguments.compile)
        return
    began = time.monotonic()
    bench = Bench(copy_bandwidth(), began + arguments.seconds)
    bench.say(
        f"{torch.cuda.get_device_name()}  copy {bench.bandwidth / 1e12:.2f} TB/s  torch {torch.__version__}"
    )
    for name in arguments.only:
        section = time.monotonic()
        bench.try_case(name, lambda n=name: SECTIONS[n](bench))
        torch.cuda.empty_cache()
        bench.say(f"-- {name}: {time.monotonic() - section:.0f} s")
    record = {
        "bench": "kernels", "device": torch.cuda.get_device_name(), "torch": torch.__version__,
        "triton": triton.__version__, "copy_tb_s": round(bench.bandwidth / 1e12, 3),
        "seconds": round(time.monotonic() - began, 1), "measurements": len(bench.rows), "failures": bench.failures,
    }  # fmt: skip
    out = os.environ.get("OUT")
    if out:
        folder = Path(out)
        folder.mkdir(parents=True, exist_ok=True)
        rows = [asdict(row) for row in bench.rows]
        (folder / "kernels.json").write_text(json.dumps({**record, "rows": rows}, indent=1))
        (folder / "kernels.txt").write_text("\n".join(bench.lines) + "\n")
    record["failures"] = bench.failures[:8]
    print(json.dumps(record))


if __name__ == "__main__":
    main()
