"""Planning: a memory plan from configs alone, for a device that need not be there. Reads no weights.

Sizes of a decoder are those of the engine's own modules, built without memory. A drafter that lies here is measured by
the shapes in its files; of one that does not, only its config.json is fetched and its size follows from that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from foretell.config import DraftCheckpoint, EngineConfig, Suffix, checkpoint_of
from foretell.model.config import ModelConfig
from foretell.model.decoder import Decoder
from foretell.model.hub import DEFAULT_MODEL, Kind, ModelSource, config_folder, resolve
from foretell.model.load import load_config, read_json, resolve_dtype
from foretell.ops.table import REFERENCE
from foretell.runner.build import GRAPHS, LARGEST_CPU_POOL
from foretell.runner.memory import device_bytes, weights_bytes
from foretell.runner.memory_plan import (
    GIB,
    HIGHEST_UTILIZATION,
    MIB,
    MemoryPlan,
    Model,
    Part,
    Shape,
    make_plan,
)
from foretell.spec.checkpoint.load import identify
from foretell.spec.checkpoint.recognise import Family
from foretell.spec.drafter import KVSpec
from foretell.spec.dynamic_tree import EAGLE2, EAGLE3, Growth
from foretell.spec.presets import cut, medusa_preset, preset
from foretell.spec.tree import Tree, chain
from foretell.spec.tree_spec import read_tree

# Of the driver, the CUDA context and the libraries' own workspaces, before anything of ours.
CUDA_RUNTIME = 700 * MIB
# Of a process on a CPU: Python, torch and transformers with their code, measured on Linux with torch 2.13 (resident).
CPU_RUNTIME = 357 * MIB
TOKENIZER = 1000  # bytes for each token of a vocabulary, likewise
LOADING = 1.0  # of the largest matrix: its plain copy, while the last one is packed


@dataclass(frozen=True, slots=True)
class Device:
    """Where the engine would run.

    Args:
        gpu: it is a GPU; else a host.
        total: its bytes.
    """

    gpu: bool
    total: int


@dataclass(frozen=True, slots=True)
class Drafting:
    """A drafter's sizes, and what it drafts."""

    model: Model | None
    tree: Tree
    scratch: int = 0
    taps: int = 0  # target features it reads, in hidden states
    draws: bool = False


def plan_memory(config: EngineConfig, device: Device | None = None) -> MemoryPlan:
    """What an engine of this configuration would take.

    Args:
        device: None = this machine.

    Raises:
        ValueError: a model's config cannot be found or read.
    """
    device = device or this_device(config.device)
    source = find_config(config.model, config.revision)
    model = load_config(source)
    place = torch.device("cuda" if device.gpu else "cpu")
    dtype = resolve_dtype(config.dtype, model.dtype, place)
    target = decoder_model(Path(source.name).name, model, dtype, device.gpu)
    drafting = _drafting(config, model, dtype, device.gpu)
    shape = Shape(
        hidden=model.hidden_size,
        inner=model.intermediate_size,
        vocabulary=model.vocab_size,
        itemsize=dtype.itemsize,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        block_size=config.block_size,
        nodes=drafting.tree.nodes,
        depth=drafting.tree.depth,
        scratch=drafting.scratch,
        features=drafting.taps * model.hidden_size,
        laws=drafting.draws and config.acceptance == "rejection",
        graphs=GRAPHS if device.gpu and not config.enforce_eager else 0,
    )
    ranks = config.tensor_parallel_size
    return make_plan(
        _shared(target, ranks),
        None if drafting.model is None else _shared(drafting.model, ranks),
        shape,
        total=device.total,
        utilization=config.gpu_memory_utilization,
        asked=config.max_model_len,
        most=model.max_position,
        taken=_runtime(device, model, drafting, dtype),
        kv_bytes=config.kv_cache_memory_bytes,
        largest_pool=None if device.gpu else LARGEST_CPU_POOL,
    )


