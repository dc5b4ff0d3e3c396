"""Our own small-row products beside cuBLAS, over tiles, and whole layers made of them; on one GPU.

    python bench/products.py [--compile PART OF] [--rows 1 8 32 48] [--layers 16]

First every product of Llama-3.1-8B at each number of rows, over many tiles, back to back in a captured graph over cold
weights. Then a decoder of that shape over paged attention, with cuBLAS and with the best tiles, with and without
dependent launches. Compilation is shared: `--compile i n` only compiles the i-th of n parts (start n of them side by side first).
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from foretell.model.config import ModelConfig
from foretell.model.decoder import Decoder
from foretell.model.layers import fill
from foretell.ops.meta import LayerKV, TreeRows, flat_slots
from foretell.ops.triton import launch, layers, linear
from foretell.ops.triton.linear import Tile
from foretell.ops.triton.table import CUDA
from kernel_timing import DEVICE, DTYPE, copies, copy_bandwidth, microseconds, randn, relative

PRODUCTS = {
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate_up": (28672, 4096),
    "down": (4096, 14336),
    "head": (128256, 4096),
}
BLOCK, DIM, HEADS, KV_HEADS = 16, 128, 32, 8


def tiles(rows: int, gated: bool) -> list[Tile]:
    """Tiles worth a try: outputs, inner, split, warps, stages, early."""
    block = max(16, 1 << (rows - 1).bit_length())
    if gated:
        few = [
            (64, 128, 1, 4, 4, 0), (64, 128, 1, 4, 4, 1), (64, 128, 1, 4, 3, 1), (64, 128, 1, 4, 3, 2), (32, 128, 1, 4, 4, 2),
            (32, 256, 1, 4, 3, 1), (64, 64, 1, 4, 6, 2),
        ]  # fmt: skip
        many = [
            (64, 128, 1, 4, 4, 0), (64, 128, 1, 4, 3, 1), (64, 128, 1, 4, 4, 1), (64, 64, 1, 4, 5, 2), (128, 64, 1, 8, 4, 1),
        ]  # fmt: skip
    else:
        few = [
            (64, 128, 1, 4, 6, 0), (64, 128, 1, 4, 6, 3), (64, 128, 1, 4, 4, 3), (64, 128, 2, 4, 6, 0), (64, 128, 2, 4, 6, 3),
            (64, 128, 2, 4, 4, 0), (64, 128, 2, 4, 4, 3), (64, 128, 2, 4, 3, 3), (64, 128, 4, 4, 4, 2), (64, 256, 1, 4, 4, 0),
            (64, 256, 2, 4, 4, 1), (64, 256, 2, 4, 3, 1), (32, 256, 1, 4, 4, 2), (32, 256, 2, 4, 3, 2), (32, 128, 2, 4, 4, 3),
        ]  # fmt: skip
        many = [
            (64, 128, 1, 4, 5, 0), (64, 128, 1, 4, 5, 2), (64, 128, 2, 4, 5, 0), (64, 128, 2, 4, 4, 2), (64, 128, 2, 4, 4, 3),
            (64, 128, 2, 4, 3, 3), (64, 128, 4, 4, 4, 2), (128, 64, 2, 4, 6, 2),
        ]  # fmt: skip
    found = [
        Tile(o, block, k, s, w, p, early=e) for o, k, s, w, p, e in (few if rows <= 16 else many)
    ]
    width = 2 if gated else 1
    return [
        t for t in found if (width * t.outputs + block) * t.inner * 2 * (t.stages - 1) <= 220 << 10
    ]


def describe(tile: Tile) -> str:
    return f"{tile.outputs}x{tile.rows}x{tile.inner} s{tile.split_k} w{tile.warps} p{tile.stages} e{tile.early}"


@dataclass(slots=True)
class Weights:
    """Enough copies of one weight to be cold."""

    packed: list[linear.Packed]

    @staticmethod
    def of(name: str) -> Weights:
        outputs, inner = PRODUCTS[name]
        count = copies(outputs * inner * 2, 6)
        return Weights(
            [linear.pack_linear(randn(outputs, inner) * inner**-0.5, None) for _ in range(count)]
        )

    def run(self, name: str, x: Tensor, tile: Tile) -> list[Callable[[], Tensor]]:
        if name == "gate_up":
            return [
                lambda p=p: linear.gated_product(x, p.weight, None, "silu", tile)
                for p in self.packed
            ]
        return [lambda p=p: linear.product(x, p, None, tile) for p in self.packed]

    def after(self, name: str, x: Tensor, tile: Tile) -> list[Callable[[], object]]:
        """Each product behind a norm of its rows, as in a model."""
        gain = torch.ones(x.shape[1], device=DEVICE)
        return [
            lambda p=p: Weights([p]).run(name, layers.rms_norm(x, gain, 1e-5), tile)[0]()
            for p in self.packed
        ]


def compile_part(part: int, of: int, rows: list[int]) -> None:
    cases = [
        (name, r, t) for r in rows for name in ("o", "gate_up") for t in tiles(r, name == "gate_up")
    ]
    weights = {
        name: Weights([linear.pack_linear(randn(*PRODUCTS[name]), None)])
        for name in ("o", "gate_up")
    }
    for name, r, tile in cases[part::of]:
        try:
            weights[name].run(name, randn(r, PRODUCTS[name][1]), tile)[0]()
        except Exception as error:  # reported where it is timed
            print(f"compile {name} {r} {describe(tile)}: {str(error)[:200]}")
    torch.cuda.synchronize()


def sweep(name: str, rows: list[int], bandwidth: float) -> dict[int, tuple[Tile, float, float]]:
    """Best tile of each number of rows: (tile, its microseconds, cuBLAS's)."""
    weights = Weights.of(name)
    best: dict[int, tuple[Tile, float, float]] = {}
    for r in rows:
        x = randn(r, PRODUCTS[name][1])
        plain = [lambda p=p: F.linear(x, p.weight) for p in weights.packed]
        if name == "gate_up":
            plain = [
                lambda p=p: layers.act_mul(F.linear(x, p.weight), "silu") for p in weights.packed
            ]
        norm = microseconds([lambda: layers.rms_norm(x, torch.ones_like(x[0]).float(), 1e-5)])
        theirs = microseconds(plain) + norm
        floor = weights.packed[0].weight.nbytes / bandwidth * 1e6
        expected = plain[0]()
        found: list[tuple[float, Tile]] = []
        for tile in tiles(r, name == "gate_up"):
            try:
                calls = weights.run(name, x, tile)
                wrong = relative(calls[0](), expected)
                found.append((microseconds(weights.after(name, x, tile)), tile))
                if not wrong < 0.01:
                    print(f"WRONG {name} R {r} {describe(tile)}: {wrong}")
            except Exception as error:
                print(
                    f"FAILED {name} R {r} {describe(tile)}: {type(error).__name__} {str(error)[:200]}"
                )
        found.sort(key=lambda pair: pair[0])
        if not found:
            continue
        us, tile = found[0]
        best[r] = (tile, us, theirs)
        print(
            f"{name:8s} R {r:3d} floor {floor:6.1f}  cublas {theirs:6.1f}  own {us:6.1f}  {floor / us:.0%}",
            flush=True,
        )
        for us, tile in found[:8]:
            print(f"      {us:7.1f} {describe(tile)}")
    return best


def decoder(layer_count: int) -> Decoder:
    config = ModelConfig.from_hf(
        {
            "model_type": "llama", "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False, "eos_token_id": 2,
            "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": layer_count,
            "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "vocab_size": 32000,
        }
    )  # fmt: skip
    model = Decoder(config, DTYPE, DEVICE, CUDA)
    for name, parameter in list(model.named_parameters()):
        values = torch.empty(parameter.shape, dtype=parameter.dtype, device=DEVICE)
        fill(model, name, values.normal_(0, 0.02) if parameter.dim() > 1 else values.fill_(1.0))
    return model


def whole_layers(model: Decoder, rows: int, nodes: int, context: int) -> Callable[[], Tensor]:
    """A forward pass over B requests of N nodes."""
    per = math.ceil((context + nodes) / BLOCK)
    shape = (rows * per + 1, BLOCK, KV_HEADS, DIM)
    kv = [LayerKV(randn(*shape), randn(*shape)) for _ in model.layers]
    table = (torch.randperm(rows * per, device=DEVICE) + 1).view(rows, per).to(torch.int32)
    start = torch.full((rows,), context, device=DEVICE)
    place = torch.arange(nodes, device=DEVICE)
    positions = start.unsqueeze(1) + place
    bits = ((torch.ones_like(place) << (place + 1)) - 1).unsqueeze(0).expand(rows, -1)
    slots = flat_slots(table, positions, BLOCK, positions >= 0)
    meta = TreeRows(positions, slots, table, start, bits, positions, 576)
    tokens = torch.randint(0, 32000, (rows, nodes), device=DEVICE)
    return lambda: model(tokens, meta, kv)[0]


def main() -> None:
    """Sweep, then whole layers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--compile", type=int, nargs=2)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 48])
    parser.add_argument("--layers", type=int, default=16)
    arguments = parser.parse_args()
    if arguments.compile:
        compile_part(*arguments.compile, arguments.rows)
        return
    torch.manual_seed(0)
    bandwidth = max(copy_bandwidth(), 4.28e12)
    print(f"{torch.cuda.get_device_name()} copy {bandwidth / 1e12:.2f} TB/s")
    best: dict[tuple[str, int], tuple[Tile, float, float]] = {}
    for name in PRODUCTS:
        for r, found in sweep(name, arguments.rows, bandwidth).items():
            best[name, r] = found
        torch.cuda.empty_cache()
    names = {(shape[0], shape[1]): name for name, shape in PRODUCTS.items()}
    model = decoder(arguments.layers)
    nbytes = sum(p.nbytes for p in model.layers.parameters())
    record = []
    for rows, nodes in ((1, 1), (1, 6), (8, 1), (8, 6), (32, 1)):
        step = whole_layers(model, rows, nodes, 384)
        near = min(arguments.rows, key=lambda r: (r < rows * nodes, abs(r - rows * nodes)))
        cache = nodes * 0 + rows * 384 * KV_HEADS * DIM * 4 * arguments.layers
        floor = (nbytes + cache) / bandwidth * 1e6 / arguments.layers

        def chosen(rows: int, weight: Tensor, near: int = near) -> Tile | None:
            found = best.get((names.get(tuple(weight.shape), ""), near))
            return None if found is None else found[0]

        def late(rows: int, weight: Tensor, near: int = near) -> Tile | None:
            found = best.get((names.get(tuple(weight.shape), ""), near))
            return None if found is None else replace(found[0], early=0)

        def none(rows: int, weight: Tensor) -> None:
            return None

        options = launch.options
        variants = {
            "cublas": (none, False), "cublas pdl": (none, True), "own": (chosen, False), "own pdl": (chosen, True),
            "own pdl late": (late, True),
        }  # fmt: skip
        expected = None
        for label, (pick, dependent) in variants.items():
            linear.best_tile = linear.best_gated_tile = pick  # type: ignore[assignment]
            launch.options = options if dependent else lambda device: {"PDL": False}
            try:
                out = step()
                expected = out if expected is None else expected
                us = microseconds([step]) / arguments.layers
                record.append(
                    {
                        "rows": rows,
                        "nodes": nodes,
                        "variant": label,
                        "us_per_layer": round(us, 2),
                        "floor_us": round(floor, 2),
                    }
                )
                print(
                    f"B {rows:3d} N {nodes} {label:18s} {us:7.2f} us a layer, floor {floor:6.2f} {floor / us:.0%}  {relative(out, expected):.1e}",
                    flush=True,
                )
            except Exception as error:
                print(f"FAILED {label}: {type(error).__name__} {str(error)[:300]}")
        launch.options = options
    out = Path(os.environ.get("OUT", "."))
    tiles_found = [
        {"product": n, "rows": r, "tile": describe(t), "us": round(a, 2), "cublas_us": round(b, 2)}
        for (n, r), (t, a, b) in best.items()
    ]
    everything = {
        "bench": "products",
        "bandwidth": bandwidth,
        "products": tiles_found,
        "layers": record,
    }
    (out / "products.json").write_text(json.dumps(everything, indent=1))
    print(json.dumps(everything))


if __name__ == "__main__":
    main()
