"""EAGLE: a layer or two that read the target's features draft (EAGLE-1 arXiv 2401.15077, EAGLE-3 arXiv 2503.01840).

Row i pairs token t_i with f_{i-1}, the target's feature of the position before it, and predicts t_{i+1}. Its KV lies at
entry i, its rotary position is i - 1, the feature's own, which is what the originals train with; the difference shows
only where rope scaling depends on the position. Entry 0 has no feature: it is never seen. Drafted rows take the
network's own output of their parent for f; only rows of true features are kept, since every window runs the committed
tokens again. MTP heads of a target's own checkpoint are the same thing with other norms (`Fusion`).

Not where checkpoints are read (checkpoint/eagle.py, eagle3.py, mtp.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from foretell.model.config import ModelConfig
from foretell.model.decoder import Decoder
from foretell.model.layers import Attention, Build, Context, Layer, Linear, Mlp, RMSNorm
from foretell.model.rope import inverse_frequencies, rotation
from foretell.ops.meta import LayerKV, Meta
from foretell.ops.table import OpTable
from foretell.spec import dynamic_tree
from foretell.spec.autoregressive import Autoregressive, Entries
from foretell.spec.candidates import Choice, Scoring, choice_for
from foretell.spec.drafter import Draft, KVSpec, KVView, PromptRows, Window
from foretell.spec.dynamic_tree import Growth
from foretell.spec.nodes import Shape
from foretell.spec.verify import Acceptance
from foretell.spec.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class Parts:
    """What both kinds of networks are made with."""

    layer: ModelConfig  # shape of a layer; `layers` of them
    own_embedding: int  # rows of the embedding it brings, 0 = the target's
    own_head: int  # rows of the head it brings, 0 = the target's
    logit_scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Fusion:
    """How EAGLE-1/2 and MTP networks join embedding and feature, as data.

    x = fc([embedding, feature]), through the layers, out. EAGLE-1 has no norm but those inside the layer, and the first
    layer has none before its attention.
    """

    fc_bias: bool = False
    input_norms: bool = False  # an RMSNorm on the embedding and one on the feature
    feature_first: bool = False  # the feature's half of the row comes first
    first_norm: bool = False  # the first layer has its norm before attention
    final_norm: bool = False
    feed_back_normed: bool = False  # the next row gets the normed output


@dataclass(frozen=True, slots=True)
class Concat:
    """How EAGLE-3 networks join them: the first attention reads [norm(embedding), norm(g)], g = fc(features).

    The flags are those of the checkpoints; see `Eagle3Net`.
    """

    chunks: int = 3  # target features side by side
    target_hidden: int = 0
    fc: bool = True
    fc_bias: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False  # one norm per chunk
    norm_output: bool = False


class FeatureNet(Protocol):
    """A network on features; its embedding and head may be the target's."""

    parts: Parts
    embedding: nn.Parameter | None
    head: Linear | None

    def fuse(self, features: Tensor) -> Tensor:
        """[R, F] target features → [R, H], what drafted rows have their parent's output for."""
        ...

    def run(
        self, embedded: Tensor, fused: Tensor, contexts: Context, kv: Sequence[LayerKV]
    ) -> Tensor:
        """[R, H] embeddings and [R, H] from `fuse` or `feed_back` → [R, H], before the final norm."""
        ...

    def feed_back(self, hidden: Tensor) -> Tensor:
        """[R, H], what a drafted row has for its feature."""
        ...

    def out(self, hidden: Tensor) -> Tensor:
        """[R, H], what the head reads."""
        ...


class _First(nn.Module):
    """EAGLE's first layer: attention reads `inputs` channels as they are; the residual is given."""

    def __init__(self, build: Build, config: ModelConfig, inputs: int) -> None:
        super().__init__()
        self.attention = Attention(build, config, inputs)
        self.mlp_norm = RMSNorm(build, config.hidden_size, config.norm_eps)
        self.mlp = Mlp(build, config)

    def forward(self, x: Tensor, residual: Tensor, context: Context, kv: LayerKV) -> Tensor:
        """[R, I], [R, H] → [R, H]."""
        x = self.attention(x, context, kv, residual)
        out: Tensor = self.mlp(self.mlp_norm(x), x)
        return out


