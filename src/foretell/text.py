"""From token ids to text, as they land: incremental detokenising and stop strings.

A step brings one to D + 1 tokens; they are taken one at a time, so neither text nor stops depend on how a reply was cut
into steps. It knows no engine and no request: the caller tells it which tokens are to be read.

Invariant: the text of a reply is what decoding prompt and reply together adds to the prompt. A character that is not
complete yet is never shown, and neither is text that may still become a stop string.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

BROKEN = "\ufffd"  # what decoders put for bytes that are no character (yet)
LONGEST_CHARACTER = (
    32  # tokens without a complete character after which broken bytes are shown as such
)
CONTEXT = range(4, 25)  # how many prompt tokens may be needed to know how the reply begins


class AddedToken(Protocol):
    """What we read of an added token."""

    @property
    def special(self) -> bool: ...


class Tokenizer(Protocol):
    """What we use of a tokenizer of the transformers library."""

    @property
    def chat_template(self) -> str | Mapping[str, str] | None: ...
    @property
    def all_special_ids(self) -> list[int]: ...
    @property
    def added_tokens_decoder(self) -> Mapping[int, AddedToken]: ...
    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...
    def decode(
        self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool
    ) -> str: ...
    def apply_chat_template(self, conversation: list[dict[str, Any]], **options: Any) -> Any: ...


class TokenText:
    """Texts of token ids, from one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder
        self.special_ids = frozenset(tokenizer.all_special_ids) | {
            i for i, token in added.items() if token.special
        }
        self._alone: dict[int, str] = {}

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of the tokens, special ones included."""
        # "Clean-up" moves spaces, so it would change text that was already shown.
        return self.tokenizer.decode(
            list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def alone(self, token_id: int) -> str:
        """Text of one token; "" for an id the tokenizer does not have."""
        text = self._alone.get(token_id)
        if text is None:
            text = self._alone[token_id] = self.decode((token_id,))
        return text


class Detokenizer:
    """Reads a reply token by token.

    Args:
        token_text: the tokenizer's texts.
        prompt: token ids the reply follows: they say whether its first token starts with a space.
        skip_special: special tokens have no text.
    """

    def __init__(
        self, token_text: TokenText, prompt: Sequence[int] = (), skip_special: bool = True
    ) -> None:
        self._text = token_text
        self._skipped = token_text.special_ids if skip_special else frozenset[int]()
        self._window = self._context(
            prompt
        )  # the tokens of the last shown text, then those not shown yet
        self._read = len(self._window)  # how many of them are shown
        self._shown = len(
            self._text.decode(self._window).rstrip(BROKEN)
        )  # how much of the window's text is

    def push(self, token_id: int) -> str:
        """The text that this token completes; "" while a character is incomplete."""
        if token_id in self._skipped:
            return ""
        self._window.append(token_id)
        text = self._text.decode(self._window)
        pending = len(self._window) - self._read
        if pending < LONGEST_CHARACTER and (text.endswith(BROKEN) or len(text) <= self._shown):
            return ""
        if (
            len(text) <= self._shown
        ):  # tokens without any text: the first may be a space that a decoder strips
            del self._window[self._read + 1 :]
            return ""
        new = text[self._shown :]
        self._window = self._window[self._read :]
        self._read = pending
        # Only a text before it tells a decoder that a token does not start the text: keep the last one as context.
        self._shown = (
            len(self._text.alone(token_id))
            if pending == 1
            else len(self._text.decode(self._window))
        )
        return new

    def rest(self) -> str:
        """Text that waited for a character which never came; the piece of that character is dropped."""
        text = self._text.decode(self._window).rstrip(BROKEN)
        new = text[self._shown :]
        self._shown += len(new)
        return new

    def _context(self, prompt: Sequence[int]) -> list[int]:
        tail = [token for token in prompt[-4 * CONTEXT.stop :] if token not in self._skipped]
        for size in CONTEXT:  # a window must not start in the middle of a character
            if BROKEN not in self._text.decode(tail[-size:]).rstrip(BROKEN):
                return tail[-size:]
        return tail[-CONTEXT.stop :]


class TextStream:
    """The text of one reply: what is there, what may be shown, and where a stop string ends it.

    Args:
        detokenizer: reads the tokens; None = no text is made.
        stop: strings that end the reply. The one that is complete first wins, of two complete at once the longer.
        include_stop: the text ends behind the stop string instead of before it.
        min_tokens: a stop string that a token up to this one completes does not count.
    """

    def __init__(
        self,
        detokenizer: Detokenizer | None,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        assert "" not in stop, "an empty stop string ends everything: refused by SamplingParams"
        self.text = ""
        self._detokenizer = detokenizer
        self._stop = tuple(stop)
        self._reach = max(map(len, self._stop), default=0)
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._tokens = 0
        self._ended = False

    def push(self, token_id: int) -> str | None:
        """Read one token.

        Returns:
            The stop string it completes: the text is cut there and nothing may follow.
        """
        assert not self._ended, "a token after the end of the reply"
        self._tokens += 1
        return self._append(self._detokenizer.push(token_id)) if self._detokenizer else None

    def end(self) -> str | None:
        """No token follows: what was held back is text now.

        Returns:
            The stop string that this completes, as `push`.
        """
        if self._ended or self._detokenizer is None:
            return None
        stop = self._append(self._detokenizer.rest())
        self._ended = True
        return stop

    @property
    def visible(self) -> int:
        """How many characters of `text` may be shown: no later token changes them."""
        return len(self.text) if self._ended else len(self.text) - self._held()

    def _append(self, new: str) -> str | None:
        before = len(self.text)
        self.text += new
        if not new or self._tokens <= self._min_tokens:
            return None
        found = self._first_stop(before)
        if found is None:
            return None
        stop, end = found
        self.text = self.text[: end if self._include_stop else end - len(stop)]
        self._ended = True
        return stop

    def _first_stop(self, before: int) -> tuple[str, int] | None:
        """The stop string with the earliest end behind `before`, and that end."""
        found = []
        for stop in self._stop:
            start = self.text.find(stop, max(0, before - len(stop) + 1))
            if start >= 0:
                found.append((start + len(stop), -len(stop), stop))
        if not found:
            return None
        end, _, stop = min(found)
        return stop, end

    def _held(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        for size in range(min(self._reach - 1, len(self.text)), 0, -1):
            tail = self.text[-size:]
            if any(stop.startswith(tail) and len(stop) > size for stop in self._stop):
                return size
        return 0
