"""Grammars: which tokens may follow at every node of a tree, so that an answer has the form it must have.

The parser is llguidance's; here is how it meets speculation. A follower stands where the committed text of one request
ends. For a step it walks the request's draft tree from there, one token down and one back, and notes the allowed tokens
at every node; nothing of the walk stays. So the mask of a node depends on committed text and the node's own path only,
and the text is the same with any drafter or none. The committed text is read anew each step, so a preempted request
needs nothing but a new follower.

Invariant: between two steps a follower has consumed exactly the committed output, or it has failed and allows nothing.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from foretell.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

MISSING = (
    "structured outputs need the package llguidance; install it with: pip install 'foretell[serve]'"
)
KEPT = 64  # compiled grammars that are remembered
WORD = 32  # tokens in one word of a mask


class Tokenizer(Protocol):
    """What is read of transformers' fast tokenizer here; llguidance reads the rest."""

    def get_vocab(self) -> dict[str, int]: ...
    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class Grammar:
    """A compiled grammar.

    Args:
        start: a matcher that has seen nothing; it is copied, never moved.
        after: tokens after which the grammar begins; () = at once.
    """

    start: LLMatcher
    after: tuple[int, ...] = ()


class Grammars:
    """Compiles and remembers the grammars of one tokenizer; any thread may call it.

    Args:
        tokenizer: transformers' fast tokenizer.
        vocab_size: V, width of the target's logits.
        end_ids: tokens that end an answer; allowed where the grammar is complete.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_ids: Sequence[int]) -> None:
        self.vocab_size = vocab_size
        self.end_ids = frozenset(end_ids)
        self._tokenizer = tokenizer
        self._known: OrderedDict[StructuredOutputsParams, Grammar] = OrderedDict()
        self._tokens: LLTokenizer | None = None
        self._lock = threading.Lock()

    def compile(self, wanted: StructuredOutputsParams) -> Grammar:
        """The grammar of a constraint.

        Raises:
            ValueError: it is no valid schema, expression or grammar, or too complex.
            ImportError: llguidance is not installed.
        """
        with self._lock:
            found = self._known.get(wanted)
            if found is None:
                found = self._known[wanted] = self._compile(wanted)
            self._known.move_to_end(wanted)
            while len(self._known) > KEPT:
                self._known.popitem(last=False)
            return found

    def follow(self, wanted: StructuredOutputsParams) -> Follower:
        """A follower at the start of an answer."""
        return Follower(self.compile(wanted), self.vocab_size, self.end_ids)

    def _compile(self, wanted: StructuredOutputsParams) -> Grammar:
        try:
            from llguidance import LLMatcher, grammar_from
        except ImportError:
            raise ImportError(MISSING) from None
        if self._tokens is None:
            self._tokens = _tokens_of(self._tokenizer, self.vocab_size, sorted(self.end_ids))
        try:
            source = grammar_from(wanted.kind, wanted.text)
            matcher = LLMatcher(self._tokens, source, log_level=0, limits=_limits())
            if not matcher.is_error():
                matcher.deep_copy().compute_bitmask()  # what is too complex fails here, not in a step
            problem = matcher.get_error()
        except (ValueError, RuntimeError) as error:
            problem = str(error)
        if problem:
            said = " ".join(problem.split())[:300]
            raise ValueError(f"structured_outputs: {wanted.kind} cannot be used: {said}")
        after = wanted.begins_after
        ids = (
            () if after is None else tuple(self._tokenizer.encode(after, add_special_tokens=False))
        )
        return Grammar(matcher, ids)


class Follower:
    """Follows one answer through its grammar.

    Args:
        vocab_size: V.
        end_ids: tokens after which nothing follows.
    """

    def __init__(self, grammar: Grammar, vocab_size: int, end_ids: frozenset[int]) -> None:
        self.seen = 0  # output tokens consumed
        self._after = grammar.after
        self._matcher = grammar.start.deep_copy()
        self._begun = not grammar.after
        self._tail: tuple[int, ...] = ()  # the last tokens before the grammar begins
        self._failed = False
        self._ends = end_ids
        self._words = -(-vocab_size // WORD)

    def advance(self, tokens: Sequence[int]) -> None:
        """Consume committed tokens, those after the `seen` ones."""
        self.seen += len(tokens)
        for place, token in enumerate(tokens):
            if not self._begun:
                self._tail = (*self._tail, token)[-len(self._after) :]
                self._begun = self._tail == self._after
            elif token in self._ends:
                self._failed = self._failed or place < len(tokens) - 1
            elif not self._matcher.consume_token(token):
                self._failed = True
                return

    def masks(self, tokens: Sequence[int], parents: Sequence[int]) -> Tensor:
        """What may follow each node.

        Args:
            tokens, parents: N nodes, parents first; node 0 is the committed text's end, -1 a missing draft.

        Returns:
            [N, V / 32] int32, bit j of word i is token 32 i + j. A node whose own token is not allowed, or ends the
            answer, allows everything: it cannot be accepted, or nothing follows it.
        """
        masks = torch.full((len(tokens), self._words), -1, dtype=torch.int32)
        if self._failed:
            return masks.zero_()
        children: list[list[int]] = [[] for _ in tokens]
        for node in range(1, len(tokens)):
            if tokens[node] >= 0 and tokens[node] not in self._ends:
                children[parents[node]].append(node)
        _Walk(self._matcher, self._after, tokens, children, masks).visit(
            0, self._tail, self._path()
        )
        return masks

    def _path(self) -> tuple[int, ...] | None:
        return () if self._begun else None


class _Walk:
    """One walk over one draft tree.

    Args:
        here: where the committed text ends; it is copied.
        masks: [N, V / 32] int32, written.
    """

    def __init__(
        self,
        here: LLMatcher,
        after: tuple[int, ...],
        tokens: Sequence[int],
        children: Sequence[Sequence[int]],
        masks: Tensor,
    ) -> None:
        self._here, self._after = here, after
        self._tokens, self._children, self._masks = tokens, children, masks
        self._matcher = here.deep_copy()

    def visit(self, node: int, tail: tuple[int, ...], path: tuple[int, ...] | None) -> None:
        """Note what may follow a node, and go on below it.

        Args:
            tail: the last tokens before the grammar begins.
            path: tokens of the grammar consumed since `here`; None = it has not begun.
        """
        if path is not None:
            self._masks[node] = self._mask()
        for child in self._children[node]:
            token = self._tokens[child]
            if path is None:
                longer = (*tail, token)[-len(self._after) :]
                self.visit(child, longer, () if longer == self._after else None)
            elif self._matcher.validate_tokens([token]) == 1:
                self._matcher.consume_token(token)
                self.visit(child, tail, (*path, token))
                self._back(path)

    def _back(self, path: tuple[int, ...]) -> None:
        """To the parent, whatever happened below it."""
        if self._matcher.is_error() or not self._matcher.rollback(1):
            self._matcher = self._here.deep_copy()
            self._matcher.consume_tokens(list(path))

    def _mask(self) -> Tensor:
        """[V / 32] int32; nothing is allowed where the grammar got too complex."""
        found = torch.frombuffer(bytearray(self._matcher.compute_bitmask()), dtype=torch.int32)
        words = self._masks.shape[1]
        return torch.zeros(words, dtype=torch.int32) if self._matcher.is_error() else found[:words]


def allowed(masks: Tensor, vocab_size: int) -> Tensor:
    """Masks ([..., V / 32] int32) as booleans ([..., V])."""
    bits = torch.arange(WORD, dtype=torch.int32, device=masks.device)
    return ((masks.unsqueeze(-1) >> bits) & 1).bool().flatten(-2)[..., :vocab_size]


def _tokens_of(tokenizer: Tokenizer, vocab_size: int, end_ids: list[int]) -> LLTokenizer:
    from llguidance.hf import from_tokenizer

    width = max(vocab_size, len(tokenizer.get_vocab()))
    return from_tokenizer(tokenizer, n_vocab=width, eos_token=end_ids or None)


def _limits() -> LLParserLimits:
    """What one request may cost the parser; a schema of a hundred fields needs a tenth of it."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_items_in_row=1000,
        initial_lexer_fuel=500_000,
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        max_lexer_states=20_000,
        max_grammar_size=100_000,
        precompute_large_lexemes=False,
        verbose_errors=False,
    )
