"""One live server for the tests that leave it as it was."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("llguidance")
pytest.importorskip("openai")

from serving_lab import Live, start


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    """A server with a drafter that is always right; nothing may leak from a module's tests."""
    server = start(max_body_bytes=1 << 20, body_timeout=2.0)
    yield server
    server.idle()
    server.close()