def refuse_too_large(config: EngineConfig, device: Device | None = None) -> None:
    """Stop before anything is read or downloaded where the weights alone are more than the memory.

    What fits only just is left to the engine, which knows more once it has loaded.

    Raises:
        ValueError: they are; the message has the figures, and what helps.
    """
    try:
        plan = plan_memory(config, device)
    except ValueError:
        return  # the load says what is wrong with a config, in words of its own
    drafter = 0 if plan.drafter is None else plan.drafter.bytes
    share = 1.0 if config.kv_cache_memory_bytes is not None else plan.utilization
    weights, room = plan.target.bytes + drafter, int(share * plan.total)
    if weights <= room:
        return
    cures = []
    if share < HIGHEST_UTILIZATION and weights <= HIGHEST_UTILIZATION * plan.total:
        cures.append(f"raise gpu_memory_utilization to {HIGHEST_UTILIZATION:g}")
    if plan.shape.itemsize > 2:
        cures.append(f"dtype='bfloat16' ({weights * 2 // plan.shape.itemsize / MIB:,.0f} MiB)")
    if drafter:
        cures.append(f"draft without weights, as ngram does ({plan.target.bytes / MIB:,.0f} MiB)")
    cures.append("a smaller model, or a device with more memory")
    with_drafter = f" and those of its drafter {drafter / MIB:,.0f} MiB" if drafter else ""
    raise ValueError(
        f"model {plan.target.name!r} does not fit in memory: its weights take {plan.target.bytes / MIB:,.0f} MiB"
        f"{with_drafter}, and {room / MIB:,.0f} MiB may be used ({share:g} of the {plan.total / MIB:,.0f} MiB that "
        f"there are). Nothing was read. What helps, the cheapest first: {'; '.join(cures)}"
    )


def _runtime(
    device: Device, model: ModelConfig, drafting: Drafting, dtype: torch.dtype
) -> list[Part]:
    """What is taken before and while weights are read."""
    if device.gpu:
        return [Part("runtime", CUDA_RUNTIME, "driver, context and libraries")]
    second = drafting.model is not None and drafting.model.heads == 0
    matrix = model.vocab_size * model.hidden_size * dtype.itemsize
    return [
        Part("process", CPU_RUNTIME, "Python, torch and transformers"),
        Part("tokenizer", (1 + second) * TOKENIZER * model.vocab_size, "vocabulary and merges"),
        Part("loading", int(LOADING * matrix), "a plain copy of the largest matrix, for a moment"),
    ]


def this_device(name: str) -> Device:
    """The device that `device=name` means here."""
    gpu = name.startswith("cuda") or (name == "auto" and torch.cuda.is_available())
    if gpu and not torch.cuda.is_available():
        raise ValueError("no CUDA device is visible; say how large it is with --gpu-memory")
    place = torch.device("cuda" if gpu else "cpu")
    return Device(gpu, device_bytes(place)[0])


def find_config(model: str | None, revision: str | None) -> ModelSource:
    """Where a model's config lies; of a hub model nothing else is fetched.

    Raises:
        ValueError: there is none.
    """
    if model is None or model.lower() == DEFAULT_MODEL or Path(model).expanduser().exists():
        return resolve(model, revision)
    folder = config_folder(model, revision)
    if folder is None:
        raise ValueError(
            f"model {model!r} is neither a local path nor a hub model whose config.json can be fetched"
        )
    return ModelSource(folder, Kind.DIRECTORY, model)


def decoder_model(name: str, config: ModelConfig, dtype: torch.dtype, gpu: bool) -> Model:
    """Sizes of a decoder, by the engine's own modules: all layers are like the first, so two are built."""
    one, two = (_bytes(config, layers, dtype) for layers in (1, 2))
    total = one + (config.layers - 1) * (two - one)
    if config.tied and (gpu or not _repacks(dtype)):
        total -= config.vocab_size * config.hidden_size * dtype.itemsize
    kv = KVSpec(config.layers, config.kv_heads, config.head_dim)
    return Model(name, total, kv, dtype.itemsize)


