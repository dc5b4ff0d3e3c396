"""Arg-max over a vocabulary that the ranks have dealt out: no logits are gathered, only a winner of each rank.

Noise is a function of (seed, position, token id), so a rank draws the noise of its own tokens and the winner over all
ranks is the one that a single rank would have found.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foretell.ops.group import Rows
from foretell.ops.reference.sample import gumbel
from foretell.ops.table import OpTable
from foretell.spec import noise, processors
from foretell.spec.noise import Stream
from foretell.spec.processors import Law, Mode


def draw(
    logits: Tensor, law: Law | None, positions: Tensor, ops: OpTable, rows: Rows, ids: Tensor
) -> Tensor:
    """[B, m] int64, the row of the whole vocabulary that wins; -1 where a logit is not a number.

    Args:
        logits: [B, m, rows.count], of this rank's tokens, raw; -inf = never.
        law: None = all rows are greedy; filters are not looked at.
        positions: [B, m] int64, of the tokens decided.
        ids: [rows.count] int32, the target's id of each of this rank's tokens, for the noise.
    """
    if ops.draw is None:
        if law is not None:
            scaled = processors.scale_and_filter(logits, law, Mode(sampled=True))
            logits = processors.perturb(scaled, law, positions, Stream.SAMPLE, ids)
        return rows.best(logits)
    if law is None:
        place = ops.argmax(logits)
    else:
        place = ops.draw(logits, law, positions, int(Stream.SAMPLE), False, ids, None)
    # The kernels say which token won and not by how much: that one score is computed again.
    index = place.clamp(min=0).unsqueeze(-1)
    score = logits.gather(-1, index).to(torch.promote_types(logits.dtype, torch.float32))
    if law is not None:
        greedy = (law.temperature == 0).view(-1, 1, 1)
        own = gumbel(noise.key(law.seed, positions, Stream.SAMPLE), ids[index])
        score = torch.where(greedy, score, score / law.temperature.view(-1, 1, 1) + own)
    missing = torch.where(torch.isnan(score), torch.nan, -torch.inf)  # no token at all, or a NaN
    score = torch.where(place.unsqueeze(-1) < 0, missing, score).squeeze(-1)
    return rows.best_pair(score, place.clamp(min=0) + rows.start)