class FusionNet(nn.Module):
    """EAGLE-1/2 and MTP networks."""

    def __init__(self, parts: Parts, fusion: Fusion, dtype: torch.dtype, ops: OpTable) -> None:
        super().__init__()
        self.parts, self.fusion = parts, fusion
        build, config = Build(ops, dtype), parts.layer
        hidden, eps = config.hidden_size, config.norm_eps
        self.embedding, self.head = _ends(build, parts)
        self.fc = Linear(build, 2 * hidden, hidden, fusion.fc_bias)
        self.embedding_norm = RMSNorm(build, hidden, eps) if fusion.input_norms else None
        self.feature_norm = RMSNorm(build, hidden, eps) if fusion.input_norms else None
        self.first = None if fusion.first_norm else _First(build, config, hidden)
        rest = config.layers - (self.first is not None)
        self.layers = nn.ModuleList(Layer(build, config) for _ in range(rest))
        self.norm = RMSNorm(build, hidden, eps) if fusion.final_norm else None

    def fuse(self, features: Tensor) -> Tensor:
        """The feature is used as it is."""
        return features

    def run(
        self, embedded: Tensor, fused: Tensor, contexts: Context, kv: Sequence[LayerKV]
    ) -> Tensor:
        """See FeatureNet."""
        if self.embedding_norm is not None and self.feature_norm is not None:
            embedded, fused = self.embedding_norm(embedded), self.feature_norm(fused)
        pair = (fused, embedded) if self.fusion.feature_first else (embedded, fused)
        x: Tensor = self.fc(torch.cat(pair, dim=-1))
        if self.first is not None:
            x = self.first(x, x, contexts, kv[0])
        for layer, pages in zip(self.layers, kv[len(kv) - len(self.layers) :], strict=True):
            x = layer(x, contexts, pages)
        return x

    def feed_back(self, hidden: Tensor) -> Tensor:
        """See FeatureNet."""
        return self.out(hidden) if self.fusion.feed_back_normed else hidden

    def out(self, hidden: Tensor) -> Tensor:
        """See FeatureNet."""
        return hidden if self.norm is None else self.norm(hidden)


class Eagle3Net(nn.Module):
    """EAGLE-3: g = fc(features); s = r + attention([norm(e), norm(g)]); o = s + mlp(norm(s)); logits of norm(o).

    r is g, or norm(g) with `norm_before_residual`; drafted rows have their parent's o for g, or norm(o) with
    `norm_output`. Further layers are ordinary ones.
    """

    def __init__(self, parts: Parts, concat: Concat, dtype: torch.dtype, ops: OpTable) -> None:
        super().__init__()
        self.parts, self.concat = parts, concat
        build, config = Build(ops, dtype), parts.layer
        hidden, eps = config.hidden_size, config.norm_eps
        chunk, width = concat.target_hidden, concat.chunks * concat.target_hidden
        self.embedding, self.head = _ends(build, parts)
        self.fc = Linear(build, width, hidden, concat.fc_bias) if concat.fc else None
        self.features_norm = RMSNorm(build, width, eps) if concat.norm_before_fc else None
        norms = [RMSNorm(build, chunk, eps) for _ in range(concat.chunks if concat.fc_norm else 0)]
        self.chunk_norms = nn.ModuleList(norms)
        self.embedding_norm = RMSNorm(build, hidden, eps)
        self.hidden_norm = RMSNorm(build, hidden, eps)
        self.first = _First(build, config, 2 * hidden)
        self.layers = nn.ModuleList(Layer(build, config) for _ in range(config.layers - 1))
        self.norm = RMSNorm(build, hidden, eps)

    def fuse(self, features: Tensor) -> Tensor:
        """[R, chunks * Ht] → [R, H]."""
        if self.features_norm is not None:
            features = self.features_norm(features)
        if len(self.chunk_norms) > 0:
            chunks = features.chunk(len(self.chunk_norms), dim=-1)
            normed = [norm(chunk) for norm, chunk in zip(self.chunk_norms, chunks, strict=True)]
            features = torch.cat(normed, dim=-1)
        return features.clone() if self.fc is None else self.fc(features)

    def run(
        self, embedded: Tensor, fused: Tensor, contexts: Context, kv: Sequence[LayerKV]
    ) -> Tensor:
        """See FeatureNet."""
        normed = self.hidden_norm(fused)
        residual = normed if self.concat.norm_before_residual else fused
        pair = torch.cat((self.embedding_norm(embedded), normed), dim=-1)
        x: Tensor = self.first(pair, residual, contexts, kv[0])
        for layer, pages in zip(self.layers, kv[1:], strict=True):
            x = layer(x, contexts, pages)
        return x

    def feed_back(self, hidden: Tensor) -> Tensor:
        """See FeatureNet."""
        return self.norm(hidden) if self.concat.norm_output else hidden

    def out(self, hidden: Tensor) -> Tensor:
        """See FeatureNet."""
        normed: Tensor = self.norm(hidden)
        return normed


def _ends(build: Build, parts: Parts) -> tuple[nn.Parameter | None, Linear | None]:
    """Own embedding and own head, where there are any."""
    hidden = parts.layer.hidden_size
    embedding = build.parameter(parts.own_embedding, hidden) if parts.own_embedding else None
    head = Linear(build, hidden, parts.own_head, bias=False) if parts.own_head else None
    return embedding, head


