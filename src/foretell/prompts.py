"""What callers may pass as prompts and conversations, and the refusal of what they may not.

Reading, rendering (chat templates) and tokenising only: nothing is queued here, so a bad prompt costs nothing.

Invariant: a Prompt has at least one token, all in the model's vocabulary, and leaves room for one more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import index
from pathlib import Path
from typing import Any, SupportsIndex, TypedDict, cast

from foretell.text import Tokenizer

LONGEST_BAD_WORD = 64  # tokens; every step compares so many with every node's history
MOST_BAD_WORDS = 1024
LONGEST_PATH = 1024  # characters
PromptInput = str | Sequence[int] | Mapping[str, object]
Message = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt ready for the engine; `text` is None when it came as token ids alone."""

    text: str | None
    token_ids: tuple[int, ...]


class ChatArguments(TypedDict, total=False):
    """Options of a chat, in vLLM's words; each may be left out.

    Args:
        chat_template: Jinja text, or the path of a file with it, in place of the model's own.
        add_generation_prompt: end with the words that begin an assistant's answer (the default).
        continue_final_message: leave the last message open, so that the answer continues it.
        tools: descriptions for the template.
        chat_template_kwargs: further variables for the template.
    """

    chat_template: str | None
    add_generation_prompt: bool
    continue_final_message: bool
    tools: Sequence[Mapping[str, object]] | None
    chat_template_kwargs: Mapping[str, object] | None


CHAT_ARGUMENTS = tuple(ChatArguments.__annotations__)


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """How a conversation becomes a prompt: ChatArguments, read and checked; `template` is Jinja text."""

    template: str | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: Sequence[Mapping[str, object]] | None = None
    template_arguments: Mapping[str, object] | None = None

    def __post_init__(self) -> None:
        if self.add_generation_prompt and self.continue_final_message:
            raise ValueError(
                "add_generation_prompt and continue_final_message cannot both be True; "
                "pass add_generation_prompt=False to continue the last message"
            )


def chat_options(given: ChatArguments, template: str | None) -> ChatOptions:
    """The options of one chat.

    Args:
        template: Jinja text that holds where none is given.

    Raises:
        ValueError: two options contradict each other, or the template is neither Jinja text nor a file.
    """
    own = given.get("chat_template")
    return ChatOptions(
        template=template if own is None else read_template(own),
        add_generation_prompt=given.get("add_generation_prompt", True),
        continue_final_message=given.get("continue_final_message", False),
        tools=given.get("tools"),
        template_arguments=given.get("chat_template_kwargs"),
    )


def read_template(template: str) -> str:
    """The Jinja text of a chat template given as such, or as the path of a file with it."""
    if not isinstance(template, str):
        raise ValueError(f"chat_template must be Jinja text or a file's name, got {template!r}")
    if any(sign in template for sign in "{}\n"):
        return template
    if len(template) > LONGEST_PATH or not Path(template).is_file():
        raise ValueError(f"chat_template={template!r} is neither a Jinja template nor a file")
    return Path(template).read_text("utf-8")


def read_prompts(prompts: PromptInput | Sequence[PromptInput]) -> list[PromptInput]:
    """One prompt or many, as a list. A list of integers is one prompt of token ids."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if isinstance(prompts, bytes) or not isinstance(prompts, Iterable):
        raise ValueError(
            f"prompts must be text, token ids, a dict or a list of these, got {prompts!r}"
        )
    listed = list(prompts)
    if listed and all(_is_int(item) for item in listed):
        return [cast("list[int]", listed)]
    return cast("list[PromptInput]", listed)


def encode(given: PromptInput, tokenizer: Tokenizer, place: str) -> Prompt:
    """Tokenise one prompt, with the tokens the tokenizer adds by itself (such as BOS).

    Args:
        place: how error messages name the prompt, e.g. "prompt 2".

    Raises:
        ValueError: it is none of the forms, or a dict with keys that do not exist.
    """
    if isinstance(given, str):
        return Prompt(given, _tokens(given, tokenizer, place))
    if isinstance(given, Mapping):
        return _encode_mapping(given, tokenizer, place)
    if isinstance(given, bytes) or not isinstance(given, Iterable):
        raise ValueError(f"{place} must be text, token ids or a dict, got {given!r}")
    return Prompt(None, _as_ids(given, place))


def encode_chat(
    messages: Sequence[Message], tokenizer: Tokenizer, options: ChatOptions, place: str
) -> Prompt:
    """Render one conversation with the chat template and tokenise it; the template brings BOS itself.

    Raises:
        ValueError: there is no template, or it refuses the messages, or a message has parts that are not text.
    """
    if options.template is None and not tokenizer.chat_template:
        raise ValueError(
            f"{place}: the tokenizer has no chat template, and none was given. Use an instruction-tuned model, pass "
            "chat_template=, or use generate() with plain text"
        )
    plain = [_plain_message(message, place) for message in messages]
    if not plain:
        raise ValueError(f"{place} has no messages")
    try:
        text = tokenizer.apply_chat_template(
            plain,
            tools=options.tools,
            chat_template=options.template,
            add_generation_prompt=options.add_generation_prompt,
            continue_final_message=options.continue_final_message,
            tokenize=False,
            **(options.template_arguments or {}),
        )
    except Exception as error:  # templates raise whatever they like
        raise ValueError(f"{place}: the chat template refused the messages: {error}") from error
    return Prompt(text, _tokens(text, tokenizer, place, special=False))


def read_conversations(
    messages: Sequence[Message] | Sequence[Sequence[Message]],
) -> list[Sequence[Message]]:
    """One conversation or many, as a list."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise ValueError(
            f"messages must be a list of {{'role': ..., 'content': ...}}, got {messages!r}"
        )
    if messages and all(isinstance(message, Mapping) for message in messages):
        return [cast("Sequence[Message]", messages)]
    for conversation in messages:
        if isinstance(conversation, str | bytes | Mapping) or not isinstance(
            conversation, Sequence
        ):
            raise ValueError(
                f"messages must be a list of {{'role': ..., 'content': ...}} or of such lists, got {conversation!r}"
            )
    return list(cast("Sequence[Sequence[Message]]", messages))


