"""The progress bar of a batch, in the words and with the switch (`use_tqdm`) that users of vLLM know."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self


class Progress:
    """One bar: finished prompts, and tokens per second read and written.

    Args:
        use_tqdm: False = none; True = tqdm on stderr, if that is a terminal; or a function with tqdm's arguments.
        total: number of prompts.
    """

    def __init__(self, use_tqdm: bool | Callable[..., Any], total: int) -> None:
        self._bar = _bar(use_tqdm, total)
        self._start = time.monotonic()
        self._read = self._written = 0

    def finished(self, prompt_tokens: int, generated_tokens: int) -> None:
        """One prompt is done."""
        if self._bar is None:
            return
        self._read += prompt_tokens
        self._written += generated_tokens
        seconds = max(time.monotonic() - self._start, 1e-9)
        self._bar.set_postfix_str(
            f"est. speed input: {self._read / seconds:.2f} toks/s, output: {self._written / seconds:.2f} toks/s",
            refresh=False,
        )
        self._bar.update(1)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()


def _bar(use_tqdm: bool | Callable[..., Any], total: int) -> Any:
    if use_tqdm is False:
        return None
    words = {"total": total, "desc": "Processed prompts", "dynamic_ncols": True}
    if callable(use_tqdm):
        return use_tqdm(**words)
    from tqdm.auto import tqdm  # type: ignore[import-untyped]

    return tqdm(disable=None, **words)
