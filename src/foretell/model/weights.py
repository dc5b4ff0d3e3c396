"""Which checkpoint tensors make which parameter: a table, made from the config and a naming scheme.

An entry says what one (fused) parameter is joined from. Loading walks the table; what a tensor-parallel rank would
take is a slice of each source. Nothing is read here.
"""

from __future__ import annotations

from dataclasses import dataclass

from foretell.model.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint tensor."""

    name: str
    shape: tuple[int, ...]
    paired_heads: int = (
        0  # over 0: so many heads have their rotary pairs side by side (GGUF's Llama)
    )


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


def table(config: ModelConfig, scheme: Scheme, tied: bool) -> list[Entry]:
    """All parameters of a decoder, in the order they are best loaded."""
    vocabulary = (config.vocab_size, config.hidden_size)
    entries = [Entry("embedding", (Source(f"{scheme.embedding}.weight", vocabulary),))]
    for i in range(config.layers):
        entries += layer_entries(config, scheme, f"layers.{i}.", scheme.layer.format(i))
    entries.append(_norm(config, "norm", scheme.norm, config.hidden_size))
    if not tied:
        entries.append(Entry("head.weight", (Source(f"{scheme.head}.weight", vocabulary),)))
    return entries


def layer_entries(config: ModelConfig, scheme: Scheme, ours: str, theirs: str) -> list[Entry]:
    """The parameters of one layer, under our prefix and theirs."""
    hidden = config.hidden_size
    entries = [_norm(config, f"{ours}attention_norm", theirs + scheme.attention_norm, hidden)]
    entries += attention_entries(config, scheme, f"{ours}attention.", theirs, hidden)
    entries.append(_norm(config, f"{ours}mlp_norm", theirs + scheme.mlp_norm, hidden))
    if config.experts:
        entries += _expert_entries(config, scheme, f"{ours}mlp.", theirs)
    else:
        entries += mlp_entries(config, scheme, f"{ours}mlp.", theirs)
    if config.sandwich_norms:
        entries.append(
            _norm(config, f"{ours}attention_post_norm", theirs + scheme.attention_post_norm, hidden)
        )
        entries.append(_norm(config, f"{ours}mlp_post_norm", theirs + scheme.mlp_post_norm, hidden))
    return entries


def attention_entries(
    config: ModelConfig, scheme: Scheme, ours: str, theirs: str, inputs: int
) -> list[Entry]:
    """The parameters of one attention that reads rows of width `inputs`."""
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    paired = (config.heads, config.kv_heads, 0) if scheme.paired else (0, 0, 0)
    parts = tuple(zip((scheme.q, scheme.k, scheme.v), (q, kv, kv), paired, strict=True))
    entries = []
    for leaf in ("weight", "bias") if config.qkv_bias else ("weight",):
        rest = (inputs,) if leaf == "weight" else ()
        if config.family == "phi3":
            sources: tuple[Source, ...] = (
                Source(f"{theirs}{scheme.qkv}.{leaf}", (q + 2 * kv, *rest)),
            )
        else:
            sources = tuple(
                Source(f"{theirs}{name}.{leaf}", (size, *rest), paired_heads=heads)
                for name, size, heads in parts
            )
        entries.append(Entry(f"{ours}qkv.{leaf}", sources))
    entries += _plain(
        f"{ours}output", theirs + scheme.output, (config.hidden_size, q), config.output_bias
    )
    if config.qk_norm:
        entries.append(_norm(config, f"{ours}q_norm", theirs + scheme.q_norm, config.head_dim))
        entries.append(_norm(config, f"{ours}k_norm", theirs + scheme.k_norm, config.head_dim))
    return entries


def mlp_entries(config: ModelConfig, scheme: Scheme, ours: str, theirs: str) -> list[Entry]:
    """The parameters of one gated MLP."""
    hidden, inner = config.hidden_size, config.intermediate_size
    entries = []
    for leaf in ("weight", "bias") if config.mlp_bias else ("weight",):
        rest = (hidden,) if leaf == "weight" else ()
        if config.family == "phi3":
            sources: tuple[Source, ...] = (
                Source(f"{theirs}{scheme.gate_up}.{leaf}", (2 * inner, *rest)),
            )
        else:
            names = (scheme.gate, scheme.up)
            sources = tuple(Source(f"{theirs}{name}.{leaf}", (inner, *rest)) for name in names)
        entries.append(Entry(f"{ours}gate_up.{leaf}", sources))
    entries += _plain(f"{ours}down", theirs + scheme.down, (hidden, inner), config.mlp_bias)
    return entries


def _expert_entries(config: ModelConfig, scheme: Scheme, ours: str, theirs: str) -> list[Entry]:
    hidden, inner, count = config.hidden_size, config.intermediate_size, config.experts
    router = Entry(
        f"{ours}router.weight", (Source(f"{theirs}{scheme.router}.weight", (count, hidden)),)
    )
    gate, up, down = (
        f"{theirs}{name}.weight"
        for name in (scheme.expert_gate, scheme.expert_up, scheme.expert_down)
    )
    if "{}" not in scheme.expert_gate:
        both = (Source(gate, (count, inner, hidden)), Source(up, (count, inner, hidden)))
        one = (Source(down, (count, hidden, inner)),)
        return [router, Entry(f"{ours}gate_up", both, dim=1), Entry(f"{ours}down", one)]
    pairs = tuple(
        Source(name.format(i), (inner, hidden)) for i in range(count) for name in (gate, up)
    )
    downs = tuple(Source(down.format(i), (hidden, inner)) for i in range(count))
    return [
        router,
        Entry(f"{ours}gate_up", pairs, stack=count),
        Entry(f"{ours}down", downs, stack=count),
    ]


def _norm(config: ModelConfig, ours: str, theirs: str, size: int) -> Entry:
    return Entry(
        f"{ours}.weight", (Source(f"{theirs}.weight", (size,)),), plus_one=config.norm_plus_one
    )


def _plain(ours: str, theirs: str, shape: tuple[int, int], bias: bool) -> list[Entry]:
    entries = [Entry(f"{ours}.weight", (Source(f"{theirs}.weight", shape),))]
    if bias:
        entries.append(Entry(f"{ours}.bias", (Source(f"{theirs}.bias", shape[:1]),)))
    return entries
