"""Drafters in the formats that other engines load, each read back and compared before it counts as written.

From a folder that our engine loads (EAGLE-3 in speculators' or any raw format, Medusa in its authors' or vLLM's) to
- `speculators`: EAGLE-3 for vLLM;
- `eagle3-sglang`: EAGLE-3 with SafeAILab's and SpecForge's names, layer ids in their sense;
- `medusa`: FasterDecoding's names;
- `vllm-medusa`: vLLM's names, with the target's output layer inside where the heads share it;
- `hugging-face`: a language model (a target in a GGUF file, a distilled draft) for transformers, vLLM and SGLang.
Invariant: what is read back gives the same numbers, parameter for parameter.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foretell.model.decoder import Decoder
from foretell.model.hub import Kind, ModelSource
from foretell.model.load import load_model
from foretell.spec.checkpoint.eagle import EagleReading
from foretell.spec.checkpoint.eagle3 import read_eagle3
from foretell.spec.checkpoint.load import identify
from foretell.spec.checkpoint.medusa import MedusaReading, read_medusa
from foretell.spec.checkpoint.recognise import Family
from foretell.spec.checkpoint.source import Checkpoint, open_checkpoint
from foretell.spec.eagle import Eagle3Net
from foretell.training.model_folder import save_model
from foretell.training.save import DraftCard, save_eagle3, save_medusa, write


class Format(StrEnum):
    """What can be written."""

    SPECULATORS = "speculators"
    EAGLE3_SGLANG = "eagle3-sglang"
    MEDUSA = "medusa"
    VLLM_MEDUSA = "vllm-medusa"
    HUGGING_FACE = "hugging-face"


_FAMILY = {
    Format.SPECULATORS: Family.EAGLE3,
    Format.EAGLE3_SGLANG: Family.EAGLE3,
    Format.MEDUSA: Family.MEDUSA,
    Format.VLLM_MEDUSA: Family.MEDUSA,
    Format.HUGGING_FACE: Family.DRAFT_MODEL,
}


def export(folder: Path, target: Decoder, wanted: Format, out: Path, target_name: str) -> None:
    """Write a drafter in another format, load it back and compare.

    Args:
        target: the model it drafts for, built on dense operations; of a language model (`hugging-face`), itself.
        target_name: what the drafter shall call it.

    Raises:
        ValueError: the drafter is of another family, has a part the format cannot say, or did not come back equal (what
            was written is removed then).
    """
    if out.resolve() == folder.resolve():
        raise ValueError(f"--out {out} is the drafter's own folder; give another")
    identified = identify(folder)
    if identified.family is not _FAMILY[wanted]:
        fitting = [f.value for f in Format if _FAMILY[f] is identified.family]
        raise ValueError(
            f"{folder.name} is a checkpoint of {identified.family.value!r}; format {wanted.value!r} is for "
            f"{_FAMILY[wanted].value!r}. Formats for it: {', '.join(fitting) or 'none'}"
        )
    if identified.family is Family.DRAFT_MODEL:
        _export_model(folder, target, out)
        return
    assert identified.checkpoint is not None, "a folder of tensors"
    if identified.family is Family.EAGLE3:
        _export_eagle3(identified.checkpoint, target, wanted, out, target_name)
    else:
        _export_medusa(identified.checkpoint, target, wanted, out, target_name)


def _export_eagle3(
    checkpoint: Checkpoint, target: Decoder, wanted: Format, out: Path, name: str
) -> None:
    reading = read_eagle3(checkpoint, target)
    net = _plain_eagle3(reading, checkpoint.name)
    card = DraftCard(name, taps=reading.taps, dtype=target.dtype)
    save_eagle3(out, net, reading.vocabulary.noise_ids.long(), card)
    if wanted is Format.EAGLE3_SGLANG:
        _as_sglang(out, net, reading.taps, card)
    back = read_eagle3(open_checkpoint(out), target)
    same = (
        back.taps == reading.taps
        and torch.equal(back.vocabulary.noise_ids, reading.vocabulary.noise_ids)
        and _same(net.named_parameters(), _plain_eagle3(back, out.name).named_parameters())
    )
    _check(same, out)


def _plain_eagle3(reading: EagleReading, name: str) -> Eagle3Net:
    """The network, if the formats can say all of it."""
    net = reading.net
    assert isinstance(net, Eagle3Net)
    unsaid = {
        "layers": len(net.layers) > 0,
        "norm_before_fc": net.concat.norm_before_fc,
        "fc_norm": net.concat.fc_norm,
        "norm_output": net.concat.norm_output,
        "fc without features": not net.concat.fc,
        "an embedding of its own": net.embedding is not None,
        "the target's output layer": net.head is None,
    }
    found = [what for what, has in unsaid.items() if has]
    if found:
        raise ValueError(f"{name} has {found[0]}, which is not exported yet")
    return net


def _as_sglang(folder: Path, net: Eagle3Net, taps: tuple[int, ...], card: DraftCard) -> None:
    """Names and config of SafeAILab and SpecForge in place of speculators'."""
    if net.concat.norm_before_residual:
        raise ValueError("SGLang has no norm_before_residual; such a head cannot be exported to it")
    checkpoint = open_checkpoint(folder)
    tensors = {
        name.replace("layers.0.", "midlayer."): checkpoint.read(name) for name in checkpoint.shapes
    }
    layer: Mapping[str, Any] = checkpoint.config["transformer_layer_config"]
    config = {
        **layer,
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": checkpoint.config["draft_vocab_size"],
        "target_hidden_size": net.concat.target_hidden,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in taps]},
    }
    del config["target_hidden_size"]  # SafeAILab's code takes it to mean an embedding of its own
    write(folder, tensors, config, card.dtype)


