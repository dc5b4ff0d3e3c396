"""Findings: from evidence to causes, figures and remedies, the most valuable first. Pure functions; nothing is run.

Order: first what makes the figures void or the text wrong, then causes, then settings, then consequences and hints;
within each by what the remedy would gain. A cause goes before its consequences, since with a wrong head every k is too
high.

Invariant: every finding carries a figure and a remedy, and its gain is a factor on tokens per second of at least 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import IntEnum

from foretell.doctor.evidence import Evidence
from foretell.spec.acceptance import break_even, expected_tokens

HARDLY = 1.3  # tokens a step below which a drafter is hardly right
TYPICAL = 0.7  # rate of a drafter that belongs to its target, about
WORTH = 1.05  # gain that is worth a word
BUSY = 0.5  # cores of other processes
CHEAP = 0.1  # of a plain step: what drafting should cost
OTHER = 0.1  # relative difference of predicted and measured that needs an explanation


class Rank(IntEnum):
    """Groups of findings, in order."""

    VOID = 0  # figures that mean nothing, text that is wrong, an engine that does not start
    CAUSE = 1
    SETTING = 2
    HINT = 3


@dataclass(frozen=True, slots=True)
class Finding:
    """One cause.

    Args:
        code: for scripts; see docs/doctor.md.
        gain: tokens per second after the remedy by those now; 1 where it cannot be said.
        figure: the measurement it rests on.
    """

    code: str
    rank: Rank
    title: str
    figure: str
    remedy: str
    gain: float = 1.0

    def as_dict(self) -> dict[str, object]:
        """As JSON can hold it."""
        return {
            "code": self.code,
            "rank": self.rank.name.lower(),
            "title": self.title,
            "figure": self.figure,
            "remedy": self.remedy,
            "gain": round(self.gain, 3),
        }


def diagnose(evidence: Evidence) -> list[Finding]:
    """What is wrong, the most valuable first; empty where nothing is."""
    if evidence.load_error is not None:
        return [_not_loaded(evidence.load_error)]
    checks: list[Callable[[Evidence], Finding | None]] = [_text, _oversubscribed, _memory]
    if evidence.speculates:
        checks += [_vocabulary, _misaligned, _entropy, _template, _slow_drafter]
        checks += [_batch, _too_high, _too_low, _lookup, _plain, _unpredicted, _kinds]
    else:
        checks += [_no_drafter]
    checks += [_small_batch]
    found = [finding for check in checks if (finding := check(evidence)) is not None]
    return _settled(found)


def _settled(found: list[Finding]) -> list[Finding]:
    """In order; what follows from a cause is a hint."""
    causes = any(finding.rank is Rank.CAUSE for finding in found)
    follows = ("k_too_high", "plain_better", "slow_drafter", "ngram_better", "unpredicted")
    settled = [
        replace(f, rank=Rank.HINT) if causes and f.code in follows and f.rank > Rank.CAUSE else f
        for f in found
    ]
    return sorted(settled, key=lambda f: (f.rank, -f.gain))


# Void.


def _not_loaded(error: str) -> Finding:
    low = error.lower()
    if "medusa_num_heads" in low or "medusa" in low:
        remedy = (
            "give the folder of the Medusa heads as speculate_model, with their config.json (medusa_num_heads, "
            "medusa_num_layers) beside the weights; the number of heads is also read from the tensors"
        )
        return Finding("not_loaded", Rank.VOID, "The Medusa heads do not load", error, remedy)
    if "kv cache" in low or "out of memory" in low or "mib" in low:
        remedy = (
            "take the first remedy above that is enough; `foretell plan` tries others beforehand"
        )
        return Finding("out_of_memory", Rank.VOID, "It does not fit into the memory", error, remedy)
    return Finding("not_loaded", Rank.VOID, "It does not load", error, "do what the message says")


def _text(e: Evidence) -> Finding | None:
    if e.same_text is not False:
        return None
    return Finding(
        "text_differs",
        Rank.HINT if e.narrow else Rank.VOID,
        "The text is not that of plain decoding",
        "with and without drafts the same prompts and seeds gave different tokens",
        "on a GPU or in 16 bits near-ties may fall otherwise (compare in float32); if float32 differs too, report it",
    )


def _oversubscribed(e: Evidence) -> Finding | None:
    machine = e.machine
    if machine.accelerator != "cpu":
        return None
    if machine.busy_cores > BUSY:
        free = max(machine.cores - machine.busy_cores, 0.25)
        return Finding(
            "cpu_oversubscribed",
            Rank.VOID,
            "Other processes have the processor",
            f"{machine.busy_cores:.1f} of {machine.cores} cores were kept busy by others during the runs",
            "end them, or give this one cores of its own; speeds measured beside them mean nothing",
            machine.cores / free,
        )
    if machine.threads > machine.cores:
        return Finding(
            "cpu_oversubscribed",
            Rank.VOID,
            "More threads than cores",
            f"torch computes with {machine.threads} threads on {machine.cores} cores",
            f"set OMP_NUM_THREADS={machine.cores}",
            machine.threads / machine.cores,
        )
    return None


def _memory(e: Evidence) -> Finding | None:
    wanted = min(e.rows, e.max_num_seqs) if e.max_num_seqs else e.rows
    if e.preemptions == 0 and (e.room == 0 or e.room >= wanted):
        return None
    figure = f"{e.preemptions} preemptions; {e.room} requests of the longest length fit at once, {wanted} ran"
    remedy = (
        "raise gpu_memory_utilization (or kv_cache_memory_bytes), lower max_num_seqs or max_model_len, draft fewer "
        "tokens, take a smaller drafter; `foretell plan` has the figures"
    )
    gain = wanted / e.room if 0 < e.room < wanted else 1.2
    return Finding("memory_tight", Rank.VOID, "The KV cache is too small", figure, remedy, gain)


# Causes.


def _vocabulary(e: Evidence) -> Finding | None:
    cause = next((c for c in e.causes if c.startswith(("wrong tokenizer", "wrong vocab"))), None)
    if cause is None and e.shared_vocabulary >= 0.9:
        return None
    figure = cause or f"the drafter knows {e.shared_vocabulary:.0%} of the target's tokens"
    return Finding(
        "tokenizer_mismatch",
        Rank.CAUSE,
        "Drafter and target have different tokenizers",
        f"{figure}; {e.length:.2f} tokens a step",
        "use a drafter of the target's own family; others draft through the tokens that both have",
        _aligned_gain(e),
    )


_CAUSES = {
    "wrong layers": ("wrong_layers", "The drafter reads the wrong layers of the target"),
    "wrong residual": ("wrong_residual", "The drafter's residual is read the wrong way"),
    "wrong rope base": ("wrong_rope", "The drafter's rope has the wrong base"),
    "wrong template": ("wrong_template", "The prompt format is not the one it was trained on"),
    "wrong target": ("wrong_target", "The drafter was trained for another target"),
}


def _misaligned(e: Evidence) -> Finding | None:
    for cause in e.causes:
        kind = cause.partition(":")[0]
        if kind in _CAUSES:
            code, title = _CAUSES[kind]
            said, _, rest = cause.partition(": ")
            remedy = rest.partition(" if you ")[2] or rest
            figure = f"{e.length:.2f} tokens a step; {rest if ' if you ' in rest else said}"
            return Finding(code, Rank.CAUSE, title, figure, remedy, _aligned_gain(e))
    length = e.length if e.tested is None else max(e.length, e.tested)
    if _features_ignored(e, length):
        return Finding(
            "features_ignored",
            Rank.CAUSE,
            "The target's features do not help the drafter",
            f"{e.tested:.2f} tokens a step, {e.control:.2f} with the features shuffled among places",
            "it was trained on other features: check the layers it reads and the target it was trained for",
            _aligned_gain(e),
        )
    if length >= HARDLY or e.method in ("ngram", "suffix") or _spread(e):
        return None
    if e.greedy >= HARDLY:
        return None
    return Finding(
        "misaligned",
        Rank.CAUSE,
        "The drafter does not predict this target",
        f"{length:.2f} tokens a step; by position {_percent(e.rates)}",
        "use a drafter distilled or trained for this very target (foretell train), or one from its own family",
        _aligned_gain(e),
    )


def _features_ignored(e: Evidence, length: float) -> bool:
    """Shuffled features do as well as the right ones, and neither does well."""
    if e.control is None or e.tested is None or length >= 2.0:
        return False
    return e.tested > 1.02 and e.tested - e.control < 0.1


def _entropy(e: Evidence) -> Finding | None:
    if e.temperature <= 0 or e.greedy <= 0 or e.greedy < 1.2 * e.length:
        return None
    return Finding(
        "high_entropy",
        Rank.CAUSE,
        "Sampling is too random for drafts",
        f"{e.length:.2f} tokens a step at temperature {e.temperature:g}, {e.greedy:.2f} at 0",
        "lower the temperature or top_p where the task allows; drafts pay most where the target is sure",
        e.greedy / e.length,
    )


def _template(e: Evidence) -> Finding | None:
    if e.template or any(c.startswith("wrong template") for c in e.causes):
        return None
    if e.length >= 2.0 or e.method in ("ngram", "suffix"):
        return None
    return Finding(
        "wrong_template",
        Rank.CAUSE,
        "Prompts go past the model's chat template",
        f"{e.length:.2f} tokens a step on raw text of a chat model",
        "ask through chat (LLM.chat, /v1/chat/completions), or give chat_template; drafters are trained on chats",
        _aligned_gain(e),
    )


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
        f"{asked.nodes - 1} are drafted, {e.length - 1:.2f} accepted; by position {_percent(e.rates)}",
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
    if not _spread(e):
        return None
    low, high = sorted(e.by_kind, key=lambda kind: e.by_kind[kind])[:: len(e.by_kind) - 1]
    return Finding(
        "kind_of_prompt",
        Rank.HINT,
        "It depends on the kind of prompt",
        f"{e.by_kind[high]:.2f} tokens a step on {high}, {e.by_kind[low]:.2f} on {low}",
        f"leave adaptive on; train or tune the drafter on {low}",
    )


def _spread(e: Evidence) -> bool:
    if len(e.by_kind) < 2:
        return False
    return max(e.by_kind.values()) >= max(1.5 * min(e.by_kind.values()), HARDLY)


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


def _aligned_gain(e: Evidence) -> float:
    """Of a drafter that belongs to the target, over the present one."""
    tree = e.costs.trees[e.tree]
    return max(expected_tokens(tree, (TYPICAL,)) / max(e.length, 1.0), 1.0)


def _reach(rates: tuple[float, ...], depth: int) -> float:
    reach = 1.0
    for place in range(depth):
        reach *= rates[min(place, len(rates) - 1)]
    return reach


def _percent(rates: tuple[float, ...]) -> str:
    return ", ".join(f"{rate:.0%}" for rate in rates[:6]) or "nothing"
