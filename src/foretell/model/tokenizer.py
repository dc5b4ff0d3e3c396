"""The tokenizer of a model: transformers' fast tokenizer, from its directory or from a GGUF file's metadata.

GGUF metadata name the pre-tokenisation by a word; only words that are known here are taken, for a wrong split would
give plausible but different tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from foretell.model.gguf import GgufFile
from foretell.model.hub import Kind, ModelSource

_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6  # token types of GGUF

_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)


def load_tokenizer(source: ModelSource) -> PreTrainedTokenizerFast:
    """The tokenizer of a model, with its chat template if it has one.

    Raises:
        ValueError: there is none, or it is of a kind that is not supported.
    """
    if source.kind is Kind.GGUF:
        return tokenizer_of(GgufFile(source.path).metadata, str(source.path))
    try:
        tokenizer = AutoTokenizer.from_pretrained(source.path, use_fast=True)
    except Exception as error:  # the library raises many kinds
        raise ValueError(
            f"{source.path}: no usable tokenizer ({error}); name one with --tokenizer"
        ) from error
    if not tokenizer.is_fast:
        raise ValueError(
            f"{source.path}: its tokenizer has no fast form; name another with --tokenizer"
        )
    return tokenizer


def tokenizer_of(metadata: Mapping[str, Any], where: str) -> PreTrainedTokenizerFast:
    """A tokenizer from the metadata of a GGUF file.

    Args:
        where: the file, for messages.
    """
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise ValueError(
            f"{where}: the file holds no vocabulary; name a tokenizer with --tokenizer"
        )
    kind = metadata.get("tokenizer.ggml.model")
    match kind:
        case "gpt2":
            tokenizer = _byte_level(metadata, tokens, where)
        case "llama":
            tokenizer = _sentencepiece(metadata, tokens)
        case _:
            raise ValueError(
                f"{where}: tokenizer model {kind!r} is not supported; name a tokenizer with --tokenizer"
            )
    _add_special(tokenizer, metadata, tokens)
    names = {
        name: tokens[metadata[key]]
        for name, key in (
            ("bos_token", "tokenizer.ggml.bos_token_id"),
            ("eos_token", "tokenizer.ggml.eos_token_id"),
            ("unk_token", "tokenizer.ggml.unknown_token_id"),
            ("pad_token", "tokenizer.ggml.padding_token_id"),
        )
        if metadata.get(key) is not None
    }
    default_bos = kind == "llama"
    if metadata.get("tokenizer.ggml.add_bos_token", default_bos) and "bos_token" in names:
        bos = names["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"],
            pair=[bos, "$A", bos, "$B"],
            special_tokens=[(bos, tokens.index(bos))],
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=metadata.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        **names,
    )


def _byte_level(metadata: Mapping[str, Any], tokens: list[str], where: str) -> Tokenizer:
    """Byte-level BPE, as GPT-2 introduced it."""
    pre = metadata.get("tokenizer.ggml.pre", "default")
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges", [])]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(
        models.BPE(vocabulary, merges, fuse_unk=False, ignore_merges=pre in _LLAMA3)
    )
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre in ("default", "gpt-2"):
        tokenizer.pre_tokenizer = plain
    elif pre == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, plain])
    elif pre in _LLAMA3 or pre in _QWEN2:
        digits_at_once = "{1,3}" if pre in _LLAMA3 else ""
        split = pre_tokenizers.Split(Regex(_SPLIT.replace("DIGITS", digits_at_once)), "isolated")
        rest = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, rest])
    else:
        raise ValueError(
            f"{where}: pre-tokenizer {pre!r} is not supported; name a tokenizer with --tokenizer"
        )
    if pre in _QWEN2:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


_LLAMA3 = ("llama-bpe", "llama3", "llama-v3")
_QWEN2 = ("qwen2", "deepseek-r1-qwen")


def _sentencepiece(metadata: Mapping[str, Any], tokens: list[str]) -> Tokenizer:
    """SentencePiece BPE with bytes for unknown characters; a merge's rank is its piece's score."""
    scores = metadata["tokenizer.ggml.scores"]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    kinds = metadata.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    merges: list[tuple[float, int, int, tuple[str, str]]] = []
    for i, (token, score, kind) in enumerate(zip(tokens, scores, kinds, strict=True)):
        if kind != _NORMAL:
            continue
        for cut in range(1, len(token)):
            left, right = vocabulary.get(token[:cut]), vocabulary.get(token[cut:])
            if left is not None and right is not None:
                merges.append((-score, i, left, (token[:cut], token[cut:])))
    merges.sort(key=lambda merge: merge[:3])
    tokenizer = Tokenizer(
        models.BPE(
            vocabulary,
            [pair for *_, pair in merges],
            unk_token=tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return tokenizer


def _add_special(tokenizer: Tokenizer, metadata: Mapping[str, Any], tokens: list[str]) -> None:
    """Tokens that are matched in the text as a whole: control tokens (special) and the user's own."""
    kinds = metadata.get("tokenizer.ggml.token_type", [])
    special, plain = [], []
    for token, kind in zip(tokens, kinds, strict=False):
        if kind in (_CONTROL, _UNKNOWN):
            special.append(AddedToken(token, special=True, normalized=False))
        elif kind == _USER:
            plain.append(AddedToken(token, special=False, normalized=False))
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(plain)
