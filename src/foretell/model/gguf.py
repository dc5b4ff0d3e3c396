"""GGUF files: their metadata, their tensors made dense again, and the model config they imply.

The header is parsed here (the gguf library builds an object per token of the vocabulary, which takes seconds);
dequantising is the library's. A file that is cut short or inconsistent is refused before anything is read.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from foretell.model.config import ModelConfig
from foretell.model.shard import Cut

SUPPORTED = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
_CHUNK = 1 << 17  # elements made dense at a time: they stay in cache, and hold little memory
_WORKERS = min(8, os.cpu_count() or 1)
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class Stored:
    """Where one tensor lies."""

    shape: tuple[int, ...]  # as PyTorch has it: rows first
    kind: str  # name of its quantisation
    start: int  # byte in the file
    nbytes: int


class GgufFile:
    """A GGUF file: `metadata` by key, `tensors` by name, and `read`.

    Raises:
        ValueError: not a GGUF file, cut short, big-endian, or with a quantisation that is not supported.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise ValueError(f"{path}: not a GGUF file (it does not start with 'GGUF')")
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        header = _Header(self._data, path)
        self.metadata: Mapping[str, Any] = header.metadata
        self.tensors: Mapping[str, Stored] = header.tensors

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor."""
        return {name: stored.shape for name, stored in self.tensors.items()}

    def read(self, name: str, dtype: torch.dtype, cut: Cut | None = None) -> Tensor:
        """A tensor, or a part of it, made dense, a piece at a time so that only the result is large.

        Pieces are read and not mapped: pages of a mapped file would stay in memory until the whole model is loaded. A
        part of the last dimension is cut out of the rows as they are stored, at the borders of their blocks.
        """
        stored = self.tensors[name]
        span = _span(stored, cut)
        out = torch.empty(span.shape, dtype=dtype)
        rows = out.view(-1, span.width)
        most = max(1, _CHUNK // stored.shape[-1])  # rows of a piece

        def fill(piece: tuple[int, int, int]) -> None:
            place, first, count = piece
            raw = np.empty(count * span.row_bytes, dtype=np.uint8)
            with self.path.open("rb", buffering=0) as file:
                file.seek(stored.start + first * span.row_bytes)
                got = file.readinto(raw.data)
            if got != len(raw):
                raise ValueError(
                    f"{self.path}: became shorter while it was read; download it again"
                )
            rows[place : place + count] = span.dense(raw, stored.kind)

        pieces = [
            (place + at, first + at, min(most, count - at))
            for place, first, count in span.runs
            for at in range(0, count, most)
        ]
        if len(pieces) <= 1:
            list(map(fill, pieces))
            return out
        with ThreadPoolExecutor(_WORKERS) as pool:  # NumPy works outside the interpreter's lock
            list(pool.map(fill, pieces))
        return out


@dataclass(frozen=True, slots=True)
class _Span:
    """A part of a stored tensor, as rows of its last dimension."""

    shape: tuple[int, ...]
    row_bytes: int  # of a whole row
    runs: tuple[tuple[int, int, int], ...]  # (first row of the part, first row stored, how many)
    blocks: slice  # bytes of a row that hold the part's columns
    columns: slice  # of what those bytes make

    @property
    def width(self) -> int:
        """Columns of the part."""
        return int(self.columns.stop - self.columns.start)

    def dense(self, raw: np.ndarray[Any, np.dtype[np.uint8]], kind: str) -> Tensor:
        """[rows, width] of whole stored rows."""
        rows = raw.reshape(-1, self.row_bytes)[:, self.blocks]
        values = _dense(np.ascontiguousarray(rows).reshape(-1), kind)
        return values.view(rows.shape[0], -1)[:, self.columns]


def _span(stored: Stored, cut: Cut | None) -> _Span:
    """Where a part of a tensor lies."""
    elements, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[stored.kind]]
    shape, width = list(stored.shape), stored.shape[-1]
    row_bytes, last = width // elements * nbytes, len(shape) - 1
    dim, start, stop = (0, 0, shape[0]) if cut is None else (cut.dim, cut.start, cut.stop)
    if dim != last:
        inner = math.prod(shape[dim + 1 : last])  # rows of one entry
        outer, own = math.prod(shape[:dim]), (stop - start) * inner
        runs = tuple((i * own, (i * shape[dim] + start) * inner, own) for i in range(outer))
        low, high = 0, width
    else:
        runs = ((0, 0, math.prod(shape[:last])),)
        low, high = start, stop
    first, end = low // elements, -(-high // elements)
    shape[dim] = stop - start
    columns = slice(low - first * elements, high - first * elements)
    return _Span(tuple(shape), row_bytes, runs, slice(first * nbytes, end * nbytes), columns)


class _Header:
    """Reads the header from front to back."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data, self.path, self.place = data, path, 4
        version = self._scalar("I")
        if version not in (2, 3):
            raise ValueError(
                f"{path}: GGUF version {version} is not supported (2 and 3 are; big-endian is not)"
            )
        tensors, entries = self._scalar("Q"), self._scalar("Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(entries):
            key = self._string()
            self.metadata[key] = self._value(self._scalar("I"))
        infos = [self._info() for _ in range(tensors)]
        alignment = int(self.metadata.get("general.alignment", 32))
        base = -(-self.place // alignment) * alignment
        self.tensors = {
            name: self._locate(name, shape, kind, base + at) for name, shape, kind, at in infos
        }

    def _take(self, count: int) -> int:
        """Advance by so many bytes; returns where they start."""
        start, self.place = self.place, self.place + count
        if self.place > len(self.data):
            raise ValueError(
                f"{self.path}: the file is cut short (in its header); download it again"
            )
        return start

    def _scalar(self, code: str) -> Any:
        form = struct.Struct("<" + code)
        return form.unpack_from(self.data, self._take(form.size))[0]

    def _string(self) -> str:
        length = self._scalar("Q")
        start = self._take(length)
        return self.data[start : start + length].decode("utf-8", errors="replace")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            inner, length = self._scalar("I"), self._scalar("Q")
            if inner in _SCALARS:
                form = struct.Struct(f"<{length}{_SCALARS[inner]}")
                return list(form.unpack_from(self.data, self._take(form.size)))
            return [self._value(inner) for _ in range(length)]
        if kind not in _SCALARS:
            raise ValueError(
                f"{self.path}: unknown metadata type {kind}; the file is damaged or too new"
            )
        return self._scalar(_SCALARS[kind])

    def _info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        shape = tuple(reversed([self._scalar("Q") for _ in range(self._scalar("I"))]))
        return name, shape, self._scalar("I"), self._scalar("Q")

    def _locate(self, name: str, shape: tuple[int, ...], code: int, start: int) -> Stored:
        known = {int(kind): kind for kind in gguf.GGMLQuantizationType}
        kind = known[code].name if code in known else f"type {code}"
        if kind not in SUPPORTED:
            raise ValueError(
                f"{self.path}: tensor {name} is quantised as {kind}; supported are {', '.join(SUPPORTED)}"
            )
        elements, nbytes = gguf.GGML_QUANT_SIZES[known[code]]
        stored = Stored(shape, kind, start, int(np.prod(shape)) // elements * nbytes)
        if stored.start + stored.nbytes > len(self.data):
            raise ValueError(
                f"{self.path}: the file is cut short: tensor {name} ends at byte {stored.start + stored.nbytes}, "
                f"the file at {len(self.data)}; download it again"
            )
        return stored


def _dense(raw: np.ndarray[Any, np.dtype[np.uint8]], kind: str) -> Tensor:
    """Flat float values of whole quantised blocks."""
    if kind == "BF16":
        return torch.from_numpy(raw.copy()).view(torch.bfloat16)
    if kind in ("F32", "F16"):
        return torch.from_numpy(raw.view(np.float32 if kind == "F32" else np.float16).copy())
    return torch.from_numpy(gguf.dequantize(raw, gguf.GGMLQuantizationType[kind]))


_FAMILIES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "phi3": "phi3",
}
_UNSCALED_HEADS = {
    "gemma2": 46,
    "gemma3": 62,
}  # the layer counts of the 27B models, which scale by hidden / heads

# Texts of tokens that end a turn. GGUF files name one end token; chat models use several.
_ENDS = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|eom_id|>",
)
_CONTROL = 3  # token type


def config_of(file: GgufFile, max_model_len: int | None = None) -> ModelConfig:
    """The model config that a file's metadata implies.

    Raises:
        ValueError: an unknown architecture or a missing key, named.
    """
    fields = _Fields(file)
    names = file.tensors
    config = ModelConfig.from_hf(_hugging_face(fields), max_model_len)
    blocks = "rope_freqs.weight"
    ropes = config.ropes
    if blocks in names:
        factors = file.read(blocks, torch.float32)
        ropes = (replace(ropes[0], divisors=tuple(factors.tolist())), *ropes[1:])
    return replace(
        config,
        ropes=ropes,
        norm_plus_one=False,  # the converter has added the one
        tied="output.weight" not in names,
        qkv_bias="blk.0.attn_q.bias" in names or "blk.0.attn_qkv.bias" in names,
        output_bias="blk.0.attn_output.bias" in names,
    )


class _Fields:
    """A file's metadata, with the architecture's prefix understood."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.architecture = file.metadata.get("general.architecture")
        if self.architecture not in _FAMILIES:
            raise ValueError(
                f"{file.path}: architecture {self.architecture!r} is not supported; supported are "
                f"{', '.join(_FAMILIES)}"
            )

    def get(self, key: str, default: Any = None) -> Any:
        value = self.file.metadata.get(f"{self.architecture}.{key}", default)
        if isinstance(value, list):  # one entry per layer; only equal ones are supported
            if len(set(value)) != 1:
                raise ValueError(
                    f"{self.file.path}: {key} differs from layer to layer, which is not supported"
                )
            return value[0]
        return value

    def need(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise ValueError(f"{self.file.path}: the metadata lack {self.architecture}.{key}")
        return value

    def factors(self, name: str) -> list[float] | None:
        if name not in self.file.tensors:
            return None
        values: list[float] = self.file.read(name, torch.float32).tolist()
        return values


def _hugging_face(fields: _Fields) -> dict[str, Any]:
    """The `config.json` that this file could have come from."""
    metadata, tensors = fields.file.metadata, fields.file.tensors
    if "token_embd.weight" not in tensors:
        raise ValueError(f"{fields.file.path}: tensor token_embd.weight is missing")
    hidden, heads = fields.need("embedding_length"), fields.need("attention.head_count")
    layers = fields.need("block_count")
    head_dim = fields.get("attention.key_length") or hidden // heads
    family = _FAMILIES[str(fields.architecture)]
    experts = fields.get("expert_count", 0)
    config: dict[str, Any] = {
        "model_type": "mixtral" if family == "llama" and experts else family,
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden,
        "intermediate_size": fields.need("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": fields.get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": fields.get("context_length"),
        "rms_norm_eps": fields.need("attention.layer_norm_rms_epsilon"),
        "rope_theta": fields.get("rope.freq_base"),
        "rope_scaling": _rope_scaling(fields),
        "partial_rotary_factor": fields.get("rope.dimension_count", head_dim) / head_dim,
        "original_max_position_embeddings": fields.get("rope.scaling.original_context_length"),
        "sliding_window": fields.get("attention.sliding_window") or None,
        "attn_logit_softcapping": fields.get("attn_logit_softcapping"),
        "final_logit_softcapping": fields.get("final_logit_softcapping"),
        "num_local_experts": experts,
        "num_experts_per_tok": fields.get("expert_used_count", 2),
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _ends(metadata),
    }
    if fields.architecture in _UNSCALED_HEADS:
        large = layers == _UNSCALED_HEADS[str(fields.architecture)]
        config["query_pre_attn_scalar"] = hidden // heads if large else head_dim
    return config


def _rope_scaling(fields: _Fields) -> dict[str, Any] | None:
    long = fields.factors("rope_factors_long.weight")
    if long is not None:
        short = fields.factors("rope_factors_short.weight")
        attention = fields.get("rope.scaling.attn_factor")
        return {
            "rope_type": "longrope",
            "long_factor": long,
            "short_factor": short,
            "attention_factor": attention,
        }
    kind = fields.get("rope.scaling.type", "none")
    if kind == "none":
        return None
    return {
        "rope_type": kind,
        "factor": fields.need("rope.scaling.factor"),
        "original_max_position_embeddings": fields.get("rope.scaling.original_context_length"),
    }


def _ends(metadata: Mapping[str, Any]) -> list[int]:
    """Ids of the tokens that end a reply: those the file names, and control tokens known to end a turn."""
    keys = (
        "tokenizer.ggml.eos_token_id",
        "tokenizer.ggml.eot_token_id",
        "tokenizer.ggml.eom_token_id",
    )
    ids = [int(metadata[key]) for key in keys if key in metadata]
    tokens, kinds = (
        metadata.get("tokenizer.ggml.tokens", []),
        metadata.get("tokenizer.ggml.token_type", []),
    )
    known = {text: i for i, text in enumerate(tokens) if text in _ENDS}
    ids += [i for i in known.values() if i < len(kinds) and kinds[i] == _CONTROL]
    return list(dict.fromkeys(ids))
