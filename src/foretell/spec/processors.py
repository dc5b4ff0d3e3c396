"""Everything between the target's raw logits and the law it samples from, applied at every node with its own history.

The history of a node is the committed text plus the drafted tokens on its own path, so a penalty or a bad word works in
the middle of a block exactly as it would token by token. Order: allowed ids and logit bias, bad words, min_tokens,
penalties (repetition, then frequency and presence), temperature, min_p, top_k, top_p.

Which parts run is fixed by a `Mode`, chosen on the host from the requests in the batch: parts nobody asked for cost
nothing, and a row that did not ask has neutral values.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from foretell.ops.reference.sample import filter_logits, gumbel
from foretell.ops.table import OpTable
from foretell.spec import noise
from foretell.spec.nodes import Nodes


@dataclass(frozen=True, slots=True)
class Mode:
    """Which parts of sampling a step needs; a captured graph is valid for one mode."""

    sampled: bool = False  # some row has a temperature above 0
    filtered: bool = False  # some row has top_k, top_p or min_p
    penalties: bool = False
    bias: bool = False  # logit_bias or allowed_token_ids
    bad_words: bool = False
    min_tokens: bool = False
    logprobs: int = -1  # how many top ones to report; -1 = none, 0 = the chosen token's only
    traced: bool = False  # report how probable each drafted token was
    lookups: bool = False  # some row wants longer matches from drafters that look up

    @property
    def processed(self) -> bool:
        """Whether anything but the temperature and the filters changes the logits."""
        return self.penalties or self.bias or self.bad_words or self.min_tokens


@dataclass(frozen=True, slots=True)
class Law:
    """Sampling parameters of the rows of a step, gathered from the slots."""

    seed: Tensor  # [B] int64
    temperature: Tensor  # [B] float32, 0 = greedy
    top_k: Tensor  # [B] int64, 0 = off
    top_p: Tensor  # [B] float32
    min_p: Tensor  # [B] float32


@dataclass(frozen=True, slots=True)
class History:
    """Committed text and history-dependent parameters of the rows of a step."""

    tokens: Tensor  # [B, L] int32, committed tokens (anything at or beyond `length`)
    length: Tensor  # [B] int64
    prompt_length: Tensor  # [B] int64
    repetition: Tensor  # [B] float32, 1 = off
    frequency: Tensor  # [B] float32
    presence: Tensor  # [B] float32
    min_tokens: Tensor  # [B] int64
    stop: Tensor  # [B, E] int64, stop ids, -1 = none
    bias: Tensor | None  # [B, V] float32, added to the logits (-inf forbids)
    bad_words: Tensor | None  # [B, W, K] int64, each right-aligned, -1 in front


def process(logits: Tensor, nodes: Nodes, history: History, mode: Mode) -> Tensor:
    """Logits after every transformation that does not depend on the temperature.

    Args:
        logits: [B, N, V] raw logits of the target after each node.

    Returns:
        [B, N, V] in float32, or float64 where the logits are; untouched where nothing is asked for.
    """
    if not mode.processed:
        return logits
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if mode.bias and history.bias is not None:
        logits = logits + history.bias.unsqueeze(1)
    if mode.bad_words and history.bad_words is not None:
        logits = _forbid_bad_words(logits, nodes, history)
    if mode.min_tokens:
        logits = _forbid_stops(logits, nodes, history)
    if mode.penalties:
        logits = _penalise(logits, nodes, history)
    return logits


def scale_and_filter(logits: Tensor, law: Law, mode: Mode) -> Tensor:
    """Logits of the law to sample from: divided by the temperature and cut; greedy rows are left as they are.

    Args:
        logits: [B, N, V] from `process`.
    """
    if not mode.sampled:
        return logits
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    greedy = (law.temperature == 0).view(-1, 1, 1)
    scaled = logits / torch.where(greedy, 1.0, law.temperature.view(-1, 1, 1)).to(logits.dtype)
    if mode.filtered:
        scaled = filter_logits(scaled, law.top_k, law.top_p, law.min_p)
    return scaled


def perturb(
    logits: Tensor, law: Law, positions: Tensor, stream: noise.Stream, ids: Tensor | None = None
) -> Tensor:
    """Add the Gumbel noise of a stream to the sampled rows; greedy rows get none.

    Args:
        logits: [B, N, V] from `scale_and_filter`.
        positions: [B, N] int64, position of the token decided by each row of logits.
        ids: [V] int32, the target's token id of each column; the default is 0 .. V - 1.
    """
    if ids is None:
        ids = torch.arange(logits.shape[-1], dtype=torch.int32, device=logits.device)
    sampled = (law.temperature > 0).view(-1, 1, 1)
    noisy = logits + gumbel(noise.key(law.seed, positions, stream), ids)
    return torch.where(sampled, noisy, logits)


def sample(logits: Tensor, law: Law, positions: Tensor, mode: Mode, ops: OpTable) -> Tensor:
    """The target's own sample after every node, [B, N] int64; -1 where the logits are not finite."""
    if mode.sampled:
        logits = perturb(logits, law, positions, noise.Stream.SAMPLE)
    return ops.argmax(logits)


