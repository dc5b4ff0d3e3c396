"""Tiny real tokenizers, built here: byte-level as GPT-2's and Llama 3's, and sentencepiece-like as Llama 2's."""

from __future__ import annotations

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from transformers import PreTrainedTokenizerFast

REPLY = "ÄÖÜ 你好 👍🏽 end"  # two, three and four bytes a character, and a character made of two
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_level(merges: tuple[tuple[str, str], ...] = ()) -> PreTrainedTokenizerFast:
    """One token per byte (ids 3 to 258), then one per merge; <s>, </s> and <|end|> are special."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<s>": 0, "</s>": 1, "<|end|>": 2}
    for token in (*alphabet, *(a + b for a, b in merges)):
        vocabulary.setdefault(token, len(vocabulary))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<s>", "</s>", "<|end|>")])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.chat_template = TEMPLATE
    return fast


def sentencepiece_like() -> PreTrainedTokenizerFast:
    """Words with ▁ for the space before them, and bytes for the rest; encoding puts <s> in front."""
    words = ["▁", "▁Paris", "▁is", "▁a", "▁city", "s", "▁end", ",", "Ä", "好"]
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for token in (*(f"<0x{byte:02X}>" for byte in range(256)), *words):
        vocabulary[token] = len(vocabulary)
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<unk>", "<s>", "</s>")])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def ids_of(tokenizer: PreTrainedTokenizerFast, *tokens: str) -> list[int]:
    """Ids of tokens by their own names; each must exist."""
    ids = [tokenizer.get_vocab()[token] for token in tokens]
    assert len(ids) == len(tokens)
    return ids
