"""EngineConfig: every choice that is fixed when an engine is built. Torch-free; importable from anywhere.

Frozen dataclasses, nested: the drafter is `Ngram | Suffix | DraftCheckpoint | Chained`, or None for plain decoding.
speculation.py makes it out of the words that users of vLLM know. It is not about one request (SamplingParams), and it
reads no checkpoint: what a drafter's checkpoint is, and all that depends on the models, is found out and checked where
they are loaded.

Invariant: an instance is valid in itself. Unknown keys raise and name the nearest known one; a feature that does not
exist is refused by name, never ignored.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Literal, Self, get_args

from foretell.sampling_params import MAX_LOGPROBS

BLOCK_SIZE = 16
MAX_NUM_SEQS = 64
MAX_NUM_BATCHED_TOKENS = 2048
MAX_DRAFT_TOKENS = 63  # a tree has at most 64 nodes, the root included

Acceptance = Literal["match", "rejection", "typical"]
Policy = Literal["fcfs", "priority"]
DraftSampling = Literal["probabilistic", "greedy"]
DType = Literal["auto", "float32", "bfloat16", "float16", "float64"]
Method = Literal[
    "draft_model",
    "medusa",
    "eagle",
    "eagle1",
    "eagle2",
    "eagle3",
    "mlp_speculator",
    "mtp",
    "pard",
]
LayerConvention = Literal["after", "output"]
Compat = Literal["off", "shapes", "full"]
SUFFIX_TOKENS = 7  # drafted per step where nothing says how many; a chain fills its tree anyway
TRACE_FILE = "foretell-trace.jsonl"  # what trace=True writes
WITHIN_TARGET: tuple[Method, ...] = ("mtp", "medusa")  # may lie in the target's own checkpoint


@dataclass(frozen=True, slots=True)
class GrownTree:
    """A tree that grows where the drafter is sure (EAGLE-2, arXiv 2406.16858); spec/dynamic_tree.py bounds the numbers.

    Args:
        top_k: children of a node, and nodes of a level that get children.
        depth: levels below the root.
        nodes: the budget, the root included.
    """

    top_k: int = 10
    depth: int = 6
    nodes: int = 60

    def __post_init__(self) -> None:
        for name in ("top_k", "depth", "nodes"):
            _check_positive(f"tree: {name}", getattr(self, name))


# "chain", the name of a published tree, one that grows, parents (root: -1), or rank paths.
TreeSpec = str | GrownTree | tuple[int, ...] | tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ngram:
    """Drafts what followed the last earlier occurrence of the text's own end; needs no weights.

    Args:
        prompt_lookup_min, prompt_lookup_max: shortest and longest end to look up, in tokens.
    """

    num_speculative_tokens: int
    prompt_lookup_min: int = 5
    prompt_lookup_max: int = 5

    def __post_init__(self) -> None:
        _check_draft_tokens(self.num_speculative_tokens)
        low, high = self.prompt_lookup_min, self.prompt_lookup_max
        for name, value in (("prompt_lookup_min", low), ("prompt_lookup_max", high)):
            _require(_is_int(value) and value > 0, f"{name}={value!r} must be > 0")
        _require(low <= high, f"prompt_lookup_min={low} must be <= prompt_lookup_max={high}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Suffix:
    """Drafts what followed the longest earlier context like the text's end, in the text and in past outputs.

    Args:
        max_tree_depth: most tokens of context that are compared.
        max_cached_requests: past outputs that are remembered, the oldest go first; 0 = the request's own text alone.
            Under acceptance other than "match" it is 0.
        max_spec_factor: drafted tokens are at most the tokens of context that agree times this.
        min_token_prob: least share of the places found that must go on as the draft does.
        min_match: fewest tokens of context that must agree.
        corpus_tokens: room for past outputs, in tokens.
    """

    num_speculative_tokens: int = SUFFIX_TOKENS
    max_tree_depth: int = 24
    max_cached_requests: int = 10_000
    max_spec_factor: float = 1.0
    min_token_prob: float = 0.1
    min_match: int = 3
    corpus_tokens: int = 1 << 18

    def __post_init__(self) -> None:
        _check_draft_tokens(self.num_speculative_tokens)
        for name, least in (("max_tree_depth", 1), ("max_cached_requests", 0), ("min_match", 1)):
            value = getattr(self, name)
            _require(
                _is_int(value) and value >= least,
                f"suffix_decoding_{name} must be an integer of at least {least}, got {value!r}",
            )
        _check_positive("suffix_decoding_corpus_tokens", self.corpus_tokens)
        factor, probability = self.max_spec_factor, self.min_token_prob
        _require(
            _is_number(factor) and factor >= 0,
            f"suffix_decoding_max_spec_factor must be >= 0, got {factor!r}",
        )
        _require(
            _is_number(probability) and 0 <= probability <= 1,
            f"suffix_decoding_min_token_prob must be in [0, 1], got {probability!r}",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftCheckpoint:
    """A checkpoint drafts: a smaller language model, or heads and layers trained for the target.

    What it is, it says itself; `method` only makes sure. `num_speculative_tokens` means, for
    - draft models, PARD, MLPSpeculator, MTP and EAGLE: a chain of so many (a chain of 5 to 7 often beats a small tree);
    - Medusa: the published tree of its model, cut to so many levels, one for each head.
    Left out, and without a tree, it is what the checkpoint suggests, else what the originals do: Medusa's published
    tree, EAGLE-2's and 3's grown ones, EAGLE-1's static one (method "eagle1"), one token for each layer of MTP. Draft
    models need it.

    Args:
        model: directory, GGUF file or hub name; None = the target's own checkpoint.
        method: what the checkpoint must be; None = whatever it is.
        tensor_parallel_size: 1 or the target's own; None = the target's.
        max_model_len: requests longer than this are not drafted for; None = the smaller of both models' lengths.
        use_heterogeneous_vocab: for draft models. True = draft through the intersection of the vocabularies; False =
            refuse a draft with another vocabulary; None = look at both and decide.
        sampling: for draft models. "probabilistic" drafts with the request's own noise, "greedy" takes the likeliest
            token; None = "probabilistic".
        target_layers: for EAGLE-3, the target layers it reads, instead of its config's.
        target_layers_convention: for EAGLE-3, what a number in that list (or in the config's) means: "after" = the
            hidden state after so many layers, "output" = the output of the layer with that number, from 0.
        norm_before_residual: for EAGLE-3, instead of its config's.
    """

    model: str | None = None
    method: Method | None = None
    num_speculative_tokens: int | None = None
    revision: str | None = None
    tensor_parallel_size: int | None = None
    max_model_len: int | None = None
    use_heterogeneous_vocab: bool | None = None
    sampling: DraftSampling | None = None
    target_layers: tuple[int, ...] | None = None
    target_layers_convention: LayerConvention | None = None
    norm_before_residual: bool | None = None

    def __post_init__(self) -> None:
        for name, known in (
            ("method", get_args(Method)),
            ("draft_sample_method", get_args(DraftSampling)),
            ("target_layers_convention", get_args(LayerConvention)),
        ):
            value = getattr(self, "sampling" if name == "draft_sample_method" else name)
            if value is not None:
                _check_choice(name, value, known)
        if self.model is not None:
            _check_name("speculative model", self.model)
        elif self.method not in WITHIN_TARGET:
            raise ValueError(
                f"method {self.method!r} needs a model: a directory, a GGUF file or a hub name"
            )
        if self.num_speculative_tokens is not None:
            _check_draft_tokens(self.num_speculative_tokens)
        if self.revision is not None:
            _require(
                isinstance(self.revision, str),
                f"revision must be a branch, a tag or a commit, got {self.revision!r}",
            )
        for name in ("use_heterogeneous_vocab", "norm_before_residual"):
            value = getattr(self, name)
            _require(
                value is None or isinstance(value, bool),
                f"{name} must be True or False, got {value!r}",
            )
        if self.max_model_len is not None:
            _check_positive("max_model_len (of the draft model)", self.max_model_len)
        if self.target_layers is not None:
            object.__setattr__(self, "target_layers", _as_layers(self.target_layers))

    def length_limit(self, draft_max_model_len: int, target_max_model_len: int) -> int:
        """Longest text that is drafted for, once both models are known.

        Raises:
            ValueError: `max_model_len` was given and exceeds the draft's or the target's own.
        """
        if self.max_model_len is None:
            return min(draft_max_model_len, target_max_model_len)
        for name, own in (("draft", draft_max_model_len), ("target", target_max_model_len)):
            _require(
                self.max_model_len <= own,
                f"speculative_max_model_len={self.max_model_len} cannot be larger than {name}_max_model_len={own}",
            )
        return self.max_model_len


@dataclass(frozen=True, slots=True)
class Chained:
    """A model-free drafter where it finds something, a checkpoint elsewhere, which says how much is drafted."""

    first: Ngram | Suffix
    then: DraftCheckpoint

    @property
    def num_speculative_tokens(self) -> int | None:
        """The checkpoint's."""
        return self.then.num_speculative_tokens


Drafter = Ngram | Suffix | DraftCheckpoint | Chained


def checkpoint_of(drafter: Drafter | None) -> DraftCheckpoint | None:
    """The checkpoint that drafts, alone or in a chain, if one does."""
    if isinstance(drafter, Chained):
        return drafter.then
    return drafter if isinstance(drafter, DraftCheckpoint) else None


@dataclass(frozen=True, slots=True)
class Speculation:
    """How an engine speculates.

    Args:
        drafter: None = plain decoding.
        acceptance: "match" (the text is what plain decoding gives), "rejection" (the same distribution), or
            "typical" (LOSSY: the distribution changes).
        tree: parents of the nodes, their rank paths, the name of a published tree, "chain", or how trees grow
            (GrownTree); None = what the drafter does by itself. A tree by name is cut to `num_speculative_tokens`
            levels if they are given.
        adaptive: draft less, or nothing, where that is faster (spec/controller.py); the tree is the most that is
            drafted. False = always that tree. None = adaptive under "match", whose text does not depend on it;
            elsewhere the law does not, but which text a seed gives would.
    """

    drafter: Drafter | None = None
    acceptance: Acceptance = "match"
    tree: TreeSpec | None = None
    adaptive: bool | None = None

    def __post_init__(self) -> None:
        _check_adaptive(self.adaptive)
        _check_choice("acceptance", self.acceptance, get_args(Acceptance))
        if self.tree is None:
            return
        if self.drafter is None:
            raise ValueError(
                "tree was given without a drafter: name a method or a speculative model"
            )
        tree = as_tree(self.tree)
        object.__setattr__(self, "tree", tree)
        k = self.drafter.num_speculative_tokens
        if isinstance(tree, str):
            _require(tree != "chain" or k is not None, "tree='chain' needs num_speculative_tokens")
        elif k is not None:
            drafted = tree_nodes(tree) - 1
            _require(
                drafted == k,
                f"num_speculative_tokens={k} but the tree drafts {drafted} tokens; leave num_speculative_tokens out",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """All that an engine is built from; field names are vLLM's where vLLM has them.

    Args:
        model: directory, GGUF file or hub name; None = the default model.
        tokenizer: where the tokenizer comes from; None = the model.
        dtype: of weights and KV; "auto" = the checkpoint's.
        device: "auto", "cpu", "cuda" or "cuda:N".
        seed: requests without a seed of their own derive one from it.
        max_model_len: longest prompt plus answer, in tokens; None = what the model was made for, as far as it fits.
        max_num_seqs: requests that run at the same time.
        max_num_batched_tokens: tokens per step, which bounds the prefill chunk.
        block_size: tokens per KV block.
        gpu_memory_utilization: share of the device's memory to use.
        kv_cache_memory_bytes: size of the KV pool; None = what is left of the memory.
        scheduling_policy: "fcfs" or "priority" (lower numbers first).
        max_logprobs: most log-probabilities per token a request may ask for; -1 = the whole vocabulary.
        enforce_eager: no CUDA graphs.
        deterministic: sums in an order that does not depend on the batch, so that a text has the same bits with and
            without drafts and whatever runs beside it (on a GPU, ops/triton/fixed.py says where not); slower.
        drafter, acceptance, tree, adaptive: see Speculation.
        compat: how a drafter is proved at the start: "off", "shapes" (what can be compared), or "full" (it also drafts
            for a few built-in prompts).
        trace: file for what every step drafted and accepted, as JSON lines; True = foretell-trace.jsonl.
    """

    model: str | None = None
    tokenizer: str | None = None
    revision: str | None = None
    dtype: DType = "auto"
    device: str = "auto"
    seed: int = 0
    max_model_len: int | None = None
    max_num_seqs: int = MAX_NUM_SEQS
    max_num_batched_tokens: int = MAX_NUM_BATCHED_TOKENS
    block_size: int = BLOCK_SIZE
    gpu_memory_utilization: float = 0.9
    kv_cache_memory_bytes: int | None = None
    enable_prefix_caching: bool = True
    tensor_parallel_size: int = 1
    scheduling_policy: Policy = "fcfs"
    max_logprobs: int = MAX_LOGPROBS
    enforce_eager: bool = False
    deterministic: bool = False
    drafter: Drafter | None = None
    acceptance: Acceptance = "match"
    tree: TreeSpec | None = None
    adaptive: bool | None = None
    compat: Compat = "full"
    trace: str | bool | None = None

    def __post_init__(self) -> None:
        for name in ("model", "tokenizer", "revision"):
            if getattr(self, name) is not None:
                _check_name(name, getattr(self, name))
        _check_choice("dtype", self.dtype, get_args(DType))
        _check_choice("scheduling_policy", self.scheduling_policy, get_args(Policy))
        _check_choice("compat", self.compat, get_args(Compat))
        self._check_trace()
        self._check_numbers()
        self._check_device()
        self._check_draft()

    @property
    def speculation(self) -> Speculation:
        """Drafter, acceptance rule and tree together."""
        return Speculation(self.drafter, self.acceptance, self.tree, self.adaptive)

    @property
    def adapts(self) -> bool:
        """A controller picks what is drafted."""
        return self.acceptance == "match" if self.adaptive is None else self.adaptive

    @classmethod
    def from_mapping(cls, values: Mapping[str, object]) -> Self:
        """From keyword arguments whose names are not yet known to be right.

        Raises:
            ValueError: a key is unknown; the message names the nearest known one.
        """
        refuse_unknown("EngineConfig", values, [f.name for f in fields(cls)])
        return cls(**values)  # type: ignore[arg-type]  # __post_init__ checks every value

    def _check_numbers(self) -> None:
        _require(_is_int(self.seed), f"seed must be an integer, got {self.seed!r}")
        for name in (
            "max_num_seqs",
            "max_num_batched_tokens",
            "block_size",
            "tensor_parallel_size",
        ):
            _check_positive(name, getattr(self, name))
        for name in ("max_model_len", "kv_cache_memory_bytes"):
            if getattr(self, name) is not None:
                _check_positive(name, getattr(self, name))
        size = self.block_size
        _require(size & (size - 1) == 0, f"block_size must be a power of two, got {size}")
        share = self.gpu_memory_utilization
        _require(
            isinstance(share, int | float) and math.isfinite(share) and 0.0 < share <= 1.0,
            f"gpu_memory_utilization must be in (0, 1], got {share!r}",
        )
        for name in ("enable_prefix_caching", "enforce_eager", "deterministic"):
            value = getattr(self, name)
            _require(isinstance(value, bool), f"{name} must be True or False, got {value!r}")
        top = self.max_logprobs
        _require(_is_int(top) and top >= -1, f"max_logprobs must be at least -1, got {top!r}")

    def _check_trace(self) -> None:
        trace = self.trace
        if isinstance(trace, bool):
            object.__setattr__(self, "trace", TRACE_FILE if trace else None)
        elif trace is not None:
            _require(
                isinstance(trace, str) and bool(trace.strip()),
                f"trace must be True, False or the name of a file, got {trace!r}",
            )

    def _check_device(self) -> None:
        device = self.device
        kind, _, index = device.partition(":") if isinstance(device, str) else ("", "", "")
        _require(
            (kind in ("auto", "cpu") and not index)
            or (kind == "cuda" and (not index or index.isdecimal())),
            f"device must be 'auto', 'cpu', 'cuda' or 'cuda:N', got {device!r}",
        )

    def _check_draft(self) -> None:
        object.__setattr__(self, "tree", self.speculation.tree)
        draft = checkpoint_of(self.drafter)
        if draft is None:
            return
        size = draft.tensor_parallel_size
        _require(
            size in (None, 1, self.tensor_parallel_size),
            f"speculative_draft_tensor_parallel_size={size} cannot be other than 1 or target model "
            f"tensor_parallel_size={self.tensor_parallel_size}",
        )
        if draft.max_model_len is not None and self.max_model_len is not None:
            draft.length_limit(draft.max_model_len, self.max_model_len)


def tree_nodes(tree: GrownTree | tuple[int, ...] | tuple[tuple[int, ...], ...]) -> int:
    """N of a tree given as parents, as paths or by how it grows, the root included."""
    if isinstance(tree, GrownTree):
        return tree.nodes
    return len(tree) if _is_int(tree[0]) else len(tree) + 1


def refuse_unknown(owner: str, given: Iterable[str], known: Sequence[str]) -> None:
    """Raise for the first key that is not known.

    Raises:
        ValueError: names the key, its owner and the nearest known key.
    """
    for name in given:
        if name in known:
            continue
        near = get_close_matches(str(name), known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(known))}"
        raise ValueError(f"{owner} has no key {name!r}; {hint}")


def as_tree(tree: object) -> TreeSpec:
    """A tree as users write it, in the form that is kept.

    Raises:
        ValueError: it is none of the forms.
    """
    if isinstance(tree, GrownTree) or (isinstance(tree, str) and tree.strip()):
        return tree
    if isinstance(tree, Mapping):
        refuse_unknown("tree", tree, [f.name for f in fields(GrownTree)])
        return GrownTree(**tree)
    if isinstance(tree, str | bytes) or not isinstance(tree, Sequence) or not tree:
        raise ValueError(
            "tree must be a list of parents or of paths, the name of a published tree, 'chain', or "
            f'{{"top_k": ..., "depth": ..., "nodes": ...}}, got {tree!r}'
        )
    if all(_is_int(parent) for parent in tree):
        return tuple(tree)
    return tuple(_as_path(path) for path in tree)


def _as_path(path: object) -> tuple[int, ...]:
    if isinstance(path, list | tuple) and path and all(_is_int(rank) for rank in path):
        return tuple(path)
    raise ValueError(
        f"tree must be a list of parents like [-1, 0, 0] or of paths like [[0], [1], [0, 0]], got {path!r}"
    )


def _as_layers(layers: object) -> tuple[int, ...]:
    if isinstance(layers, list | tuple) and layers and all(_is_int(j) for j in layers):
        return tuple(layers)
    raise ValueError(
        f"target_layers must be a list of layer numbers like [2, 16, 29], got {layers!r}"
    )


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _check_adaptive(value: object) -> None:
    _require(
        value is None or isinstance(value, bool),
        f"adaptive must be True, False or None, got {value!r}",
    )


def _check_positive(name: str, value: object) -> None:
    _require(
        isinstance(value, int) and _is_int(value) and value > 0,
        f"{name} must be a positive integer, got {value!r}",
    )


def _check_name(name: str, value: object) -> None:
    _require(
        isinstance(value, str) and bool(value.strip()),
        f"{name} must be a directory, a GGUF file or a hub name, got {value!r}",
    )


def _check_choice(name: str, value: object, known: Sequence[str]) -> None:
    _require(value in known, f"{name} must be one of {', '.join(map(repr, known))}, got {value!r}")


def _check_draft_tokens(count: object) -> None:
    if not isinstance(count, int) or isinstance(count, bool):
        raise ValueError(f"num_speculative_tokens must be an integer, got {count!r}")
    _require(count > 0, f"Expected num_speculative_tokens to be greater than zero ({count}).")
    _require(
        count <= MAX_DRAFT_TOKENS,
        f"num_speculative_tokens must be at most {MAX_DRAFT_TOKENS}, got {count}",
    )