@dataclass(frozen=True, slots=True)
class Bound:
    """A feature network beside its target: a `Net` that drafts."""

    net: FeatureNet
    target: Decoder
    frequencies: Tensor  # of the network's own rope

    def ingest(
        self, tokens: Tensor, features: Tensor | None, meta: Meta, kv: Sequence[LayerKV]
    ) -> Tensor:
        """Rows of true features."""
        assert features is not None, "this drafter reads the target's features"
        fused = self.net.fuse(features.reshape(-1, features.shape[-1]).to(self.target.dtype))
        return self._run(tokens, fused, meta, kv)

    def extend(self, tokens: Tensor, above: Tensor, meta: Meta, kv: Sequence[LayerKV]) -> Tensor:
        """Rows of drafted tokens."""
        fused = self.net.feed_back(above.reshape(-1, above.shape[-1]))
        return self._run(tokens, fused, meta, kv)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., H] → [..., Vd]."""
        out = self.net.out(hidden)
        head = self.net.head
        if head is None:
            logits = self.target.logits(out)
        else:
            logits = head(out.reshape(-1, out.shape[-1])).view(*out.shape[:-1], -1)
        scale = self.net.parts.logit_scale
        return logits if scale == 1.0 else logits * scale

    def _run(self, tokens: Tensor, fused: Tensor, meta: Meta, kv: Sequence[LayerKV]) -> Tensor:
        target, config = self.target, self.net.parts.layer
        table = target.embedding if self.net.embedding is None else self.net.embedding
        embedded = target.ops.embed(tokens.flatten(), table, 1.0)
        group, block_size = config.heads // config.kv_heads, kv[0].k.shape[1]
        context = Context(
            meta=meta,
            kv_slots=meta.kv_slots.flatten(),
            rotation=rotation(
                config.ropes[0],
                self.frequencies,
                meta.positions.flatten(),
                target.dtype,
                target.ops,
            ),
            mask=target.ops.mask(meta, None, block_size, group, target.dtype),
            window=None,
        )
        return self.net.run(embedded, fused, context, kv).view(*tokens.shape, -1)


class EagleDrafter:
    """Drafts with a network on the target's features: EAGLE-1, EAGLE-2, EAGLE-3 and MTP.

    Args:
        net: the network.
        taps: target features it reads: (-1,) the final hidden state, or layers (see Decoder.forward).
        vocabulary: what the network's tokens are for the target.
        acceptance: under `match` candidates share the target's noise.
        growth: grow dynamic trees (EAGLE-2); None fills the static tree it is given.
        draws: under `rejection`, for static trees, hand over the law of drawn candidates.
    """

    def __init__(
        self,
        net: FeatureNet,
        taps: tuple[int, ...],
        vocabulary: Vocabulary,
        acceptance: Acceptance,
        growth: Growth | None = None,
        draws: bool = True,
    ) -> None:
        config = net.parts.layer
        self.net = net
        self.features = taps
        self.growth = growth
        self._given = (vocabulary, acceptance, draws)
        self.kv: KVSpec | None = KVSpec(config.layers, config.kv_heads, config.head_dim)
        # Dynamic trees take the likeliest candidates: a law for each would say nothing more.
        self._scoring = Scoring(vocabulary, choice_for(acceptance, draws and growth is None))
        self.draws = self._scoring.choice is Choice.DRAWN
        self._procedure: Autoregressive | None = None

    def variant(
        self, net: FeatureNet | None = None, taps: tuple[int, ...] | None = None
    ) -> EagleDrafter:
        """The same drafter, not bound, with another network or other target features."""
        vocabulary, acceptance, draws = self._given
        net, taps = net or self.net, taps or self.features
        return EagleDrafter(net, taps, vocabulary, acceptance, self.growth, draws)

    @property
    def scratch(self) -> int:
        """KV entries behind the committed text that a draft may write, whatever its node count; 0 = no more than it."""
        return 0 if self.growth is None else self.growth.scratch

    def bind(self, target: Decoder, kv: KVView | None) -> None:
        """Receive the target, for embedding and head, and the KV behind its block ids."""
        assert kv is not None, "EAGLE needs KV"
        frequencies = inverse_frequencies(self.net.parts.layer.ropes[0], target.device)
        net = Bound(self.net, target, frequencies)
        self._procedure = Autoregressive(net, self._scoring, Entries(rotary_shift=1, first_key=1))
        self._procedure.bind(kv)

    def observe(self, rows: PromptRows) -> None:
        """Run prompt tokens with the features before them."""
        self._bound().observe(rows)

    def propose(self, window: Window, shape: Shape) -> Draft:
        """Run the window, then fill the static tree or grow a dynamic one."""
        if self.growth is None:
            return self._bound().propose(window, shape)
        return dynamic_tree.propose(self._bound(), window, shape, self.growth)

    def _bound(self) -> Autoregressive:
        assert self._procedure is not None, "bind comes first"
        return self._procedure