def _forbid_stops(logits: Tensor, nodes: Nodes, history: History) -> Tensor:
    """No stop id where the token decided would be one of the first `min_tokens` of the output."""
    ordinal = nodes.positions + 1 - history.prompt_length.unsqueeze(1)
    early = ordinal < history.min_tokens.unsqueeze(1)  # [B, N]
    forbidden = torch.zeros(logits.shape[0], logits.shape[-1], device=logits.device)
    stop = history.stop
    forbidden.scatter_add_(1, stop.clamp(min=0), (stop >= 0).to(forbidden.dtype))
    return torch.where(early.unsqueeze(-1) & (forbidden > 0).unsqueeze(1), -torch.inf, logits)


def _penalise(logits: Tensor, nodes: Nodes, history: History) -> Tensor:
    """Repetition penalty over prompt and output, frequency and presence penalties over the output."""
    rows, _, vocabulary = logits.shape
    place = torch.arange(history.tokens.shape[1], device=logits.device)
    committed = place < history.length.unsqueeze(1)
    produced = committed & (place >= history.prompt_length.unsqueeze(1))
    tokens = history.tokens.to(torch.int64).clamp(0, vocabulary - 1)
    zeros = torch.zeros(rows, vocabulary, device=logits.device)
    in_all = zeros.scatter_add(1, tokens, committed.to(zeros.dtype))
    in_output = zeros.scatter_add(1, tokens, produced.to(zeros.dtype))
    on_path = _path_counts(nodes, vocabulary)
    seen = in_all.unsqueeze(1) + on_path > 0
    counts = in_output.unsqueeze(1) + on_path
    repetition = history.repetition.view(-1, 1, 1).to(logits.dtype)
    punished = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(seen, punished, logits)
    logits = logits - history.frequency.view(-1, 1, 1) * counts
    return logits - history.presence.view(-1, 1, 1) * (counts > 0)


def _path_counts(nodes: Nodes, vocabulary: int) -> Tensor:
    """[B, N, V] float32: how often each token was drafted on the way to a node, the node itself included."""
    rows, count = nodes.tokens.shape
    on_path = nodes.shape.ancestor_matrix().expand(rows, -1, -1).to(torch.float32).clone()
    on_path[:, :, 0] = 0  # the root is committed text, counted there
    on_path *= (nodes.tokens >= 0).unsqueeze(1)
    tokens = nodes.tokens.clamp(0, vocabulary - 1).unsqueeze(1).expand(-1, count, -1)
    counts = torch.zeros(rows, count, vocabulary, device=nodes.tokens.device)
    return counts.scatter_add_(2, tokens, on_path)


def _forbid_bad_words(logits: Tensor, nodes: Nodes, history: History) -> Tensor:
    """-inf on the last token of every bad word whose other tokens end a node's history (within the output)."""
    words = history.bad_words
    assert words is not None
    last = words[:, :, -1]  # [B, W]
    before = words[:, :, :-1]  # [B, W, K-1]
    recent = recent_tokens(nodes, history, before.shape[-1])  # [B, N, K-1]
    matches = (before.unsqueeze(1) == recent.unsqueeze(2)) | (before.unsqueeze(1) < 0)
    banned = matches.all(-1) & (last >= 0).unsqueeze(1)  # [B, N, W]
    hits = torch.zeros_like(logits)
    index = last.clamp(min=0).unsqueeze(1).expand(-1, logits.shape[1], -1)
    hits.scatter_add_(2, index, banned.to(logits.dtype))
    return torch.where(hits > 0, -torch.inf, logits)


def recent_tokens(nodes: Nodes, history: History, count: int) -> Tensor:
    """The last `count` output tokens of each node's own history, oldest first.

    Returns:
        [B, N, count] int64, -2 where the output is shorter.
    """
    rows, width = nodes.tokens.shape
    parents = nodes.shape.parents.expand(rows, -1)
    current = torch.arange(width, device=parents.device).expand(rows, -1)
    back = torch.zeros_like(current)  # how far before the root we are
    found = []
    for _ in range(count):
        index = history.length.unsqueeze(1) - 1 - back
        text = history.tokens.gather(1, index.clamp(min=0)).to(torch.int64)
        text = torch.where(index >= history.prompt_length.unsqueeze(1), text, -2)
        found.append(torch.where(current > 0, nodes.tokens.gather(1, current), text))
        back = back + (current == 0)
        current = parents.gather(1, current)
    return torch.stack(found[::-1], dim=-1) if found else nodes.tokens.new_zeros(rows, width, 0)