def check(prompt: Prompt, vocab_size: int, max_model_len: int, place: str) -> None:
    """Refuse what the engine cannot run.

    Raises:
        ValueError: no tokens, a token id out of range, or no room left for an answer.
    """
    ids = prompt.token_ids
    if not ids or prompt.text == "":  # a tokenizer that adds BOS makes a token even of no text
        raise ValueError(
            f"The decoder prompt cannot be empty ({place}): give some text or at least one token id."
        )
    wrong = [token for token in ids if not 0 <= token < vocab_size]
    if wrong:
        raise ValueError(
            f"Token id {wrong[0]} is out of vocabulary ({place}): ids must be in [0, {vocab_size})."
        )
    if len(ids) >= max_model_len:
        raise ValueError(
            f"This model's maximum context length is {max_model_len} tokens, but {place} has {len(ids)} tokens and "
            "the answer needs at least one. Shorten the prompt or raise max_model_len."
        )


def encode_bad_words(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """The token sequences that spell each word: at the start of a text, and after a space.

    Raises:
        ValueError: a word is longer than every step can look back, or there are too many.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        for spelling in (word.lstrip(), " " + word.lstrip()):
            ids = _tokens(spelling, tokenizer, f"bad_words: {word[:40]!r}", special=False)
            if len(ids) > LONGEST_BAD_WORD:
                raise ValueError(
                    f"bad_words: {word[:40]!r} is {len(ids)} tokens long, at most {LONGEST_BAD_WORD} are supported"
                )
            if ids:
                found[ids] = None
    if len(found) > MOST_BAD_WORDS:
        raise ValueError(
            f"bad_words: {len(found)} spellings (with and without a space in front), at most {MOST_BAD_WORDS} are "
            "supported; use logit_bias for single tokens"
        )
    return tuple(found)


def _tokens(
    text: str, tokenizer: Tokenizer, place: str, *, special: bool = True
) -> tuple[int, ...]:
    """Token ids of a text; `special`: with what the tokenizer adds by itself."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{place}: the text has half a surrogate pair at character {error.start}, which is no character (bytes "
            "that are not UTF-8 become such); decode it with errors='replace'"
        ) from None
    return tuple(tokenizer.encode(text, add_special_tokens=special))


def _encode_mapping(given: Mapping[str, object], tokenizer: Tokenizer, place: str) -> Prompt:
    named = {key for key, value in given.items() if value is not None}
    foreign = sorted(named - {"prompt", "prompt_token_ids"}, key=str)
    if foreign:
        raise ValueError(
            f"{place} has key {foreign[0]!r}, which is not supported; use 'prompt' (text) or 'prompt_token_ids'"
        )
    text, ids = given.get("prompt"), given.get("prompt_token_ids")
    if text is not None and not isinstance(text, str):
        raise ValueError(f"{place}: 'prompt' must be text, got {text!r}")
    if ids is not None:
        return Prompt(text, _as_ids(ids, place))
    if text is None:
        raise ValueError(f"{place} has neither 'prompt' nor 'prompt_token_ids'")
    return Prompt(text, _tokens(text, tokenizer, place))


def _as_ids(ids: object, place: str) -> tuple[int, ...]:
    if isinstance(ids, str | bytes) or not isinstance(ids, Iterable):
        raise ValueError(f"{place}: token ids must be a list of integers, got {ids!r}")
    listed = tuple(ids)
    for token in listed:
        if not _is_int(token):
            raise ValueError(f"{place}: token ids must be integers, got {token!r}")
    return tuple(map(index, listed))


def _is_int(value: object) -> bool:
    """Python's integers, NumPy's and torch's."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        return False
    try:
        index(value)
    except TypeError:  # an array of several
        return False
    return True


def _plain_message(message: Message, place: str) -> dict[str, Any]:
    """The message with a list of text parts joined to one text, as templates expect it; no content is no text."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ValueError(f"{place}: a message must be a dict with a 'role', got {message!r}")
    plain = dict(message)
    content = plain.get("content")
    if isinstance(content, list | tuple):
        plain["content"] = "\n".join(_text_part(part, place) for part in content)
    elif content is None:
        plain["content"] = ""
    elif not isinstance(content, str):
        raise ValueError(f"{place}: the 'content' of a message must be text, got {content!r}")
    return plain


def _text_part(part: object, place: str) -> str:
    if isinstance(part, str):
        return part
    if (
        isinstance(part, Mapping)
        and part.get("type") == "text"
        and isinstance(part.get("text"), str)
    ):
        return cast("str", part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else part
    raise ValueError(f"{place}: only text is supported in a message, got a part of type {kind!r}")
