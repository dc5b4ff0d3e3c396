"""What a drafter learns from: the target's features, final hidden states and likeliest tokens of packed rows.

Computed when they are wanted, and kept within a budget, on the device or in one file, so that later epochs need no
target. Invariant: a row that counts as kept was written whole; a run that was cut short goes on with what is there.
"""

from __future__ import annotations

import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from foretell.model.decoder import Decoder
from foretell.training.data import Packed
from foretell.training.dense import packed_rows, run_target

log = logging.getLogger("foretell")

HEAD_ROWS = 4096  # positions whose logits exist at a time


@dataclass(frozen=True, slots=True)
class Captured:
    """Of a batch of B rows of L tokens; position i speaks about token i + 1."""

    features: Tensor  # [B, L, F], zero-wide without taps
    hidden: Tensor  # [B, L, H], after the final norm
    best: Tensor  # [B, L] int64, the likeliest next token


class Capture:
    """Runs the target over rows, or takes what was kept of them.

    Args:
        target: built on DENSE.
        taps: features wanted (see Decoder.forward), besides the final hidden state.
        store: where to keep what was computed; None = nowhere.
    """

    def __init__(self, target: Decoder, taps: tuple[int, ...], store: Store | None = None) -> None:
        self.target, self.taps, self.store = target, taps, store

    @property
    def width(self) -> int:
        """Numbers kept per position, the final hidden state included."""
        return self.target.feature_width(self.taps) + self.target.config.hidden_size

    @torch.no_grad()
    def __call__(self, rows: Tensor, batch: Packed) -> Captured:
        """What the target makes of a batch.

        Args:
            rows: [B] int64 on the CPU, which rows of the data these are.
            batch: on the target's device.
        """
        kept = None if self.store is None else self.store.get(rows)
        if kept is None:
            kept = self._run(batch)
            if self.store is not None:
                self.store.put(rows, *kept)
        both, best = kept
        width = both.shape[-1] - self.target.config.hidden_size
        return Captured(both[..., :width], both[..., width:], best)

    def _run(self, batch: Packed) -> tuple[Tensor, Tensor]:
        rows = packed_rows(batch.places, batch.documents)
        hidden, features = run_target(self.target, batch.tokens, rows, self.taps)
        flat = hidden.flatten(0, 1)
        best = torch.cat([self.target.logits(h).argmax(-1) for h in torch.split(flat, HEAD_ROWS)])
        both = hidden if features is None else torch.cat((features, hidden), -1)
        return both, best.view(batch.tokens.shape)


class Store:
    """Keeps what was captured of rows, in the device's memory.

    Args:
        rows, length, width: of all the data.
        budget: bytes; rows beyond it are not kept.
    """

    def __init__(
        self,
        rows: int,
        length: int,
        width: int,
        budget: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.room = min(rows, budget // (length * (width * dtype.itemsize + 4)))
        self._full = torch.zeros(rows, dtype=torch.bool)
        self._both = torch.empty(self.room, length, width, dtype=dtype, device=device)
        self._best = torch.empty(self.room, length, dtype=torch.int32, device=device)

    def get(self, rows: Tensor) -> tuple[Tensor, Tensor] | None:
        """What was kept of these rows; None if one is missing."""
        if not bool(self._full[rows].all()):
            return None
        index = rows.to(self._both.device)
        return self._both[index], self._best[index].long()

    def put(self, rows: Tensor, both: Tensor, best: Tensor) -> None:
        """Keep the rows that have room."""
        fits = rows < self.room
        index = rows[fits].to(self._both.device)
        here = fits.to(both.device)
        self._both[index] = both[here]
        self._best[index] = best[here].int()
        self._full[rows[fits]] = True


class DiskStore(Store):
    """The same in one file of a folder, as raw numbers, with a list of the rows that are whole.

    Raises:
        ValueError: the folder holds features of other data or another target.
    """

    def __init__(
        self,
        folder: Path,
        rows: int,
        length: int,
        width: int,
        budget: int,
        dtype: torch.dtype,
        device: torch.device,
        of: str,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._device, self._dtype = device, dtype
        self._list = folder / "features.json"
        self._bytes = length * (width * dtype.itemsize + 4)
        self._shape = (length, width)
        self.room = min(rows, budget // self._bytes)
        self._full = torch.zeros(rows, dtype=torch.bool)
        self._stamp = {"of": of, "rows": rows, "length": length, "width": width}
        self._file = folder / "features.bin"
        if self._list.exists():
            self._continue()
        self._file.touch()
        self._broken = False

    def _continue(self) -> None:
        found = json.loads(self._list.read_text())
        whole = found.pop("whole")
        if found != self._stamp:
            raise ValueError(
                f"{self._list.parent} holds features of {found}, wanted are {self._stamp}; give another --capture-dir "
                "or remove it"
            )
        size = self._file.stat().st_size if self._file.exists() else 0
        for row in whole:
            self._full[row] = (row + 1) * self._bytes <= size

    def get(self, rows: Tensor) -> tuple[Tensor, Tensor] | None:
        """See Store."""
        if not bool(self._full[rows].all()):
            return None
        length, width = self._shape
        parts = []
        with self._file.open("rb") as file:
            for row in rows.tolist():
                file.seek(row * self._bytes)
                parts.append(np.frombuffer(file.read(self._bytes), dtype=np.uint8))
        raw = torch.from_numpy(np.stack(parts))
        split = length * width * self._dtype.itemsize
        both = raw[:, :split].contiguous().view(self._dtype).view(-1, length, width)
        best = raw[:, split:].contiguous().view(torch.int32).view(-1, length)
        return both.to(self._device), best.to(self._device).long()

    def put(self, rows: Tensor, both: Tensor, best: Tensor) -> None:
        """See Store; a disk that is full costs a note and what is not kept is computed again."""
        if self._broken:
            return
        count = rows.shape[0]
        left = both.cpu().contiguous().view(torch.uint8).view(count, -1)
        right = best.int().cpu().contiguous().view(torch.uint8).view(count, -1)
        try:
            with self._file.open("r+b") as file:
                for place, row in enumerate(rows.tolist()):
                    if row < self.room and not self._full[row]:
                        file.seek(row * self._bytes)
                        file.write(left[place].numpy().tobytes() + right[place].numpy().tobytes())
                        file.flush()
                        self._full[row] = True
            self._write_list()
        except OSError as error:
            self._broken = True
            log.warning(
                "%s: %s; %d rows are kept, the others are computed again in every epoch",
                self._file.name,
                error.strerror,
                int(self._full.sum()),
            )

    def _write_list(self) -> None:
        text = json.dumps({**self._stamp, "whole": self._full.nonzero().flatten().tolist()})
        scratch = self._list.with_suffix(".new")
        scratch.write_text(text)
        os.replace(scratch, self._list)
