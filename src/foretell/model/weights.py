"""Which checkpoint tensors make which parameter: a table, made from the config and a naming scheme.

An entry says what one (fused) parameter is joined from. Loading walks the table; a tensor-parallel rank takes a cut of
each source. Nothing is read here.
"""

from __future__ import annotations

from dataclasses import dataclass

from foretell.model.config import ModelConfig
from foretell.model.shard import Cut, kv_part, part_of
from foretell.ops.group import ALONE, Group, rows_of


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint tensor.

    Args:
        shape: of the whole tensor.
        paired_heads: over 0: so many heads, of what is taken, have their rotary pairs side by side (GGUF's Llama).
        cut: what is taken; None = all of it.
    """

    name: str
    shape: tuple[int, ...]
    paired_heads: int = 0
    cut: Cut | None = None


@dataclass(frozen=True, slots=True)
class Entry:
    """One parameter: its sources joined along `dim`; with `stack` > 0, so many equal groups stacked after that."""

    parameter: str
    sources: tuple[Source, ...]
    dim: int = 0
    stack: int = 0
    plus_one: bool = False  # the checkpoint holds the weight minus one


@dataclass(frozen=True, slots=True)
class Scheme:
    """How a checkpoint names its tensors; names of a layer's parts follow its prefix `layer`."""

    embedding: str
    norm: str
    head: str
    layer: str  # "{}" is the layer's index
    attention_norm: str
    attention_post_norm: str
    mlp_norm: str
    mlp_post_norm: str
    q: str
    k: str
    v: str
    qkv: str
    output: str
    q_norm: str
    k_norm: str
    gate: str
    up: str
    gate_up: str
    down: str
    router: str
    expert_gate: str  # "{}" is the expert's index; without it all experts are in one tensor
    expert_up: str
    expert_down: str
    paired: bool = False  # rotary pairs of q and k lie side by side


def hugging_face(config: ModelConfig, prefix: str = "model.", head: str = "lm_head") -> Scheme:
    """The names transformers gives, below a prefix."""
    sandwich = config.sandwich_norms
    return Scheme(
        embedding=f"{prefix}embed_tokens",
        norm=f"{prefix}norm",
        head=head,
        layer=prefix + "layers.{}.",
        attention_norm="input_layernorm",
        attention_post_norm="post_attention_layernorm",
        mlp_norm="pre_feedforward_layernorm" if sandwich else "post_attention_layernorm",
        mlp_post_norm="post_feedforward_layernorm",
        q="self_attn.q_proj",
        k="self_attn.k_proj",
        v="self_attn.v_proj",
        qkv="self_attn.qkv_proj",
        output="self_attn.o_proj",
        q_norm="self_attn.q_norm",
        k_norm="self_attn.k_norm",
        gate="mlp.gate_proj",
        up="mlp.up_proj",
        gate_up="mlp.gate_up_proj",
        down="mlp.down_proj",
        router="block_sparse_moe.gate",
        expert_gate="block_sparse_moe.experts.{}.w1",
        expert_up="block_sparse_moe.experts.{}.w3",
        expert_down="block_sparse_moe.experts.{}.w2",
    )


def gguf_names(config: ModelConfig) -> Scheme:
    """The names of GGUF files."""
    return Scheme(
        embedding="token_embd",
        norm="output_norm",
        head="output",
        layer="blk.{}.",
        attention_norm="attn_norm",
        attention_post_norm="post_attention_norm",
        mlp_norm="ffn_norm",
        mlp_post_norm="post_ffw_norm",
        q="attn_q",
        k="attn_k",
        v="attn_v",
        qkv="attn_qkv",
        output="attn_output",
        q_norm="attn_q_norm",
        k_norm="attn_k_norm",
        gate="ffn_gate",
        up="ffn_up",
        gate_up="ffn_up",
        down="ffn_down",
        router="ffn_gate_inp",
        expert_gate="ffn_gate_exps",
        expert_up="ffn_up_exps",
        expert_down="ffn_down_exps",
        paired=config.family in ("llama", "mixtral"),
    )


def table(config: ModelConfig, scheme: Scheme, tied: bool, group: Group = ALONE) -> list[Entry]:
    """All parameters of a decoder, or of one rank's part of it, in the order they are best loaded."""
    vocabulary = (config.vocab_size, config.hidden_size)
    rows = rows_of(config.vocab_size, group)
    own = None if group.alone else Cut(0, rows.start, rows.stop)
    entries = [Entry("embedding", (Source(f"{scheme.embedding}.weight", vocabulary, cut=own),))]
    for i in range(config.layers):
        entries += layer_entries(config, scheme, f"layers.{i}.", scheme.layer.format(i), group)
    entries.append(_norm(config, "norm", scheme.norm, config.hidden_size))
    if not tied:
        head = Source(f"{scheme.head}.weight", vocabulary, cut=own)
        entries.append(Entry("head.weight", (head,)))
    return entries


def layer_entries(
    config: ModelConfig, scheme: Scheme, ours: str, theirs: str, group: Group = ALONE
) -> list[Entry]:
    """The parameters of one layer, under our prefix and theirs."""
    hidden = config.hidden_size
    entries = [_norm(config, f"{ours}attention_norm", theirs + scheme.attention_norm, hidden)]
    entries += attention_entries(config, scheme, f"{ours}attention.", theirs, hidden, group)
    entries.append(_norm(config, f"{ours}mlp_norm", theirs + scheme.mlp_norm, hidden))
    if config.experts:
        entries += _expert_entries(config, scheme, f"{ours}mlp.", theirs, group)
    else:
        entries += mlp_entries(config, scheme, f"{ours}mlp.", theirs, group)
    if config.sandwich_norms:
        entries.append(
            _norm(config, f"{ours}attention_post_norm", theirs + scheme.attention_post_norm, hidden)
        )
        entries.append(_norm(config, f"{ours}mlp_post_norm", theirs + scheme.mlp_post_norm, hidden))
    return entries


@dataclass(frozen=True, slots=True)
class _Span:
    """Channels of a projection and, of those, the ones that a rank keeps."""

    whole: int
    start: int
    count: int

    def cut(self, dim: int = 0, before: int = 0) -> Cut | None:
        """The rank's channels along `dim`, which begin `before` entries into the tensor; None = they are all."""
        if self.count == self.whole and before == 0:
            return None
        return Cut(dim, before + self.start, before + self.start + self.count)


def _heads(config: ModelConfig, group: Group) -> tuple[_Span, _Span]:
    """(query channels, key or value channels)."""
    part, dim = part_of(config, group), config.head_dim
    first, count = kv_part(config, group)
    return (
        _Span(config.heads * dim, group.rank * part.heads * dim, part.heads * dim),
        _Span(config.kv_heads * dim, first * dim, count * dim),
    )


def _inner(config: ModelConfig, group: Group) -> _Span:
    """The MLP's channels."""
    count = config.intermediate_size // group.size
    return _Span(config.intermediate_size, group.rank * count, count)


def attention_entries(
    config: ModelConfig, scheme: Scheme, ours: str, theirs: str, inputs: int, group: Group = ALONE
) -> list[Entry]:
    """The parameters of one attention that reads rows of width `inputs`."""
    q, kv = _heads(config, group)
    names, spans = (scheme.q, scheme.k, scheme.v), (q, kv, kv)
    dim = config.head_dim if scheme.paired else 0
    entries = []
    for leaf in ("weight", "bias") if config.qkv_bias else ("weight",):
        rest = (inputs,) if leaf == "weight" else ()
        if config.family == "phi3":
            sources = _fused(f"{theirs}{scheme.qkv}.{leaf}", spans, rest, group)
        else:
            sources = tuple(
                Source(
                    f"{theirs}{name}.{leaf}",
                    (span.whole, *rest),
                    span.count // dim if dim and name != scheme.v else 0,
                    span.cut(),
                )
                for name, span in zip(names, spans, strict=True)
            )
        entries.append(Entry(f"{ours}qkv.{leaf}", sources))
    output = Source(f"{theirs}{scheme.output}.weight", (config.hidden_size, q.whole), cut=q.cut(1))
    entries += _summed(f"{ours}output", output, config.output_bias, group)
    if config.qk_norm:
        entries.append(_norm(config, f"{ours}q_norm", theirs + scheme.q_norm, config.head_dim))
        entries.append(_norm(config, f"{ours}k_norm", theirs + scheme.k_norm, config.head_dim))
    return entries


def mlp_entries(
    config: ModelConfig, scheme: Scheme, ours: str, theirs: str, group: Group = ALONE
) -> list[Entry]:
    """The parameters of one gated MLP."""
    hidden, inner = config.hidden_size, _inner(config, group)
    entries = []
    for leaf in ("weight", "bias") if config.mlp_bias else ("weight",):
        rest = (hidden,) if leaf == "weight" else ()
        if config.family == "phi3":
            sources = _fused(f"{theirs}{scheme.gate_up}.{leaf}", (inner, inner), rest, group)
        else:
            sources = tuple(
                Source(f"{theirs}{name}.{leaf}", (inner.whole, *rest), cut=inner.cut())
                for name in (scheme.gate, scheme.up)
            )
        entries.append(Entry(f"{ours}gate_up.{leaf}", sources))
    down = Source(f"{theirs}{scheme.down}.weight", (hidden, inner.whole), cut=inner.cut(1))
    return entries + _summed(f"{ours}down", down, config.mlp_bias, group)


def _fused(
    name: str, spans: tuple[_Span, ...], rest: tuple[int, ...], group: Group
) -> tuple[Source, ...]:
    """One tensor that holds several projections, one after the other."""
    shape = (sum(span.whole for span in spans), *rest)
    if group.alone:
        return (Source(name, shape),)
    before = [sum(span.whole for span in spans[:i]) for i in range(len(spans))]
    cuts = [span.cut(0, start) for span, start in zip(spans, before, strict=True)]
    return tuple(Source(name, shape, cut=cut) for cut in cuts)


def _expert_entries(
    config: ModelConfig, scheme: Scheme, ours: str, theirs: str, group: Group
) -> list[Entry]:
    hidden, inner, count = config.hidden_size, _inner(config, group), config.experts
    router = Entry(
        f"{ours}router.weight", (Source(f"{theirs}{scheme.router}.weight", (count, hidden)),)
    )
    gate, up, down = (
        f"{theirs}{name}.weight"
        for name in (scheme.expert_gate, scheme.expert_up, scheme.expert_down)
    )
    wide, tall = (inner.whole, hidden), (hidden, inner.whole)
    if "{}" not in scheme.expert_gate:
        both = tuple(Source(name, (count, *wide), cut=inner.cut(1)) for name in (gate, up))
        one = (Source(down, (count, *tall), cut=inner.cut(2)),)
        return [router, Entry(f"{ours}gate_up", both, dim=1), Entry(f"{ours}down", one)]
    pairs = tuple(
        Source(name.format(i), wide, cut=inner.cut()) for i in range(count) for name in (gate, up)
    )
    downs = tuple(Source(down.format(i), tall, cut=inner.cut(1)) for i in range(count))
    return [
        router,
        Entry(f"{ours}gate_up", pairs, stack=count),
        Entry(f"{ours}down", downs, stack=count),
    ]


def _norm(config: ModelConfig, ours: str, theirs: str, size: int) -> Entry:
    return Entry(
        f"{ours}.weight", (Source(f"{theirs}.weight", (size,)),), plus_one=config.norm_plus_one
    )


def _summed(ours: str, weight: Source, bias: bool, group: Group) -> list[Entry]:
    """A product whose parts are summed over the ranks: rank 0 has the bias."""
    entries = [Entry(f"{ours}.weight", (weight,))]
    if bias and group.first:
        name = weight.name.removesuffix("weight") + "bias"
        entries.append(Entry(f"{ours}.bias", (Source(name, weight.shape[:1]),)))
    return entries