def _bytes(config: ModelConfig, layers: int, dtype: torch.dtype) -> int:
    cut_down = replace(
        config,
        layers=layers,
        windows=(config.windows * layers)[:layers],
        layer_ropes=(config.layer_ropes * layers)[:layers],
    )
    return weights_bytes(Decoder(cut_down, dtype, torch.device("meta"), REFERENCE))


def _repacks(dtype: torch.dtype) -> bool:
    """On a CPU with units for it a tied head is a packed copy of the embedding."""
    return REFERENCE.repacks(torch.empty(1, 1, dtype=dtype))


def _shared(model: Model, ranks: int) -> Model:
    """One rank's part of a model that is spread over several devices."""
    if ranks == 1:
        return model
    kv = model.kv
    if kv is not None:
        kv = KVSpec(kv.layers, -(-kv.heads // ranks), kv.head_dim)
    return Model(model.name, -(-model.bytes // ranks), kv, model.itemsize, model.heads // ranks)


def _drafting(config: EngineConfig, target: ModelConfig, dtype: torch.dtype, gpu: bool) -> Drafting:
    drafter = config.drafter
    draft = checkpoint_of(drafter)
    if drafter is None:
        return Drafting(None, chain(0))
    if draft is None:
        return Drafting(None, _tree(config, chain(drafter.num_speculative_tokens or 1)))
    name = draft.model or config.model
    source = find_config(name, draft.revision)
    family, settings = _family(draft, source)
    if family in (Family.DRAFT_MODEL, Family.PARD):
        model = decoder_model(Path(source.name).name, load_config(source), dtype, gpu)
        return Drafting(model, _tree(config, chain(draft.num_speculative_tokens or 5)), draws=True)
    heads = _heads(family, settings, target, dtype, Path(source.name).name)
    return _trained(config, family, heads, settings, source.name)


def _family(draft: DraftCheckpoint, source: ModelSource) -> tuple[Family, Mapping[str, Any]]:
    """What a drafter's config, and where they are here its tensors, say that it is."""
    if source.kind is Kind.GGUF:
        return Family.DRAFT_MODEL, {}
    path = source.path / "config.json"
    settings = read_json(path) if path.is_file() else {}
    if any(source.path.glob("*.safetensors")) or any(source.path.glob("*.bin")):
        return identify(source.path, draft.method, source.name).family, settings
    named = " ".join(str(a) for a in settings.get("architectures") or ()).lower()
    kind = str(settings.get("model_type") or settings.get("speculators_model_type") or "").lower()
    for word, family in (
        ("eagle3", Family.EAGLE3),
        ("eagle", Family.EAGLE),
        ("medusa", Family.MEDUSA),
        ("mlpspeculator", Family.MLP_SPECULATOR),
        ("mlp_speculator", Family.MLP_SPECULATOR),
        ("mtp", Family.MTP),
    ):
        if word in named or word in kind or (draft.method or "").startswith(word):
            return family, settings
    if "medusa_num_heads" in settings:
        return Family.MEDUSA, settings
    return Family.DRAFT_MODEL, settings


def _heads(
    family: Family,
    settings: Mapping[str, Any],
    target: ModelConfig,
    dtype: torch.dtype,
    name: str,
) -> Model:
    """Sizes of heads and layers that were trained for the target, from their config."""
    item, hidden, vocabulary = dtype.itemsize, target.hidden_size, target.vocab_size
    if family is Family.MEDUSA:
        count = int(settings.get("medusa_num_heads", 5))
        layers = int(settings.get("medusa_num_layers", 1))
        outputs = count * hidden * vocabulary * item
        return Model(
            name, outputs + count * layers * (hidden + 1) * hidden * item, None, item, outputs
        )
    if family is Family.MLP_SPECULATOR:
        inner = int(settings.get("inner_dim") or hidden)
        count = int(settings.get("n_predict", 3))
        own = 1 if settings.get("tie_weights") else count
        outputs = own * inner * vocabulary * item
        states = (hidden + (count - 1) * inner) * inner * item
        return Model(name, 2 * outputs + states, None, item, outputs)
    layer = _layer(settings, target)
    inputs = 3 * int(settings.get("target_hidden_size") or hidden)
    wide = layer.hidden_size
    fused = (inputs if family is Family.EAGLE3 else 2 * wide) * wide * item
    extra = wide * (layer.heads + 2 * layer.kv_heads) * layer.head_dim * item
    if family is not Family.EAGLE3:
        extra = 0
    body = _bytes(layer, 1, dtype) - 2 * layer.vocab_size * wide * item
    more = (layer.layers - 1) * (_bytes(layer, 2, dtype) - _bytes(layer, 1, dtype))
    reduced = int(settings.get("draft_vocab_size") or 0)
    outputs = reduced * wide * item
    kv = KVSpec(layer.layers, layer.kv_heads, layer.head_dim)
    return Model(name, body + more + fused + extra + outputs, kv, item, outputs)


def _layer(settings: Mapping[str, Any], target: ModelConfig) -> ModelConfig:
    """A drafter's layer: by its config where that says it, else like the target's."""
    inner = settings.get("transformer_layer_config") or settings
    hidden = int(inner.get("hidden_size") or target.hidden_size)
    heads = int(inner.get("num_attention_heads") or target.heads)
    layers = int(inner.get("num_hidden_layers") or 1)
    return ModelConfig(
        vocab_size=8,  # embedding and head are counted apart
        hidden_size=hidden,
        intermediate_size=int(inner.get("intermediate_size") or target.intermediate_size),
        layers=layers,
        heads=heads,
        kv_heads=int(inner.get("num_key_value_heads") or heads),
        head_dim=int(inner.get("head_dim") or hidden // heads),
    )


def _trained(
    config: EngineConfig, family: Family, model: Model, settings: Mapping[str, Any], name: str
) -> Drafting:
    draft = checkpoint_of(config.drafter)
    tokens = None if draft is None else draft.num_speculative_tokens
    features = 3 if family is Family.EAGLE3 else 1
    grown: Growth | None = None
    if family is Family.MEDUSA:
        base = str(settings.get("base_model_name_or_path") or name)
        tree = preset(medusa_preset(base))
        tree = cut(tree, min(tokens or 5, int(settings.get("medusa_num_heads", 5))))
    elif tokens is not None:
        tree = chain(tokens)
    elif family in (Family.EAGLE, Family.EAGLE3):
        grown = EAGLE3 if family is Family.EAGLE3 else EAGLE2
        tree = grown.bound
    else:
        tree = chain(int(settings.get("n_predict") or 1))
    return Drafting(
        model, _tree(config, tree), 0 if grown is None else grown.scratch, features, draws=True
    )


def _tree(config: EngineConfig, otherwise: Tree) -> Tree:
    if config.tree is None:
        return otherwise
    drafter = config.drafter
    tokens = None if drafter is None else drafter.num_speculative_tokens
    tree = read_tree(config.tree, tokens if not isinstance(drafter, Suffix) else None)
    return tree.bound if isinstance(tree, Growth) else tree


def read_bytes(text: str) -> int:
    """Bytes of "80GiB", "24 GB", "16G" (binary) or a number of bytes.

    Raises:
        ValueError: it is none of these.
    """
    units = {"": 1, "b": 1, "m": MIB, "mib": MIB, "mb": 10**6, "g": GIB, "gib": GIB, "gb": 10**9}
    number = text.strip().lower().rstrip("bgim ")
    unit = text.strip().lower()[len(number) :].strip()
    try:
        return int(float(number) * units[unit])
    except (ValueError, KeyError):
        raise ValueError(
            f"{text!r} is no amount of memory; write it like 80GiB, 24GB or 8192MiB"
        ) from None
