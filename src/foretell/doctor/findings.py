"""Findings: from evidence to causes, figures and remedies, the most valuable first. Pure functions; nothing is run.

Order: first what makes the figures void or the text wrong, then causes, then settings, then consequences and hints;
within each by what the remedy would gain. A cause goes before its consequences, since with a wrong head every k is too
high.

Invariant: every finding carries a figure and a remedy, and its gain is a factor on tokens per second of at least 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from foretell.doctor import causes
from foretell.doctor.evidence import Evidence
from foretell.doctor.finding import Finding, Rank, percent
from foretell.spec.acceptance import break_even

WORTH = 1.05  # gain that is worth a word
CHEAP = 0.1  # of a plain step: what drafting should cost
OTHER = 0.1  # relative difference of predicted and measured that needs an explanation

__all__ = ["Finding", "Rank", "diagnose"]


def diagnose(evidence: Evidence) -> list[Finding]:
    """What is wrong, the most valuable first; empty where nothing is."""
    if evidence.load_error is not None:
        return [causes.not_loaded(evidence.load_error)]
    checks: list[Callable[[Evidence], Finding | None]] = [
        causes.text,
        causes.oversubscribed,
        causes.memory,
    ]
    if evidence.speculates:
        checks += [causes.vocabulary, causes.misaligned, causes.entropy, causes.template]
        checks += [
            _slow_drafter,
            _batch,
            _too_high,
            _too_low,
            _lookup,
            _plain,
            _unpredicted,
            _kinds,
        ]
    else:
        checks += [_no_drafter]
    checks += [_small_batch]
    found = [finding for check in checks if (finding := check(evidence)) is not None]
    return _settled(found)


def _settled(found: list[Finding]) -> list[Finding]:
    """In order; what follows from a cause is a hint."""
    caused = any(finding.rank is Rank.CAUSE for finding in found)
    follows = ("k_too_high", "plain_better", "slow_drafter", "ngram_better", "unpredicted")
    settled = [
        replace(f, rank=Rank.HINT) if caused and f.code in follows and f.rank > Rank.CAUSE else f
        for f in found
    ]
    return sorted(settled, key=lambda f: (f.rank, -f.gain))


# Settings.


def _slow_drafter(e: Evidence) -> Finding | None:
    plain = e.costs.seconds(e.rows, e.costs.plain)
    draft = e.costs.draft_seconds(e.rows, e.tree)
    now = e.costs.seconds(e.rows, e.tree)
    cheap = CHEAP * plain
    if draft <= 2 * cheap or draft < 0.3 * now:
        return None
    gain = now / (now - draft + cheap)
    even = break_even(e.costs, e.rows, e.tree)
    needs = "never pays" if even is None else f"pays from an acceptance of {even:.0%}"
    have = e.rates[0] if e.rates else 0.0
    return Finding(
        "slow_drafter",
        Rank.SETTING,
        "The drafter is too slow for its acceptance",
        f"drafting takes {draft / now:.0%} of a step ({draft / plain:.2f} plain steps); it {needs}, it has {have:.0%}",
        "use a drafter of about a tenth of the target, a head (EAGLE, Medusa) or ngram; or draft fewer tokens",
        gain,
    )


def _batch(e: Evidence) -> Finding | None:
    if e.rows < 8 or e.best != e.costs.plain or not any(b == 1 for b, _ in e.costs.cells):
        return None
    alone = replace(e, rows=1)
    if alone.best == e.costs.plain:
        return None
    return Finding(
        "batch_too_large",
        Rank.SETTING,
        "The batch leaves no room for drafts",
        f"alone a request gains {alone.speed(alone.best) / alone.speed(e.costs.plain):.2f} times; of {e.rows} at once "
        f"plain decoding is {e.speed(e.costs.plain) / e.speed(e.tree):.2f} times as fast as drafting",
        "leave adaptive on, which decodes plainly at such load; for latency lower max_num_seqs",
        e.speed(e.costs.plain) / e.speed(e.tree),
    )


def _too_high(e: Evidence) -> Finding | None:
    best, gain = e.best, e.speed(e.best) / e.speed(e.tree)
    if best in (e.tree, e.costs.plain) or gain < WORTH:
        return None
    asked, better = e.costs.trees[e.tree], e.costs.trees[best]
    return Finding(
        "k_too_high",
        Rank.SETTING,
        "Too many tokens are drafted",
        f"{asked.nodes - 1} are drafted, {e.length - 1:.2f} accepted; by position {percent(e.rates)}",
        f"set num_speculative_tokens={better.depth} (or leave adaptive on)",
        gain,
    )


def _too_low(e: Evidence) -> Finding | None:
    """Beyond what was asked for: the last depth's rate goes on, and so does what a further token costs."""
    asked = e.costs.trees[e.tree]
    if e.best != e.tree or not asked.is_chain or not e.rates or asked.depth >= 16:
        return None
    now = e.costs.seconds(e.rows, e.tree)
    smaller = max(
        (t for t in range(len(e.costs.trees)) if t != e.tree),
        key=lambda t: e.costs.trees[t].nodes,
    )
    less = e.costs.trees[smaller]
    slope = max(now - e.costs.seconds(e.rows, smaller), 0.0) / (asked.depth - less.depth)
    reach, length, best = _reach(e.rates, asked.depth), e.length, (1.0, asked.depth)
    for depth in range(asked.depth + 1, 17):
        reach *= e.rates[-1]
        length += reach
        gain = length / e.length * now / (now + slope * (depth - asked.depth))
        best = max(best, (gain, depth))
    gain, depth = best
    if gain < WORTH:
        return None
    return Finding(
        "k_too_low",
        Rank.SETTING,
        "More tokens could be drafted",
        f"of drafts that get to the last of {asked.depth} tokens {e.rates[-1]:.0%} are right there too",
        f"set num_speculative_tokens={depth}",
        gain,
    )


