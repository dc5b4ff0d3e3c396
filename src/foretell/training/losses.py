"""Cross-entropy of a head without its logits: rows are taken a few thousand at a time, gradients are made on the way.

The logits of a step (rows x vocabulary) would be the largest tensor of training by far; here one chunk of them lives at
a time, and its gradient is computed with it, so the backward pass only scales what is there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CHUNK = 4096  # rows


@dataclass(frozen=True, slots=True)
class Teacher:
    """What the target says of rows, over the vocabulary of the head.

    What a row learns is (1 - hard) * law + hard * (all on `best`). Without a law, hard must be 1.
    """

    best: Tensor  # [T] int64, its likeliest token as an id of the head; -1 where the head has none
    law: Tensor | None = None  # [T, Vd], sums to 1
    hard: float = 1.0


class _HeadLoss(torch.autograd.Function):
    """sum over rows of cross-entropy; see `head_loss`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, which: Tensor, teacher: Teacher, learn: bool
    ) -> tuple[Tensor, Tensor]:
        cast = weight.to(x.dtype)
        wide = torch.promote_types(x.dtype, torch.float32)
        gx = torch.empty_like(x)
        gw = torch.zeros(weight.shape, dtype=wide, device=x.device) if learn else None
        loss = torch.zeros((), dtype=wide, device=x.device)
        hits = torch.zeros((), dtype=torch.int64, device=x.device)
        for start in range(0, x.shape[0], CHUNK):
            rows = slice(start, start + CHUNK)
            logits = x[rows] @ cast.t()  # [C, Vd]
            best = teacher.best[which[rows]]
            known = (best >= 0).unsqueeze(1)
            best = best.clamp(min=0).unsqueeze(1)
            gradient = torch.softmax(logits, -1, dtype=wide)
            # log-sum-exp by way of the likeliest token, whose share cannot underflow
            top, likeliest = logits.max(-1, keepdim=True)
            lse = top.to(wide) - gradient.gather(1, likeliest).log()
            told = teacher.hard * logits.gather(1, best).to(
                wide
            )  # what the law expects of the logits
            if teacher.hard < 1.0:
                assert teacher.law is not None, "a soft teacher has a law"
                law = teacher.law[which[rows]]
                told = told + (1 - teacher.hard) * (law * logits).sum(-1, keepdim=True, dtype=wide)
                gradient.sub_(law, alpha=1 - teacher.hard)
            gradient.scatter_add_(1, best, told.new_full(best.shape, -teacher.hard))
            loss += torch.where(known, lse - told, 0).sum()
            hits += ((likeliest == best) & known).sum()
            narrow = gradient.to(x.dtype)
            gx[rows] = (narrow @ cast) * known
            if gw is not None:
                gw += narrow.t() @ (x[rows] * known)
        ctx.save_for_backward(gx, *(() if gw is None else (gw.to(weight.dtype),)))
        ctx.mark_non_differentiable(hits)
        return loss, hits

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        scale = gradients[0]
        gx, *rest = ctx.saved_tensors
        gw = rest[0] * scale if rest else None
        return gx * scale.to(gx.dtype), gw, None, None, None


def head_loss(
    x: Tensor, weight: Tensor, which: Tensor, teacher: Teacher, learn: bool = True
) -> tuple[Tensor, Tensor]:
    """Cross-entropy of `x @ weight^T` against a teacher, summed.

    Args:
        x: [R, H].
        weight: [Vd, H], cast to x's dtype.
        which: [R] int64, the teacher's row for each row; rows whose `best` is -1 count nothing.
        learn: give the weight a gradient.

    Returns:
        (the sum, how many rows have the teacher's likeliest token on top).
    """
    result: tuple[Tensor, Tensor] = _HeadLoss.apply(x, weight, which, teacher, learn)  # type: ignore[no-untyped-call]
    return result
