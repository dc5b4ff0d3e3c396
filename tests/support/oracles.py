"""Drafters that are exactly right, for a target whose next token is known: t + 1 modulo V.

The cycle target is a real decoder whose attention adds nothing and whose MLPs mix one-hot embeddings by circulant maps,
so that every layer's hidden state says which token it stands on, and each layer says it differently. The oracles read
the target's features alone and not the token's embedding: a wrong layer or a shift by one makes every draft wrong.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from foretell.model.config import ModelConfig
from foretell.model.decoder import Decoder
from foretell.model.layers import fill
from foretell.model.rope import Rope
from foretell.ops.meta import LayerKV, RaggedRows
from foretell.ops.table import table_for
from foretell.spec.eagle import Concat, Eagle3Net, Fusion, FusionNet, Parts

V = 40  # tokens, and the hidden size: embeddings are one-hot
CPU = torch.device("cpu")


def shift(by: int) -> Tensor:
    """[V, V]: e_t becomes e_{t + by}."""
    return torch.roll(torch.eye(V, dtype=torch.float64), by, dims=0)


def circulant(column: Tensor) -> Tensor:
    """[V, V] whose column t is `column` rolled by t."""
    return torch.stack([torch.roll(column, t) for t in range(V)], dim=1)


def cycle_config(layers: int) -> ModelConfig:
    return ModelConfig(
        vocab_size=V,
        hidden_size=V,
        intermediate_size=V,
        layers=layers,
        heads=4,
        kv_heads=2,
        head_dim=V // 4,
        max_position=512,
        norm_eps=1e-12,
        eos_token_ids=(V - 1,),
    )


def linear_mlp(matrix: Tensor, total: float) -> tuple[Tensor, Tensor]:
    """(gate_up, down) of a gated MLP that is x -> matrix @ x for inputs whose entries sum to `total`."""
    gate = torch.full((V, V), 1.0 / total, dtype=torch.float64)  # gate(x) = 1 in every channel
    weight = torch.nn.functional.silu(torch.ones((), dtype=torch.float64))
    return torch.cat((gate, matrix / weight)), torch.eye(V, dtype=torch.float64)


def empty(model: torch.nn.Module) -> None:
    """Every matrix zero, every norm one."""
    for name, parameter in list(model.named_parameters()):
        value = 1.0 if parameter.dim() == 1 and not name.endswith("bias") else 0.0
        fill(model, name, torch.full(parameter.shape, value, dtype=parameter.dtype))


def states(model: Decoder, taps: tuple[int, ...]) -> Tensor:
    """[F] the features of token 0, standing alone."""
    layers, heads, dim = model.kv_shape
    kv = [
        LayerKV(*(torch.zeros(2, 4, heads, dim, dtype=torch.float64) for _ in "kv"))
        for _ in range(layers)
    ]
    meta = RaggedRows(
        positions=torch.tensor([0]),
        kv_slots=torch.tensor([4]),
        blocks=torch.tensor([[1]], dtype=torch.int32),
        starts=torch.tensor([0]),
        offsets=torch.tensor([0, 1]),
        lengths=((0, 1),),
    )
    _, features = model(torch.tensor([0]), meta, kv, taps)
    assert features is not None
    return features[0]


def cycle_target(layers: int = 7) -> Decoder:
    """The target; layer j adds half of the token rolled by 3 j + 2."""
    model = Decoder(cycle_config(layers), torch.float64, CPU, table_for(CPU))
    empty(model)
    fill(model, "embedding", torch.eye(V, dtype=torch.float64))
    for j in range(layers):
        before = states(model, (j,))
        normed = before / before.square().mean().sqrt()
        gate_up, down = linear_mlp(0.5 * shift(3 * j + 2), float(normed.sum()))
        fill(model, f"layers.{j}.mlp.gate_up.weight", gate_up)
        fill(model, f"layers.{j}.mlp.down.weight", down)
    fill(model, "head.weight", 20 * shift(1) @ decoding(model, -1))
    return model


def decoding(model: Decoder, tap: int) -> Tensor:
    """[V, V]: a feature of token t becomes e_t."""
    return torch.linalg.inv(circulant(states(model, (tap,))))


def eagle1_oracle(target: Decoder, by: int = 1) -> FusionNet:
    """o = S f: the feature of the next token; right for `by` = 1."""
    parts = Parts(cycle_config(1), own_embedding=0, own_head=0)
    net = FusionNet(parts, Fusion(), torch.float64, table_for(CPU))
    empty(net)
    feature = circulant(states(target, (-1,)))
    forward = feature @ shift(by) @ torch.linalg.inv(feature)
    fill(net, "fc.weight", torch.cat((torch.zeros(V, V, dtype=torch.float64), forward), dim=1))
    return net


def eagle3_oracle(target: Decoder, taps: tuple[int, ...], rows: int = V) -> Eagle3Net:
    """g = e of the feature's token, if the features are those of `taps`, and noise if they are not; o = S g.

    The head has the first `rows` tokens.
    """
    parts = Parts(cycle_config(1), own_embedding=0, own_head=rows)
    concat = Concat(chunks=len(taps), target_hidden=V)
    net = Eagle3Net(parts, concat, torch.float64, table_for(CPU))
    empty(net)
    # Two of the features must say what the first says, or they drown it.
    reads = [decoding(target, tap) for tap in taps]
    doubt = torch.randn(V, V, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 10
    others = [doubt @ read for read in reads[1:]]
    first = reads[0] - len(others) * doubt @ reads[0]
    fill(net, "fc.weight", torch.cat((first, *others), dim=1))
    # The MLP reads norm(g), a one-hot vector times sqrt(V), and turns it into S g - g.
    size = V**0.5
    gate_up, down = linear_mlp((shift(1) - torch.eye(V, dtype=torch.float64)) / size, size)
    fill(net, "first.mlp.gate_up.weight", gate_up)
    fill(net, "first.mlp.down.weight", down)
    fill(net, "head.weight", 20 * shift(1)[:rows])
    return net


def rope_oracle(target: Decoder, base: float, made_for: float, back: int = 3) -> FusionNet:
    """An EAGLE-1 network that finds its token by position: it attends to the key `back` places before.

    Queries and keys are constant; what turns them is the rope alone, so that with another base than `made_for` it
    looks at another place. Values say a token as an angle. `base` is what the network's config says.
    """
    dim = V // 4
    config = replace(cycle_config(1), qkv_bias=True, ropes=(Rope(dim=dim, base=base),))
    parts = Parts(config, own_embedding=0, own_head=0)
    net = FusionNet(parts, Fusion(), torch.float64, table_for(CPU))
    empty(net)
    angles = torch.arange(V, dtype=torch.float64) * 2 * math.pi / V
    small = 1e-6  # of the row itself, which must not speak for itself
    fill(net, "fc.weight", small * torch.cat((torch.eye(V), torch.zeros(V, V)), 1).double())
    value = torch.stack((angles.cos(), angles.sin())) / small
    rows = torch.zeros(V // 2, V, dtype=torch.float64)
    rows[:2] = value
    keyless = torch.zeros(V + V // 2, V, dtype=torch.float64)
    fill(net, "first.attention.qkv.weight", torch.cat((keyless, rows)))
    fill(net, "first.attention.qkv.bias", _look_back(dim, made_for, back))
    feature = circulant(states(target, (-1,)))
    ahead = angles - angles[back]
    output = torch.zeros(V, V, dtype=torch.float64)
    output[:, :2] = 100 * feature @ torch.stack((ahead.cos(), ahead.sin()), dim=1)
    fill(net, "first.attention.output.weight", output)
    return net


def _look_back(dim: int, base: float, back: int) -> Tensor:
    """[2 V] biases of queries, keys and values; only the second and third frequencies are used."""
    half = dim // 2
    q, k = torch.zeros(dim, dtype=torch.float64), torch.zeros(dim, dtype=torch.float64)
    for i in (1, 2):
        angle = -back * base ** (-2 * i / dim)
        q[i], q[i + half] = 50_000 * math.cos(angle), 50_000 * math.sin(angle)
        k[i] = 1.0
    return torch.cat((q.repeat(4), k.repeat(2), torch.zeros(V // 2, dtype=torch.float64)))


def mtp_oracle(target: Decoder) -> FusionNet:
    """A network of MiMo's kind: right if the feature is that of the token before, noise if it is not."""
    fusion = Fusion(
        input_norms=True,
        feature_first=True,
        first_norm=True,
        final_norm=True,
        feed_back_normed=True,
    )
    config = replace(cycle_config(1), qkv_bias=True)
    net = FusionNet(Parts(config, 0, 0), fusion, torch.float64, table_for(CPU))
    empty(net)
    feature = circulant(states(target, (-1,)))
    from_feature = shift(1) @ torch.linalg.inv(feature)  # f of token t - 1 becomes e_t
    from_embedding = torch.eye(V, dtype=torch.float64) / V**0.5  # the norm makes e_t sqrt(V) long
    doubt = torch.randn(V, V, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    left = (feature + doubt) @ from_feature
    fill(net, "fc.weight", torch.cat((left, -doubt @ from_embedding), dim=1))
    return net
