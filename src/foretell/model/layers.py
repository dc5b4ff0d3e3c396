"""The parts of a decoder: weights that know how to be packed, attention, MLP, and the layer made of them.

Features of a family (biases, query/key norms, sandwich norms, experts) are read from the config once, when a part is
built. Parameters are born on the meta device and take real tensors through `fill`, which packs a part as soon as it is
whole; a packed part may give its plain weight back, so no `state_dict` is promised.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from foretell.model.config import ModelConfig
from foretell.model.rope import Rotation
from foretell.ops.group import ALONE, Group, Rows
from foretell.ops.meta import LayerKV, Meta
from foretell.ops.table import OpTable


@dataclass(frozen=True, slots=True)
class Build:
    """What every part is built with; with several ranks, configs are those of one rank's part."""

    ops: OpTable
    dtype: torch.dtype
    group: Group = ALONE

    def parameter(self, *shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
        """A parameter without memory, to be filled."""
        empty = torch.empty(shape, dtype=dtype or self.dtype, device="meta")
        return nn.Parameter(empty, requires_grad=False)


@dataclass(frozen=True, slots=True)
class Context:
    """What one layer must know of a forward pass, besides the rows themselves."""

    meta: Meta
    kv_slots: Tensor  # [R] int64
    rotation: Rotation
    mask: Any  # what `ops.mask` made for the layer's window
    window: int | None


def at_hand(part: nn.Module) -> None:
    """Make what a part consists of plain attributes too: nn.Module looks its own up in Python, at a microsecond each.

    Assigning a parameter or a module anew takes the plain attribute away again, so it is never out of date.
    """
    part.__dict__.update(part._modules)
    part.__dict__.update(part._parameters)


class Linear(nn.Module):
    """y = x W^T + b. With `gate`, W holds a gate and an up projection and y = act(gate) * up.

    Args:
        sums: the ranks have parts of the inputs, and y is the sum of what each makes of its own; bias and residual are
            rank 0's to add, so that they are added once and every rank has the same bits.
    """

    def __init__(
        self,
        build: Build,
        inputs: int,
        outputs: int,
        bias: bool,
        gate: str | None = None,
        sums: bool = False,
    ) -> None:
        super().__init__()
        self.ops, self.gate = build.ops, gate
        self.group = build.group if sums else ALONE
        self.weight = build.parameter(outputs, inputs)
        self.bias = build.parameter(outputs) if bias and self.group.first else None
        self.packed: Any = None

    def pack(self) -> None:
        """Lay out the weights for the device; a copy replaces the plain weight."""
        self.packed = self.ops.pack_linear(self.weight, self.bias)
        if self.ops.repacks(self.weight):
            self.weight = nn.Parameter(self.weight.detach().to("meta"), requires_grad=False)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """[R, I] → [R, O], plus the residual if given (whose memory the sum may take)."""
        if self.gate is not None:
            return self.ops.gated(x, self.packed, self.gate)
        if self.group.alone:
            return self.ops.linear(x, self.packed, residual)
        return self.group.sum(
            self.ops.linear(x, self.packed, residual if self.group.first else None)
        )


class Experts(nn.Module):
    """A mixture of gated MLPs and its router."""

    def __init__(self, build: Build, config: ModelConfig) -> None:
        super().__init__()
        self.ops, self.group, self.chosen = build.ops, build.group, config.experts_per_token
        self.activation = config.activation.value
        count, inner, hidden = config.experts, config.intermediate_size, config.hidden_size
        self.router = Linear(build, hidden, count, bias=False)
        self.gate_up = build.parameter(count, 2 * inner, hidden)
        self.down = build.parameter(count, hidden, inner)
        self.packed: Any = None

    def pack(self) -> None:
        """Lay out the experts for the device; a copy replaces the plain weights."""
        self.packed = self.ops.pack_experts(self.gate_up, self.down)
        if self.ops.repacks(self.down):
            self.gate_up = nn.Parameter(self.gate_up.detach().to("meta"), requires_grad=False)
            self.down = nn.Parameter(self.down.detach().to("meta"), requires_grad=False)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """[R, H] → [R, H], plus the residual if given."""
        out = self.group.sum(
            self.ops.experts(x, self.router.forward(x), self.packed, self.chosen, self.activation)
        )
        return out if residual is None else residual + out


class RMSNorm(nn.Module):
    """Root-mean-square norm; its weight is kept in float32 or wider."""

    def __init__(self, build: Build, size: int, eps: float) -> None:
        super().__init__()
        self.ops, self.eps = build.ops, eps
        wide = torch.promote_types(build.dtype, torch.float32)
        self.weight = build.parameter(size, dtype=wide)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """[..., H] → [..., H], plus the residual if given."""
        return self.ops.rms_norm(x, self.weight, self.eps, residual)


class Attention(nn.Module):
    """Self-attention over paged keys.

    Args:
        inputs: width of the rows it reads, if it is not the model's (EAGLE-3 reads two hidden states side by side).
    """

    def __init__(self, build: Build, config: ModelConfig, inputs: int | None = None) -> None:
        super().__init__()
        self.ops, self.config = build.ops, config
        self.heads, self.kv_heads, self.dim = config.heads, config.kv_heads, config.head_dim
        width = (self.heads + 2 * self.kv_heads) * self.dim
        self.qkv = Linear(build, inputs or config.hidden_size, width, config.qkv_bias)
        self.output = Linear(
            build, self.heads * self.dim, config.hidden_size, config.output_bias, sums=True
        )
        gated = self.heads * self.dim if config.output_gate else 0
        self.gate = Linear(build, inputs or config.hidden_size, gated, False) if gated else None
        self.q_norm = RMSNorm(build, self.dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(build, self.dim, config.norm_eps) if config.qk_norm else None
        at_hand(self)

    def forward(
        self, x: Tensor, context: Context, kv: LayerKV, residual: Tensor | None = None
    ) -> Tensor:
        """[R, I] → [R, H], plus the residual if given."""
        qkv = self.qkv.forward(x).view(x.shape[0], -1, self.dim)  # [R, heads + 2 * KV, D]
        norms = None
        if self.q_norm is not None and self.k_norm is not None:
            norms = (self.q_norm.weight, self.k_norm.weight)
        turn = context.rotation
        q = self.ops.rope_store(
            qkv, self.heads, norms, self.config.norm_eps, turn.cos, turn.sin, kv, context.kv_slots
        )
        config = self.config
        seen = self.ops.attention(
            q,
            kv,
            context.meta,
            context.mask,
            context.window,
            config.scale,
            config.attention_softcap,
        )
        if self.gate is not None:
            seen = seen * torch.sigmoid(self.gate.forward(x))
        return self.output.forward(seen, residual)


class Mlp(nn.Module):
    """The gated MLP."""

    def __init__(self, build: Build, config: ModelConfig) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_up = Linear(build, hidden, 2 * inner, bias, gate=config.activation.value)
        self.down = Linear(build, inner, hidden, bias, sums=True)
        at_hand(self)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """[R, H] → [R, H], plus the residual if given."""
        return self.down.forward(self.gate_up.forward(x), residual)


class Layer(nn.Module):
    """One layer: x + attention(norm(x)), then x + mlp(norm(x)); sandwich norms stand before the additions."""

    def __init__(self, build: Build, config: ModelConfig) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.norm_eps
        self.sandwich = config.sandwich_norms
        self.attention_norm = RMSNorm(build, hidden, eps)
        self.attention = Attention(build, config)
        self.mlp_norm = RMSNorm(build, hidden, eps)
        self.mlp = Experts(build, config) if config.experts else Mlp(build, config)
        self.attention_post_norm = RMSNorm(build, hidden, eps) if self.sandwich else None
        self.mlp_post_norm = RMSNorm(build, hidden, eps) if self.sandwich else None
        at_hand(self)

    def forward(self, x: Tensor, context: Context, kv: LayerKV) -> Tensor:
        """[R, H] → [R, H], the residual stream after this layer."""
        # `forward` is called by name: a call through nn.Module costs microseconds, hundreds of times a step.
        mixed = self.attention_norm.forward(x)
        if self.attention_post_norm is None or self.mlp_post_norm is None:
            x = self.attention.forward(mixed, context, kv, x)
            return self.mlp.forward(self.mlp_norm.forward(x), x)
        x = self.attention_post_norm.forward(self.attention.forward(mixed, context, kv), x)
        return self.mlp_post_norm.forward(self.mlp.forward(self.mlp_norm.forward(x)), x)


def embed(ops: OpTable, tokens: Tensor, weight: Tensor, scale: float, rows: Rows) -> Tensor:
    """[R] tokens → [R, H] embeddings, of a table whose rows the ranks have dealt out among them.

    A rank gives zero for the tokens of others, and the sum is one embedding and zeros.
    """
    if rows.group.alone:
        return ops.embed(tokens, weight, scale)
    place = tokens.clamp(min=0) - rows.start  # padding embeds like token 0
    here = (place >= 0) & (place < rows.count)
    found = ops.embed(torch.where(here, place, 0), weight, scale)
    return rows.group.sum(found.masked_fill(~here.unsqueeze(-1), 0.0))


def fill(root: nn.Module, name: str, tensor: Tensor) -> None:
    """Give a parameter its values, and pack its part as soon as the part is whole.

    Args:
        name: dotted path of the parameter below `root`.
        tensor: of the parameter's shape and dtype, on the device it is to live on.
    """
    path, _, leaf = name.rpartition(".")
    part = root.get_submodule(path)
    old = part.get_parameter(leaf)
    assert tensor.shape == old.shape, f"{name}: {tuple(tensor.shape)} into {tuple(old.shape)}"
    assert tensor.dtype == old.dtype, f"{name}: {tensor.dtype} into {old.dtype}"
    setattr(part, leaf, nn.Parameter(tensor, requires_grad=False))
    whole = not any(parameter.is_meta for parameter in part.parameters(recurse=False))
    if whole and isinstance(part, Linear | Experts):
        part.pack()
    if whole and isinstance(part, RMSNorm):
        at_hand(part)


def fill_random(root: nn.Module, seed: int, device: torch.device) -> None:
    """Fill every parameter below `root` with noise that keeps activations of order one."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in list(root.named_parameters()):
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        if parameter.dim() == 1:
            values = 0.1 * noise if name.endswith("bias") else 1 + 0.1 * noise
        else:
            values = noise * parameter.shape[-1] ** -0.5
        fill(root, name, values.to(device=device, dtype=parameter.dtype))
