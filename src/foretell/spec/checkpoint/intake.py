"""Intake: takes tensors out of a checkpoint by name, checked, and sees to it that none is left over.

Invariant: after `close` every tensor of the checkpoint was used or put aside for a stated reason. A tensor that is
missing, has another shape, or holds a number that is not finite is refused by its name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from difflib import get_close_matches

import torch
from torch import Tensor

from foretell.spec.checkpoint.source import Checkpoint


class Intake:
    """What is still to be read of a checkpoint.

    Args:
        checkpoint: where tensors come from.
        dtype, device: what floating-point tensors are turned into.
        rename: the name a reader knows for each name in the file; None leaves the tensor out of sight.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device,
        rename: Callable[[str], str | None] = lambda name: name,
    ) -> None:
        self.checkpoint = checkpoint
        self.dtype, self.device = dtype, device
        self.notes: list[str] = []
        self._names: dict[str, str] = {}
        for name in checkpoint.shapes:
            known = rename(name)
            if known is None:
                continue
            if known in self._names:
                raise ValueError(
                    f"{checkpoint.name}: tensors {self._names[known]!r} and {name!r} mean the same ({known}); "
                    "keep one of them"
                )
            self._names[known] = name
        self._left = dict(self._names)

    def __contains__(self, name: str) -> bool:
        return name in self._names

    @property
    def names(self) -> Sequence[str]:
        """All names, as readers know them."""
        return tuple(self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor that must be there."""
        return self.checkpoint.shapes[self._original(name)]

    def note(self, message: str) -> None:
        """Remember a decision, to be printed once."""
        self.notes.append(message)

    def refuse(self, message: str) -> ValueError:
        """An error about this checkpoint."""
        return ValueError(f"{self.checkpoint.name}: {message}")

    def take(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor of that shape, as `dtype` (default: the intake's).

        Raises:
            ValueError: it is missing, mis-shaped or not finite.
        """
        tensor = self._raw(name, shape)
        if not bool(torch.isfinite(tensor).all()):
            raise self.refuse(
                f"tensor {self._names[name]!r} holds NaN or infinity; the file is damaged or its training diverged"
            )
        return tensor.to(device=self.device, dtype=dtype or self.dtype)

    def take_numbers(self, name: str, *shape: int) -> Tensor:
        """A tensor of whole numbers or flags, as int64 on the CPU."""
        tensor = self._raw(name, shape)
        if tensor.is_floating_point():
            raise self.refuse(
                f"tensor {self._names[name]!r} must hold whole numbers, got {tensor.dtype}"
            )
        return tensor.to(device="cpu", dtype=torch.int64)

    def put_aside(self, names: Sequence[str], why: str) -> None:
        """Leave tensors unused for a reason."""
        dropped = [name for name in names if self._left.pop(name, None) is not None]
        if dropped:
            shown = ", ".join(dropped[:3]) + (" ..." if len(dropped) > 3 else "")
            self.note(f"not used: {shown} ({why})")

    def close(self, known: str) -> None:
        """Refuse whatever was not taken.

        Args:
            known: what the tensors of this family look like, for the message.

        Raises:
            ValueError: a tensor is left.
        """
        if self._left:
            first = next(iter(self._left.values()))
            raise self.refuse(
                f"unknown tensor {first!r} ({len(self._left)} unknown in all); a drafter that ignored it would not be "
                f"the one that was trained. Expected {known}"
            )

    def _raw(self, name: str, shape: tuple[int, ...]) -> Tensor:
        original = self._original(name)
        found = self.checkpoint.shapes[original]
        if found != shape:
            raise self.refuse(
                f"tensor {original!r} has shape {list(found)}, expected {list(shape)}; is this the drafter of "
                "another target?"
            )
        self._left.pop(name, None)
        return self.checkpoint.read(original)

    def _original(self, name: str) -> str:
        if name not in self._names:
            near = get_close_matches(name, self._names, n=1)
            hint = f"; the nearest is {near[0]!r}" if near else ""
            raise self.refuse(
                f"tensor {name!r} is missing{hint}; fetch the checkpoint again or export it whole"
            )
        return self._names[name]
