"""Which model is served: the one named, or the target of it, if it is a drafter in speculators' format."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

log = logging.getLogger("foretell")


@dataclass(frozen=True, slots=True)
class Served:
    """LLM's arguments, with the target as the model."""

    model: str | None
    revision: str | None
    speculative_config: Mapping[str, object] | None


def serve_target(
    model: str | None,
    revision: str | None,
    speculate_model: str | None,
    speculative_config: Mapping[str, object] | None,
) -> Served:
    """The arguments as they are, or with a drafter that was given as the model in its own place.

    Raises:
        ValueError: the drafter names no target, or another drafter was given besides.
    """
    # Here, so that importing foretell needs no torch.
    from foretell.model.hub import config_folder
    from foretell.spec.checkpoint.recognise import is_speculators, verifier_of
    from foretell.spec.checkpoint.source import read_config

    folder = config_folder(model, revision) if isinstance(model, str) and model.strip() else None
    config = {} if folder is None else read_config(folder)
    if model is None or not is_speculators(config):
        return Served(model, revision, speculative_config)
    target = verifier_of(config)
    if target is None:
        raise ValueError(
            f"model {model!r} is a drafter, and its config.json names no verifier; give the target as model and "
            f"speculate_model={model!r}"
        )
    given = dict(speculative_config or {})
    if speculate_model is not None or given.get("model") is not None:
        raise ValueError(
            f"model {model!r} is a drafter for {target!r}, but another drafter was given too; give model={target!r}, "
            "or leave the other one out"
        )
    log.info("model %s is a drafter: serving its target %s with it", model, target)
    return Served(target, None, {**given, "model": model, "revision": revision})
