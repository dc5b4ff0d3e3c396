"""The drafters' equations written out plainly, in float64, without pages, caches or batches: what networks must equal.

Rows are all positions of one request at once; who sees whom is an explicit matrix.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

Tensors = dict[str, Tensor]


def rms(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def rotate(x: Tensor, positions: Tensor, base: float, factor: float = 1.0) -> Tensor:
    """[R, heads, D] at positions [R]; angles in float32, as models compute them."""
    dim = x.shape[-1]
    frequency = 1.0 / base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim) / factor
    angle = positions.float()[:, None] * frequency
    cos, sin = angle.cos().double()[:, None], angle.sin().double()[:, None]
    left, right = x[..., : dim // 2], x[..., dim // 2 :]
    return torch.cat((left * cos - right * sin, right * cos + left * sin), -1)


@dataclass
class Frame:
    """Where rows stand and whom they see."""

    positions: Tensor  # [R]
    sees: Tensor  # [R, R] bool
    heads: int = 4
    kv_heads: int = 2
    base: float = 10000.0
    factor: float = 1.0
    rotary: float = 1.0  # share of a head's channels that turn


def attend(x: Tensor, w: Tensors, prefix: str, frame: Frame) -> Tensor:
    """Self-attention of rows [R, I]."""

    def project(name: str, heads: int) -> Tensor:
        y = x @ w[f"{prefix}self_attn.{name}_proj.weight"].T
        bias = w.get(f"{prefix}self_attn.{name}_proj.bias")
        return (y if bias is None else y + bias).view(x.shape[0], heads, -1)

    def turned(x: Tensor) -> Tensor:
        some = int(x.shape[-1] * frame.rotary)
        left = rotate(x[..., :some], frame.positions, frame.base, frame.factor)
        return torch.cat((left, x[..., some:]), -1)

    q, k, v = project("q", frame.heads), project("k", frame.kv_heads), project("v", frame.kv_heads)
    gate = None
    if q.shape[-1] == 2 * k.shape[-1]:
        q, gate = q.chunk(2, -1)
    if f"{prefix}self_attn.q_norm.weight" in w:
        q, k = (rms(t, w[f"{prefix}self_attn.{n}_norm.weight"]) for t, n in ((q, "q"), (k, "k")))
    q, k = turned(q), turned(k)
    outs = []
    for head in range(frame.heads):
        shared = head // (frame.heads // frame.kv_heads)
        scores = q[:, head] @ k[:, shared].T / q.shape[-1] ** 0.5
        weights = torch.softmax(scores.masked_fill(~frame.sees, -torch.inf), -1)
        outs.append(weights @ v[:, shared])
        if gate is not None:
            outs[-1] = outs[-1] * torch.sigmoid(gate[:, head])
    return torch.cat(outs, -1) @ w[f"{prefix}self_attn.o_proj.weight"].T


def mlp(x: Tensor, w: Tensors, prefix: str) -> Tensor:
    gate = F.silu(x @ w[f"{prefix}mlp.gate_proj.weight"].T)
    return (gate * (x @ w[f"{prefix}mlp.up_proj.weight"].T)) @ w[f"{prefix}mlp.down_proj.weight"].T


def layer(x: Tensor, residual: Tensor, w: Tensors, prefix: str, frame: Frame) -> Tensor:
    """Attention on x, residual, norm, MLP, residual."""
    s = residual + attend(x, w, prefix, frame)
    return s + mlp(rms(s, w[f"{prefix}post_attention_layernorm.weight"]), w, prefix)


def ordinary_layers(x: Tensor, w: Tensors, frame: Frame, first: int) -> Tensor:
    i = first
    while f"layers.{i}.self_attn.q_proj.weight" in w:
        x = layer(rms(x, w[f"layers.{i}.input_layernorm.weight"]), x, w, f"layers.{i}.", frame)
        i += 1
    return x


def eagle1(embedded: Tensor, hidden: Tensor, w: Tensors, frame: Frame) -> Tensor:
    """[R, H] outputs: the features that are fed back, and that the target's head reads."""
    x = torch.cat((embedded, hidden), -1) @ w["fc.weight"].T
    if "fc.bias" in w:
        x = x + w["fc.bias"]
    return ordinary_layers(layer(x, x, w, "layers.0.", frame), w, frame, 1)


def eagle3_fuse(features: Tensor, w: Tensors) -> Tensor:
    """[R, 3 * Ht] → [R, H]."""
    if "input_norm.weight" in w:
        features = rms(features, w["input_norm.weight"])
    if "fc_norm.0.weight" in w:
        chunks = features.chunk(3, -1)
        features = torch.cat([rms(c, w[f"fc_norm.{i}.weight"]) for i, c in enumerate(chunks)], -1)
    return features @ w["fc.weight"].T if "fc.weight" in w else features


def eagle3(
    embedded: Tensor, g: Tensor, w: Tensors, frame: Frame, norm_before_residual: bool = False
) -> Tensor:
    """[R, H] outputs before the final norm; w has SafeAILab's names of the first layer under `layers.0.`."""
    normed = rms(g, w["layers.0.hidden_norm.weight"])
    x = torch.cat((rms(embedded, w["layers.0.input_layernorm.weight"]), normed), -1)
    out = layer(x, normed if norm_before_residual else g, w, "layers.0.", frame)
    return ordinary_layers(out, w, frame, 1)


def mtp(embedded: Tensor, hidden: Tensor, w: Tensors, frame: Frame, feature_first: bool) -> Tensor:
    """[R, H] outputs before the final norm."""
    e, h = rms(embedded, w["embedding_norm"]), rms(hidden, w["feature_norm"])
    x = torch.cat((h, e) if feature_first else (e, h), -1) @ w["fc"].T
    return ordinary_layers(x, w, frame, 0)


def medusa(x: Tensor, w: Tensors, head: int, layers: int) -> Tensor:
    """[..., H] state of one head before its output layer."""
    for j in range(layers):
        x = x + F.silu(x @ w[f"{head}.{j}.linear.weight"].T + w[f"{head}.{j}.linear.bias"])
    return x


def mlp_speculator(
    feature: Tensor, tokens: list[int], w: Tensors, heads: int, scale_input: bool
) -> Tensor:
    """[V] logits after a path of tokens, the pending one first."""
    inner = w["speculator.emb.0.weight"].shape[1]
    state_weight = 0.5 ** (0.5 / heads)
    token_weight = ((1 - state_weight**2) * inner / 2) ** 0.5
    s = rms(feature, torch.ones(())) / 2**0.5 if scale_input else feature
    for i, token in enumerate(tokens):
        z = w[f"speculator.emb.{i}.weight"][token] * (token_weight / state_weight)
        y = s @ w[f"speculator.proj.{i}.weight"].T + z
        s = F.gelu(rms(y, w[f"speculator.ln.{i}.weight"]) + w[f"speculator.ln.{i}.bias"])
    return s @ w[f"speculator.head.{len(tokens) - 1}.weight"].T
