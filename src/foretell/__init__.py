"""foretell: an LLM inference engine whose core is speculative decoding."""

from foretell.config import DraftModel, Eagle, EngineConfig, Medusa, Ngram
from foretell.llm import LLM
from foretell.outputs import CompletionOutput, Logprob, RequestOutput
from foretell.sampling_params import RequestOutputKind, SamplingParams

__all__ = [
    "LLM",
    "CompletionOutput",
    "DraftModel",
    "Eagle",
    "EngineConfig",
    "Logprob",
    "Medusa",
    "Ngram",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
]