def _lookup(e: Evidence) -> Finding | None:
    if e.ngram <= 0 or e.method in ("ngram", "suffix"):
        return None
    plain = e.costs.seconds(e.rows, e.costs.plain)
    draft = e.costs.draft_seconds(e.rows, e.tree)
    verify = max(e.costs.seconds(e.rows, e.tree) - draft, plain)
    gain = e.rows * e.ngram / verify / e.speed(e.tree)
    if gain < WORTH:
        return None
    return Finding(
        "ngram_better",
        Rank.SETTING,
        "Looking up n-grams would do better",
        f"{e.ngram:.2f} tokens a step by lookup in these texts, {e.length:.2f} by the drafter",
        "set method='ngram' (or 'suffix'), or chain them: method=['suffix', ...]",
        gain,
    )


# Consequences and hints.


def _plain(e: Evidence) -> Finding | None:
    gain = e.speed(e.costs.plain) / e.speed(e.tree)
    if gain < 1.02:
        return None
    even = break_even(e.costs, e.rows, e.tree)
    needs = (
        "no acceptance makes up for its cost"
        if even is None
        else f"it would need {even:.0%} acceptance"
    )
    have = e.rates[0] if e.rates else 0.0
    return Finding(
        "plain_better",
        Rank.HINT,
        "Plain decoding would be faster",
        f"a step costs {e.costs.seconds(e.rows, e.tree) / e.costs.seconds(e.rows, e.costs.plain):.2f} plain ones and "
        f"brings {e.length:.2f} tokens; {needs}, it has {have:.0%}",
        "leave adaptive on (it decodes plainly then), or leave the drafter out",
        gain,
    )


def _unpredicted(e: Evidence) -> Finding | None:
    predicted, measured = e.predicted_speedup, e.measured_speedup
    if measured <= 0 or abs(predicted - measured) <= OTHER * measured:
        return None
    return Finding(
        "unpredicted",
        Rank.HINT,
        "The speed is not what costs and acceptance predict",
        f"predicted {predicted:.2f} times plain decoding, measured {measured:.2f}",
        "time goes elsewhere: prompts, the host, other processes; run longer, on a quiet machine",
    )


def _kinds(e: Evidence) -> Finding | None:
    if not causes.spread(e):
        return None
    low, high = sorted(e.by_kind, key=lambda kind: e.by_kind[kind])[:: len(e.by_kind) - 1]
    return Finding(
        "kind_of_prompt",
        Rank.HINT,
        "It depends on the kind of prompt",
        f"{e.by_kind[high]:.2f} tokens a step on {high}, {e.by_kind[low]:.2f} on {low}",
        f"leave adaptive on; train or tune the drafter on {low}",
    )


def _no_drafter(e: Evidence) -> Finding | None:
    if e.method != "none" or e.ngram < 1.2:
        return None
    return Finding(
        "no_drafter",
        Rank.HINT,
        "Nothing is drafted",
        f"a lookup of n-grams alone would bring {e.ngram:.2f} tokens a step in these texts",
        "set speculate_model='ngram', num_speculative_tokens=7",
        e.ngram,
    )


def _small_batch(e: Evidence) -> Finding | None:
    larger = sorted({b for b, _ in e.costs.cells if b > e.rows})
    if not larger or e.rows >= 8:
        return None
    bucket = larger[-1]
    tree = e.best if e.speculates else e.costs.plain
    now, then = e.speed(tree), replace(e, rows=bucket).speed(tree)
    if then < 2 * now:
        return None
    return Finding(
        "batch_too_small",
        Rank.HINT,
        "More requests at once would cost little",
        f"{e.rows} at once: {now:.0f} tokens/s; {bucket} at once: {then:.0f}",
        "send requests together, if there are more of them",
        then / now,
    )


def _reach(rates: tuple[float, ...], depth: int) -> float:
    reach = 1.0
    for place in range(depth):
        reach *= rates[min(place, len(rates) - 1)]
    return reach
