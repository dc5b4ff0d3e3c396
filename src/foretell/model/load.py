"""From a checkpoint to a Decoder: read, convert, join, pack, one parameter at a time.

Checkpoints are a directory of safetensors (or, as a second choice, PyTorch files) with a config.json, or one GGUF file.
Invariant: every tensor the model needs is there with the right shape, and every tensor that is there is needed or known
to be harmless; otherwise nothing is loaded and the tensors are named.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from foretell.model.config import ModelConfig
from foretell.model.decoder import Decoder
from foretell.model.gguf import GgufFile, config_of
from foretell.model.hub import Kind, ModelSource
from foretell.model.layers import fill
from foretell.model.shard import Cut
from foretell.model.weights import Entry, Scheme, gguf_names, hugging_face, table
from foretell.ops.group import ALONE, Group
from foretell.ops.reference.linear import has_bfloat16_units
from foretell.ops.table import OpTable, table_for

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
_FLOATS = (*DTYPES.values(),)

# Tensors that checkpoints carry and that a text decoder does not read.
_HARMLESS = re.compile(
    r"rotary_emb\.inv_freq$|\.attention\.masked_bias$|^medusa_head\.|^mtp\.|^model\.mtp_layers\.|"
    r"^(model\.)?vision_tower\.|"
    r"^(model\.)?multi_modal_projector\.|^rope_freqs\.weight$|^rope_factors_(long|short)\.weight$"
)


class Reader(Protocol):
    """Where tensors come from."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor, by name."""
        ...

    def read(self, name: str, dtype: torch.dtype, cut: Cut | None = None) -> Tensor:
        """One tensor, or a part of it."""
        ...


def load_model(
    source: ModelSource,
    dtype: str = "auto",
    device: torch.device | str = "cpu",
    ops: OpTable | None = None,
    max_model_len: int | None = None,
    group: Group = ALONE,
) -> Decoder:
    """Load a model.

    Args:
        source: from `hub.resolve`.
        dtype: "auto", "float32", "bfloat16", "float16" or "float64". "auto" is the checkpoint's own 16-bit type
            (bfloat16 where it has none), and on a CPU bfloat16 if it has units for it, else float32.
        ops: the operations to build on; None = those of the device.
        max_model_len: longest request to serve, if known (see `ModelConfig.from_hf`).
        group: the ranks that it is split over; each loads its own part.

    Raises:
        ValueError: the checkpoint cannot be used; the message names the file, the field or the tensors.
    """
    device = torch.device(device)
    config = load_config(source, max_model_len)
    resolved = resolve_dtype(dtype, config.dtype, device)
    reader = open_reader(source)
    shapes = reader.shapes()
    scheme = _scheme(source, config, shapes)
    tied = config.tied and f"{scheme.head}.weight" not in shapes
    check(str(source.path), table(config, scheme, tied), shapes)
    model = Decoder(config, resolved, device, ops or table_for(device), group)
    entries = table(config, scheme, tied, group)
    fill_from(model, entries, reader)
    if tied:
        model.tie()
    return model.eval()


def load_config(source: ModelSource, max_model_len: int | None = None) -> ModelConfig:
    """The config of a model, end tokens of its generation config included.

    Raises:
        ValueError: it is missing, damaged or not supported.
    """
    if source.kind is Kind.GGUF:
        return config_of(GgufFile(source.path), max_model_len)
    config = read_json(source.path / "config.json")
    _check_architecture(config)
    generation = source.path / "generation_config.json"
    ends = _from_hf(config, max_model_len, source.path / "config.json")
    if not generation.exists():
        return ends
    more = {**config, "eos_token_id": read_json(generation).get("eos_token_id")}
    text = more.get("text_config")
    if isinstance(text, dict):
        more["text_config"] = {**text, "eos_token_id": more["eos_token_id"]}
    other = _from_hf(more, max_model_len, generation)
    return ends.with_eos((*ends.eos_token_ids, *other.eos_token_ids))


