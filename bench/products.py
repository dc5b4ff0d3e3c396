"""Small-row products inside whole decoder layers, over tiles; on one GPU.

    python bench/products.py [--compile PART OF] [--layers 12]

A decoder of Llama-3.1-8B's shape over paged attention is captured and replayed with cuBLAS, with our own products, with
and without dependent launches, and with the tile of one product changed at a time: in a layer a tile that leaves room
for its neighbours can beat the one that is fastest alone. The floor is weights and keys over the bandwidth of a copy.
Compilation is shared: `--compile i n` only compiles the i-th of n parts (start n of them side by side first). The last
line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from foretell.model.config import ModelConfig
from foretell.model.decoder import Decoder
from foretell.model.layers import fill
from foretell.ops.meta import LayerKV, TreeRows, flat_slots
from foretell.ops.triton import launch, linear
from foretell.ops.triton.linear import Tile
from foretell.ops.triton.table import CUDA
from kernel_timing import DEVICE, DTYPE, copy_bandwidth, microseconds, randn, relative

PRODUCTS = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
SHAPES = ((1, 1), (1, 6), (8, 1), (8, 6), (32, 1))
BLOCK, DIM, HEADS, KV_HEADS = 16, 128, 32, 8
Pick = Callable[[int, Tensor], Tile | None]


@dataclass(frozen=True, slots=True)
class Variant:
    """How layers are computed: our products but for one tile, or cuBLAS."""

    name: str
    own: bool = True
    dependent: bool = True
    product: str = ""  # whose tile is changed
    outputs: int = 64
    inner: int = 128
    split: int = 1
    stages: int = 4

    def tile(self, plain: Pick) -> Pick:
        """The choice of tiles under this variant."""

        def pick(rows: int, weight: Tensor) -> Tile | None:
            found = plain(rows, weight)
            if not self.own or found is None:
                return None
            if tuple(weight.shape) != PRODUCTS.get(self.product):
                return found
            return replace(
                found,
                outputs=self.outputs,
                inner=self.inner,
                split_k=self.split,
                stages=self.stages,
            )

        return pick


def variants() -> Iterator[Variant]:
    """Everything that is tried."""
    yield Variant("cublas", own=False, dependent=False)
    yield Variant("cublas, dependent", own=False)
    yield Variant("own, not dependent", dependent=False)
    yield Variant("own")
    for product, tiles in {
        "qkv": (
            (64, 128, 1, 4),
            (64, 128, 1, 3),
            (32, 256, 1, 4),
            (32, 128, 1, 5),
            (64, 128, 2, 3),
            (64, 128, 2, 4),
        ),
        "o": ((64, 128, 2, 4), (64, 128, 2, 3), (32, 256, 1, 4), (32, 128, 2, 4), (64, 128, 4, 3)),
        "gate_up": ((64, 128, 1, 3), (64, 64, 1, 5), (64, 64, 1, 4), (32, 128, 1, 4)),
        "down": (
            (64, 128, 2, 4),
            (64, 128, 2, 5),
            (64, 128, 4, 4),
            (64, 128, 4, 3),
            (32, 128, 2, 5),
        ),
    }.items():
        for outputs, inner, split, stages in tiles:
            name = f"{product} {outputs}x{inner} s{split} p{stages}"
            yield Variant(
                name, product=product, outputs=outputs, inner=inner, split=split, stages=stages
            )


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
    """Every variant at every shape."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--compile", type=int, nargs=2, metavar=("PART", "OF"))
    parser.add_argument("--layers", type=int, default=12)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    model = decoder(1 if arguments.compile else arguments.layers)
    plain, plain_gated, options = linear.best_tile, linear.best_gated_tile, launch.options

    def use(variant: Variant) -> None:
        linear.best_tile = variant.tile(plain)  # type: ignore[assignment]
        linear.best_gated_tile = variant.tile(plain_gated)  # type: ignore[assignment]
        launch.options = options if variant.dependent else lambda device: {"PDL": False}

    cases = [(shape, variant) for shape in SHAPES for variant in variants()]
    if arguments.compile:
        part, of = arguments.compile
        for (rows, nodes), variant in cases[part::of]:
            use(variant)
            whole_layers(model, rows, nodes, 384)()
        torch.cuda.synchronize()
        return
    bandwidth = copy_bandwidth()
    nbytes = sum(p.nbytes for p in model.layers.parameters()) / arguments.layers
    record: list[dict[str, object]] = []
    for rows, nodes in SHAPES:
        step, expected = whole_layers(model, rows, nodes, 384), None
        floor = (nbytes + rows * 384 * KV_HEADS * DIM * 4) / bandwidth * 1e6
        for variant in variants():
            use(variant)
            label = f"B {rows:3d} N {nodes} {variant.name:24s}"
            try:
                out = step()
                expected = out if expected is None else expected
                us = microseconds([step]) / arguments.layers
                error = relative(out, expected)
            except Exception as error:
                print(f"FAILED {label} {type(error).__name__} {str(error)[:200]}")
                continue
            print(
                f"{label} {us:7.2f} us a layer, floor {floor:6.2f} {floor / us:.0%} {error:.1e}",
                flush=True,
            )
            record.append(
                {
                    "rows": rows,
                    "nodes": nodes,
                    "variant": variant.name,
                    "us": round(us, 2),
                    "floor_us": round(floor, 2),
                }
            )
    everything = {
        "bench": "products", "device": torch.cuda.get_device_name(), "bandwidth": bandwidth, "layers": record
    }  # fmt: skip
    (Path(os.environ.get("OUT", ".")) / "products.json").write_text(
        json.dumps(everything, indent=1)
    )
    print(json.dumps(everything))


if __name__ == "__main__":
    main()