def _export_medusa(
    checkpoint: Checkpoint, target: Decoder, wanted: Format, out: Path, name: str
) -> None:
    reading = read_medusa(checkpoint, target)
    card = DraftCard(name, dtype=target.dtype)
    if wanted is Format.MEDUSA:
        if len(reading.vocabulary.noise_ids) != target.config.vocab_size:
            raise ValueError(
                f"{checkpoint.name} has a truncated vocabulary, which format 'medusa' cannot say; use 'vllm-medusa'"
            )
        save_medusa(out, reading.net, card)
    else:
        _as_vllm(out, reading, target, card)
    back = read_medusa(open_checkpoint(out), target)
    noise = torch.randn(4, target.config.hidden_size, generator=torch.Generator().manual_seed(0))
    feature = noise.to(target.device, target.dtype)
    heads = reading.net.heads
    same = (
        _same(
            [("weight", reading.net.weight), ("bias", reading.net.bias)],
            [("weight", back.net.weight), ("bias", back.net.bias)],
        )
        and torch.equal(back.vocabulary.noise_ids, reading.vocabulary.noise_ids)
        and torch.allclose(
            back.net.logits(feature, heads, target).float(),
            reading.net.logits(feature, heads, target).float(),
            rtol=1e-2,
            atol=1e-2,
        )
    )
    _check(same, out)


def _as_vllm(out: Path, reading: MedusaReading, target: Decoder, card: DraftCard) -> None:
    net, size = reading.net, target.config.vocab_size
    heads, layers = net.weight.shape[:2]
    known = len(reading.vocabulary.noise_ids)
    tensors: dict[str, Tensor] = {}
    for i in range(heads):
        for j in range(layers):
            tensors[f"blocks.{i}.layers.{j}.weight"] = net.weight[i, j]
            if net.bias is not None:
                tensors[f"blocks.{i}.layers.{j}.bias"] = net.bias[i, j]
    shared = net.output is None or len(net.output) == 1
    outputs = target.head.weight.unsqueeze(0) if net.output is None else net.output
    for i, output in enumerate(outputs):
        tensors[f"lm_heads.{i}.weight"] = output
    if known < size:
        tensors["token_map"] = reading.vocabulary.noise_ids.long()
    config = {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": target.config.hidden_size,
        "vocab_size": size,
        "truncated_vocab_size": known,
        "num_heads": heads,
        "num_hidden_layers": layers,
        "medusa_fc_bias": net.bias is not None,
        "original_lm_head": shared,
        "logit_scale": net.scale,
    }
    write(out, tensors, config, card.dtype)


def _export_model(path: Path, model: Decoder, out: Path) -> None:
    kind = Kind.DIRECTORY if path.is_dir() else Kind.GGUF
    save_model(out, model, ModelSource(path, kind, path.name), model.dtype)
    dtype = str(model.dtype).removeprefix("torch.")
    back = load_model(ModelSource(out, Kind.DIRECTORY, out.name), dtype=dtype, ops=model.ops)
    _check(_same(model.named_parameters(), back.named_parameters()), out)


def _same(left: Any, right: Any) -> bool:
    """Names, shapes and every bit."""
    ours, theirs = dict(left), dict(right)
    return ours.keys() == theirs.keys() and all(
        (a is None and theirs[name] is None)
        or (a is not None and theirs[name] is not None and torch.equal(a, theirs[name]))
        for name, a in ours.items()
    )


def _check(same: bool, out: Path) -> None:
    if not same:
        shutil.rmtree(out)
        raise ValueError(
            f"what was written to {out} did not come back equal, and is removed; is the drafter stored in another "
            "precision than the target's?"
        )
