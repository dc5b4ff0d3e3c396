"""Ctrl-C between steps instead of in the middle of one, where it would leave the engine's books half written."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def held() -> Iterator[None]:
    """Holds SIGINT back until the block has ended, then raises KeyboardInterrupt; a second one goes through at once.

    Does nothing outside the main thread, or where the program handles SIGINT itself.
    """
    own = threading.current_thread() is threading.main_thread()
    if not own or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    came = False

    def remember(number: int, frame: FrameType | None) -> None:
        nonlocal came
        if came:
            signal.default_int_handler(number, frame)
        came = True

    signal.signal(signal.SIGINT, remember)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if came:
        raise KeyboardInterrupt
