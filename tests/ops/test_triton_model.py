"""A whole decoder on the kernels: the reference's logits, and with the fixed order the same bits in any company."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from kernel_cases import DEVICE, error

from foretell.model.config import ModelConfig
from foretell.model.decoder import Decoder
from foretell.ops.meta import LayerKV, RaggedRows, TreeRows, flat_slots
from foretell.ops.table import REFERENCE, OpTable
from foretell.ops.triton.fixed import FIXED
from foretell.ops.triton.table import CUDA

BLOCK_SIZE, LENGTH = 16, 64


def config(**settings: object) -> ModelConfig:
    return ModelConfig.from_hf(
        {
            "model_type": "llama",
            "vocab_size": 50,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 128,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            **settings,
        }
    )


MIXTRAL = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}


class Text:
    """A model and the KV of one text, run in chunks and in chains."""

    def __init__(self, ops: OpTable, **settings: object) -> None:
        self.model = Decoder.random(config(**settings), 3, torch.float32, DEVICE, ops)
        layers, heads, dim = self.model.kv_shape
        count = LENGTH // BLOCK_SIZE
        self.blocks = (torch.arange(count, device=DEVICE, dtype=torch.int32).flip(0) + 1).unsqueeze(
            0
        )
        shape = (count + 1, BLOCK_SIZE, heads, dim)
        self.kv = [
            LayerKV(torch.zeros(shape, device=DEVICE), torch.zeros(shape, device=DEVICE))
            for _ in range(layers)
        ]

    @torch.inference_mode()
    def prompt(self, tokens: torch.Tensor, start: int) -> torch.Tensor:
        positions = torch.arange(start, start + len(tokens), device=DEVICE)
        meta = RaggedRows(
            positions, self._slots(positions), self.blocks, torch.tensor([start], device=DEVICE),
            torch.tensor([0, len(tokens)], device=DEVICE), ((start, len(tokens)),),
        )  # fmt: skip
        return self.model.logits(self.model(tokens, meta, self.kv)[0])

    @torch.inference_mode()
    def chain(self, tokens: torch.Tensor, start: int) -> torch.Tensor:
        positions = torch.arange(start, start + len(tokens), device=DEVICE)
        bits = (2 << torch.arange(len(tokens), device=DEVICE)) - 1
        row = positions.unsqueeze(0)
        meta = TreeRows(
            row, self._slots(positions).unsqueeze(0), self.blocks,
            torch.tensor([start], device=DEVICE), bits.unsqueeze(0), row, LENGTH,
        )  # fmt: skip
        return self.model.logits(self.model(tokens.unsqueeze(0), meta, self.kv)[0])[0]

    def _slots(self, positions: torch.Tensor) -> torch.Tensor:
        valid = positions.unsqueeze(0) >= 0
        return flat_slots(self.blocks, positions.unsqueeze(0), BLOCK_SIZE, valid)[0]


@pytest.mark.parametrize("settings", [{}, MIXTRAL], ids=["dense", "experts"])
@pytest.mark.parametrize("ops", [CUDA, FIXED], ids=["fast", "fixed"])
def test_logits_are_the_references(ops: OpTable, settings: dict[str, object]) -> None:
    tokens = torch.randint(0, 50, (30,)).to(DEVICE)
    kernels, plain = Text(ops, **settings), Text(REFERENCE, **settings)
    assert error(kernels.prompt(tokens[:23], 0), plain.prompt(tokens[:23], 0)) < 1e-4
    assert error(kernels.chain(tokens[23:], 23), plain.chain(tokens[23:], 23)) < 1e-4


def test_in_fixed_order_a_chain_has_the_bits_of_its_tokens_one_by_one() -> None:
    tokens = torch.randint(0, 50, (30,)).to(DEVICE)
    chain, single = Text(FIXED), Text(FIXED)
    assert torch.equal(chain.prompt(tokens[:24], 0)[16:], _in_two(single, tokens[:24]))
    together = chain.chain(tokens[24:], 24)
    for i in range(6):
        alone = single.chain(tokens[24 + i : 25 + i], 24 + i)[0]
        assert torch.equal(alone, together[i]), i


def _in_two(text: Text, tokens: torch.Tensor) -> torch.Tensor:
    text.prompt(tokens[:16], 0)
    return text.prompt(tokens[16:], 16)
