"""Tokenizers built from GGUF metadata cut text as the tokenizer they were made from."""

from __future__ import annotations

import json

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from foretell.model.hub import Kind, ModelSource
from foretell.model.tokenizer import load_tokenizer, tokenizer_of

CORPUS = [
    "The quick brown fox jumps over the lazy dog; it's 2024, isn't it?",
    "def main():\n    return [x ** 2 for x in range(10)]\n\n\n",
    "Grüße, señor! Привет мир. 你好,世界。 tab\there  two  spaces",
    "don't can't WE'RE 123456 3.14159 <html>&amp;</html>",
] * 4
TEXTS = [
    *CORPUS[:4],
    "",
    " ",
    "  leading",
    "trailing \n",
    "emoji 🙂🙂 and café",
    "99999",
    "unseen: ñandú Ω",
]
TEMPLATE = "{% for m in messages %}<|a|>{{ m['content'] }}{% endfor %}"
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
SPLITS = {
    "gpt-2": GPT2,
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT2]),
    "qwen2": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(SPLIT % ""), "isolated"), BYTES]),
    "llama-bpe": pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(SPLIT % "{1,3}"), "isolated"), BYTES]
    ),
}


def byte_level(pre):
    """(a trained tokenizer, its GGUF metadata)."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = SPLITS[pre], decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|end|>", "<|a|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    vocabulary = tokenizer.get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.get)
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return tokenizer, {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if t in special else 1 for t in tokens],
        "tokenizer.ggml.merges": [" ".join(m) for m in merges],
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.chat_template": TEMPLATE,
    }


@pytest.mark.parametrize("pre", SPLITS)
def test_byte_level_tokens_and_texts_are_the_originals(pre):
    original, metadata = byte_level(pre)
    ours = tokenizer_of(metadata, "x.gguf")
    for text in [*TEXTS, "<|a|>hi<|end|> there<|a|>"]:
        ids = original.encode(text).ids
        assert ours(text)["input_ids"] == ids
        assert ours.decode(ids) == text
    assert (ours.eos_token, ours.eos_token_id) == ("<|end|>", 0)
    chat = ours.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert chat == "<|a|>hi"


def sentencepiece(prefix):
    """(a tokenizer in SentencePiece's manner, its GGUF metadata: scores fall with the rank of the merge)."""
    spaces = normalizers.Replace(" ", "▁")
    normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizer
    trainer = trainers.BpeTrainer(vocab_size=300, show_progress=False)
    trained.train_from_iterator(CORPUS, trainer)
    learned = sorted(trained.get_vocab(), key=trained.get_vocab().get)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *learned]
    kinds = [2, 3, 3, *[6] * 256, *[1] * len(learned)]
    scores = [0.0] * 259 + [-float(i) for i in range(len(learned))]
    vocabulary = {t: i for i, t in enumerate(tokens)}
    ranks = {t: i for i, t in enumerate(learned)}
    merges = [
        (t[:cut], t[cut:])
        for t in learned
        for cut in sorted(range(1, len(t)), key=lambda c, t=t: vocabulary.get(t[:c], 0))
        if t[:cut] in ranks and t[cut:] in ranks
    ]
    original = Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    original.normalizer = normalizer
    return original, {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_space_prefix": prefix,
    }


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_tokens_and_texts_are_the_originals(prefix):
    original, metadata = sentencepiece(prefix)
    ours = tokenizer_of(metadata, "x.gguf")
    for text in TEXTS:
        ids = original.encode(text).ids
        assert ours(text, add_special_tokens=False)["input_ids"] == ids
        assert ours(text)["input_ids"] == [1, *ids]
        assert ours.decode(ids) == text


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"tokenizer.ggml.pre": "martian"}, "pre-tokenizer 'martian'"),
        ({"tokenizer.ggml.model": "bert"}, "tokenizer model 'bert'"),
        ({"tokenizer.ggml.tokens": []}, "no vocabulary"),
    ],
)
def test_an_unknown_kind_of_tokenizer_is_refused_by_name(change, named):
    _, metadata = byte_level("gpt-2")
    with pytest.raises(ValueError, match=rf"x\.gguf: .*{named}"):
        tokenizer_of({**metadata, **change}, "x.gguf")


def test_a_directory_gives_its_own_tokenizer(tmp_path):
    _, metadata = byte_level("qwen2")
    saved = tokenizer_of(metadata, "x.gguf")
    saved.save_pretrained(tmp_path)
    ours = load_tokenizer(ModelSource(tmp_path, Kind.DIRECTORY, "x"))
    assert [ours(text)["input_ids"] for text in TEXTS] == [
        saved(text)["input_ids"] for text in TEXTS
    ]
    assert ours.chat_template == TEMPLATE


def test_a_broken_tokenizer_says_so(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama", "num_attention_heads": 0}')
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"no usable tokenizer .*; name one with --tokenizer"):
        load_tokenizer(ModelSource(tmp_path, Kind.DIRECTORY, "broken"))


def test_a_directory_without_a_tokenizer_says_so(tmp_path):
    with pytest.raises(ValueError, match="no usable tokenizer"):
        load_tokenizer(ModelSource(tmp_path, Kind.DIRECTORY, "x"))
