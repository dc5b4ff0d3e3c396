"""foretell: an LLM inference engine whose core is speculative decoding."""

from foretell.config import Chained, DraftCheckpoint, EngineConfig, GrownTree, Ngram, Suffix
from foretell.llm import LLM
from foretell.outputs import CompletionOutput, Logprob, RequestOutput
from foretell.sampling_params import RequestOutputKind, SamplingParams
from foretell.structured_outputs import StructuredOutputsParams

__all__ = [
    "LLM",
    "Chained",
    "CompletionOutput",
    "DraftCheckpoint",
    "EngineConfig",
    "GrownTree",
    "Logprob",
    "Ngram",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
    "Suffix",
]