def _from_hf(config: dict[str, Any], max_model_len: int | None, path: Path) -> ModelConfig:
    try:
        return ModelConfig.from_hf(config, max_model_len)
    except (ValueError, TypeError, AttributeError, ArithmeticError) as error:
        raise ValueError(f"{path}: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object in a file.

    Raises:
        ValueError: no such file, not JSON, or not an object.
    """
    if not path.is_file():
        raise ValueError(f"{path.parent}: there is no {path.name}; is it a model's directory?")
    try:
        value = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: must hold a JSON object")
    return value


def resolve_dtype(name: str, stored: str | None, device: torch.device) -> torch.dtype:
    """The dtype to compute in.

    Args:
        name: "auto" or a name of `DTYPES`.
        stored: what the checkpoint says it is stored in.

    Raises:
        ValueError: an unknown name.
    """
    if name in DTYPES:
        return DTYPES[name]
    if name != "auto":
        raise ValueError(f"dtype must be auto, {', '.join(DTYPES)}, got {name!r}")
    if device.type == "cpu":
        return torch.bfloat16 if has_bfloat16_units() else torch.float32
    return torch.float16 if stored == "float16" else torch.bfloat16


def check(where: str, entries: Sequence[Entry], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Compare what is needed with what is there.

    Raises:
        ValueError: tensors are missing, of another shape, or unknown; all are named.
    """
    needed = {source.name: source.shape for entry in entries for source in entry.sources}
    faults = {
        "missing": [name for name in needed if name not in shapes],
        "of another shape": [
            f"{name} is {list(shapes[name])}, not {list(shape)}"
            for name, shape in needed.items()
            if name in shapes and shapes[name] != shape
        ],
        "unknown": [name for name in shapes if name not in needed and not _HARMLESS.search(name)],
    }
    lines = [f"{kind}: {_some(names)}" for kind, names in faults.items() if names]
    if lines:
        raise ValueError(
            f"{where}: the tensors do not fit the config; {'; '.join(lines)}. Is the download whole, and of one model?"
        )


def fill_from(model: torch.nn.Module, entries: Sequence[Entry], reader: Reader) -> None:
    """Read every entry into its parameter; at any time little more than one parameter exists twice."""
    device = model.device if isinstance(model, Decoder) else torch.device("cpu")
    for entry in entries:
        dtype = model.get_parameter(entry.parameter).dtype
        fill(model, entry.parameter, assemble(entry, reader, dtype).to(device))


def assemble(entry: Entry, reader: Reader, dtype: torch.dtype) -> Tensor:
    """The value of one parameter."""
    wide = torch.promote_types(dtype, torch.float32) if entry.plus_one else dtype
    parts = []
    for source in entry.sources:
        part = reader.read(source.name, wide, source.cut)
        if source.paired_heads:
            part = (
                part.view(source.paired_heads, -1, 2, *part.shape[1:])
                .transpose(1, 2)
                .reshape(part.shape)
            )
        parts.append(part + 1 if entry.plus_one else part)
    if entry.stack:
        size = len(parts) // entry.stack
        groups = [parts[i : i + size] for i in range(0, len(parts), size)]
        return torch.stack([torch.cat(group, entry.dim) for group in groups])
    whole = torch.cat(parts, entry.dim) if len(parts) > 1 else parts[0]
    # A part of a mapped tensor must not hold on to the whole of it.
    cut = len(parts) == 1 and entry.sources[0].cut is not None
    return (
        whole.to(dtype).clone(memory_format=torch.contiguous_format)
        if cut
        else whole.to(dtype).contiguous()
    )


def open_reader(source: ModelSource) -> Reader:
    """The reader of a source.

    Raises:
        ValueError: no weights there, or a file that cannot be read.
    """
    if source.kind is Kind.GGUF:
        return GgufFile(source.path)
    for name, kind in (("model.safetensors", Safetensors), ("pytorch_model.bin", PyTorchFiles)):
        index = source.path / f"{name}.index.json"
        if index.is_file():
            return kind(_shards(index))
        if (source.path / name).is_file():
            return kind([source.path / name])
    raise ValueError(
        f"{source.path}: there is no model.safetensors, model.safetensors.index.json or pytorch_model.bin in it"
    )


class Safetensors:
    """Tensors in safetensors files, mapped into memory."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._files: dict[str, Any] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for path in paths:
            try:
                file: Any = safe_open(path, framework="pt")
                for name in file.keys():  # noqa: SIM118, it is a method and no mapping
                    self._files[name] = file
                    self._shapes[name] = tuple(file.get_slice(name).get_shape())
            except (SafetensorError, OSError) as error:
                raise ValueError(
                    f"{path}: not a whole safetensors file ({error}); download it again"
                ) from error

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor."""
        return self._shapes

    def read(self, name: str, dtype: torch.dtype, cut: Cut | None = None) -> Tensor:
        """One tensor; of a part nothing else is read."""
        if cut is None:
            return _converted(name, self._files[name].get_tensor(name), dtype)
        place = (slice(None),) * cut.dim + (slice(cut.start, cut.stop),)
        return _converted(name, self._files[name].get_slice(name)[place], dtype)


class PyTorchFiles:
    """Tensors in PyTorch files, read as data only (no code in them is run)."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._tensors: dict[str, Tensor] = {}
        for path in paths:
            try:
                loaded = torch.load(
                    path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path)
                )
            except Exception as error:  # torch raises many kinds for a damaged or an unsafe file
                raise ValueError(f"{path}: cannot be read as plain tensors ({error})") from error
            self._tensors.update(loaded)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor."""
        return {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def read(self, name: str, dtype: torch.dtype, cut: Cut | None = None) -> Tensor:
        """One tensor, or a part of it."""
        tensor = self._tensors[name]
        if cut is not None:
            tensor = tensor.narrow(cut.dim, cut.start, cut.stop - cut.start)
        return _converted(name, tensor, dtype)


def _converted(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if tensor.dtype not in _FLOATS:
        raise ValueError(
            f"tensor {name} is stored as {tensor.dtype}, which is not supported; use a 16-bit checkpoint"
        )
    return tensor.to(dtype)


def _shards(index: Path) -> list[Path]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ValueError(f"{index}: has no weight_map")
    paths = [index.parent / str(name) for name in dict.fromkeys(weight_map.values())]
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise ValueError(
            f"{index.parent}: {_some(missing)} of the index is missing; download it again"
        )
    return paths


def _scheme(
    source: ModelSource, config: ModelConfig, shapes: Mapping[str, tuple[int, ...]]
) -> Scheme:
    if source.kind is Kind.GGUF:
        return gguf_names(config)
    for prefix, head in (
        ("model.", "lm_head"),
        ("language_model.model.", "language_model.lm_head"),
        ("model.language_model.", "lm_head"),
    ):
        if f"{prefix}embed_tokens.weight" in shapes:
            return hugging_face(config, prefix, head)
    return hugging_face(config)


def _check_architecture(config: Mapping[str, Any]) -> None:
    names = config.get("architectures") or []
    if names and not any(
        str(name).endswith(("ForCausalLM", "ForConditionalGeneration")) for name in names
    ):
        raise ValueError(
            f"architectures {names} is not supported: a model that generates text ends in ForCausalLM"
        )


def _some(names: Sequence[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
