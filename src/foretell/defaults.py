"""The sampling defaults that a model brings along, in generation_config.json beside its weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from foretell.sampling_params import SamplingParams

# Their names there -> ours. `do_sample` is not among them: as in vLLM, the temperature alone decides.
_FIELDS: Mapping[str, str] = {
    "repetition_penalty": "repetition_penalty",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "max_new_tokens": "max_tokens",
}


def sampling_defaults(folder: Path) -> SamplingParams:
    """SamplingParams' own defaults, changed by what the model's folder says; a GGUF file says nothing.

    Raises:
        ValueError: the file is not what it should be, or a value is out of range; names the file.
    """
    path = folder / "generation_config.json"
    if not path.is_file():
        return SamplingParams()
    try:
        given = json.loads(path.read_text("utf-8"))
        if not isinstance(given, dict):
            raise ValueError("it is not a JSON object")
        values = {
            ours: given[theirs] for theirs, ours in _FIELDS.items() if given.get(theirs) is not None
        }
        return SamplingParams(**values)
    except ValueError as error:
        raise ValueError(
            f"{path} cannot be used: {error} Repair it, or remove it to use plain defaults."
        ) from error
