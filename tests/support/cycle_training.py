"""Drafters of the cycle target (see oracles) under training: what tests of the loop and its processes share.

Run as a program it is one process of torchrun: `cycle_training.py FOLDER[:STOP_AFTER] ...` trains the EAGLE-3 head.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import torch
from oracles import V, cycle_target

from foretell.model.decoder import Decoder
from foretell.model.layers import fill
from foretell.training.capture import Capture
from foretell.training.data import Example, Packed, pack
from foretell.training.dense import DENSE
from foretell.training.eagle import EagleRecipe, EagleSettings, head_layer, new_eagle3
from foretell.training.loop import Loop, LoopSettings, Processes
from foretell.training.medusa import MedusaRecipe, MedusaSettings, new_heads
from foretell.training.recipe import Recipe
from foretell.training.save import DraftCard

TARGET = cycle_target()
TAPS = (2, 3, 4)
CPU = torch.device("cpu")


def dense_target() -> Decoder:
    target = Decoder(TARGET.config, TARGET.dtype, CPU, DENSE)
    for name, parameter in TARGET.named_parameters():
        fill(target, name, parameter.detach().clone())
    return target


def texts() -> Packed:
    """What the target says: it counts up from the prompt's last token."""
    examples = []
    chance = random.Random(0)
    for i in range(120):
        prompt = [chance.randrange(V) for _ in range(2 + i % 5)]
        said = [(prompt[-1] + 1 + j) % V for j in range(40)]
        whole = tuple(prompt + said)
        examples.append(Example(str(i), whole, ((len(prompt), len(whole)),)))
    return pack(examples, 64)


def recipe_of(kind: str) -> Recipe:
    target = dense_target()
    if kind == "medusa":
        settings = MedusaSettings(heads=3, own_output=True)
        card = DraftCard("cycle", dtype=torch.float64)
        return MedusaRecipe(
            new_heads(target, settings), target, Capture(target, ()), settings, card
        )
    ids = torch.arange(V)
    net = new_eagle3(target, ids, head_layer(target.config), 3, seed=0)
    card = DraftCard("cycle", taps=TAPS, dtype=torch.float64)
    return EagleRecipe(net, target, Capture(target, TAPS), ids, EagleSettings(steps=4), card)


def loop_of(recipe: Recipe, folder: Path, steps: int, **stamp: object) -> Loop:
    settings = LoopSettings(steps=steps, rows=2, learning_rate=1e-2, warmup=5)
    return Loop(recipe, texts(), settings, folder, {"hidden_size": 32, **stamp}, CPU)


STEPS, ROWS = 8, 2  # of the program, rows for each process


def program(jobs: list[str]) -> None:
    """Train in this process's share of the work; jobs are FOLDER or FOLDER:STOP_AFTER."""
    torch.set_num_threads(1)
    processes = Processes.join(CPU)
    settings = LoopSettings(steps=STEPS, rows=ROWS, learning_rate=1e-2, warmup=3)
    for job in jobs:
        folder, _, stop = job.partition(":")
        loop = Loop(recipe_of("eagle3"), texts(), settings, Path(folder), {}, CPU, processes)
        loop.run(int(stop) if stop else None)
    processes.leave()


if __name__ == "__main__":
    program(sys.argv[1:])
