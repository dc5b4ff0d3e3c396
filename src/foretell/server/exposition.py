"""The engine's counters in Prometheus' text format, under vLLM's names.

Invariant: the numbers are those of `llm.get_metrics()`; nothing is counted here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector, CollectorRegistry

from foretell.metrics import Histogram, Metrics

LABELS = ("model_name", "engine")
HISTOGRAMS = (
    ("time_to_first_token_seconds", "time_to_first_token", "From arrival to the first token."),
    ("inter_token_latency_seconds", "inter_token_latency", "Between two outputs of a request."),
    (
        "request_time_per_output_token_seconds",
        "time_per_output_token",
        "Decode time over the tokens after the first.",
    ),
    ("e2e_request_latency_seconds", "e2e_latency", "From arrival to the end."),
    ("request_queue_time_seconds", "queue_time", "From arrival to the first admission."),
    ("request_prefill_time_seconds", "prefill_time", "From admission to the first token."),
    ("request_decode_time_seconds", "decode_time", "From the first token to the last."),
    ("request_inference_time_seconds", "inference_time", "From admission to the end."),
    ("request_prompt_tokens", "prompt_tokens", "Tokens of prompts."),
    ("request_generation_tokens", "generation_tokens", "Tokens of answers."),
    ("request_params_max_tokens", "max_tokens", "max_tokens of requests."),
    ("request_params_n", "n", "n of requests."),
)


class EngineCollector(Collector):
    """Reads the counters when it is scraped.

    Args:
        read: the counters now.
        prefix: of every name.
        speculates: the engine drafts; else the counters of speculation are left out, as in vLLM.
        cache: facts on the KV cache.
    """

    def __init__(
        self,
        read: Callable[[], Metrics],
        prefix: str,
        model: str,
        speculates: bool,
        cache: dict[str, str],
    ) -> None:
        self._read = read
        self._prefix = prefix
        self._labels = (model, "0")
        self._speculates = speculates
        self._cache = cache

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client."""
        now = self._read()
        yield from self._gauges(now)
        yield from self._counters(now)
        if self._speculates:
            yield from self._speculation(now)
        for name, field, said in HISTOGRAMS:
            yield self._histogram(name, said, getattr(now.histograms, field))

    def _gauges(self, now: Metrics) -> Iterator[Metric]:
        state = now.state
        yield self._gauge("num_requests_running", "Requests that run.", state.running)
        yield self._gauge("num_requests_waiting", "Requests that wait.", state.waiting)
        yield self._gauge("kv_cache_usage_perc", "Share of KV blocks in use.", state.kv_cache_usage)
        names = (*LABELS, *self._cache)
        info = GaugeMetricFamily(
            f"{self._prefix}cache_config_info", "Facts on the KV cache.", labels=names
        )
        info.add_metric((*self._labels, *self._cache.values()), 1.0)
        yield info

    def _counters(self, now: Metrics) -> Iterator[Metric]:
        count = self._counter
        yield count("prompt_tokens", "Prompt tokens admitted.", now.prompt_tokens)
        yield count("prompt_tokens_cached", "Of these, cached.", now.cached_prompt_tokens)
        yield count("generation_tokens", "Tokens emitted.", now.generation_tokens)
        yield count("prefix_cache_queries", "Tokens looked up.", now.prefix_cache_queries)
        yield count("prefix_cache_hits", "Tokens found.", now.prefix_cache_hits)
        yield count("num_preemptions", "Preemptions.", now.preemptions)
        yield count("corrupted_requests", "Requests with NaN logits.", now.corrupted_requests)
        ended = CounterMetricFamily(
            f"{self._prefix}request_success",
            "Requests by how they ended.",
            labels=(*LABELS, "finished_reason"),
        )
        for reason in ("stop", "length", "abort", "error"):
            ended.add_metric((*self._labels, reason), getattr(now.finished, reason))
        yield ended

    def _speculation(self, now: Metrics) -> Iterator[Metric]:
        count, prefix = self._counter, "spec_decode_num_"
        yield count(f"{prefix}drafts", "Verifications with a draft.", now.num_drafts)
        yield count(f"{prefix}draft_tokens", "Drafted tokens.", now.num_draft_tokens)
        yield count(f"{prefix}accepted_tokens", "Of these, emitted.", now.num_accepted_tokens)
        places = CounterMetricFamily(
            f"{self._prefix}{prefix}accepted_tokens_per_pos",
            "Drafts accepted up to a place.",
            labels=(*LABELS, "position"),
        )
        for place, value in enumerate(now.num_accepted_tokens_per_pos):
            places.add_metric((*self._labels, str(place)), value)
        yield places
        yield count(
            "spec_decode_num_fallbacks",
            "Requests that went on without drafts because the drafter failed for them.",
            now.drafter_fallbacks,
        )

    def _gauge(self, name: str, said: str, value: float) -> Metric:
        family = GaugeMetricFamily(self._prefix + name, said, labels=LABELS)
        family.add_metric(self._labels, value)
        return family

    def _counter(self, name: str, said: str, value: float) -> Metric:
        family = CounterMetricFamily(self._prefix + name, said, labels=LABELS)
        family.add_metric(self._labels, value)
        return family

    def _histogram(self, name: str, said: str, values: Histogram) -> Metric:
        family = HistogramMetricFamily(self._prefix + name, said, labels=LABELS)
        total, buckets = 0, []
        for bound, count in zip((*values.bounds, float("inf")), values.counts, strict=True):
            total += count
            buckets.append(("+Inf" if bound == float("inf") else str(bound), float(total)))
        family.add_metric(self._labels, buckets, values.total)
        return family


def exposition(collector: EngineCollector) -> bytes:
    """The text of /metrics."""
    registry = CollectorRegistry()
    registry.register(collector)
    return generate_latest(registry)
