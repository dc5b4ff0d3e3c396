"""What makes figures void, and causes: checks of evidence, each a pure function. Settings are findings.py's."""

from __future__ import annotations

from foretell.doctor.evidence import Evidence
from foretell.doctor.finding import Finding, Rank, percent
from foretell.spec.acceptance import expected_tokens

HARDLY = 1.3  # tokens a step below which a drafter is hardly right
TYPICAL = 0.7  # rate of a drafter that belongs to its target, about
BUSY = 0.5  # cores of other processes

# Void.


def not_loaded(error: str) -> Finding:
    """The engine did not start."""
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


def text(e: Evidence) -> Finding | None:
    """Drafts changed the text."""
    if e.same_text is not False:
        return None
    return Finding(
        "text_differs",
        Rank.HINT if e.narrow else Rank.VOID,
        "The text is not that of plain decoding",
        "with and without drafts the same prompts and seeds gave different tokens",
        "on a GPU or in 16 bits near-ties may fall otherwise (compare in float32); if float32 differs too, report it",
    )


def oversubscribed(e: Evidence) -> Finding | None:
    """Others have the processor."""
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


def memory(e: Evidence) -> Finding | None:
    """Too little KV cache."""
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


def vocabulary(e: Evidence) -> Finding | None:
    """Another tokenizer."""
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


def misaligned(e: Evidence) -> Finding | None:
    """The drafter does not predict the target: by the start-up proof, by its control, or for no reason known."""
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
    if length >= HARDLY or e.method in ("ngram", "suffix") or spread(e):
        return None
    if e.greedy >= HARDLY:
        return None
    return Finding(
        "misaligned",
        Rank.CAUSE,
        "The drafter does not predict this target",
        f"{length:.2f} tokens a step; by position {percent(e.rates)}",
        "use a drafter distilled or trained for this very target (foretell train), or one from its own family",
        _aligned_gain(e),
    )


def _features_ignored(e: Evidence, length: float) -> bool:
    """Shuffled features do as well as the right ones, and neither does well."""
    if e.control is None or e.tested is None or length >= 2.0:
        return False
    return e.tested > 1.02 and e.tested - e.control < 0.1


def entropy(e: Evidence) -> Finding | None:
    """Sampling that no draft can follow."""
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


def template(e: Evidence) -> Finding | None:
    """Prompts past the chat template."""
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


def spread(e: Evidence) -> bool:
    """Acceptance differs much between kinds of prompts."""
    if len(e.by_kind) < 2:
        return False
    return max(e.by_kind.values()) >= max(1.5 * min(e.by_kind.values()), HARDLY)


def _aligned_gain(e: Evidence) -> float:
    """Of a drafter that belongs to the target, over the present one."""
    tree = e.costs.trees[e.tree]
    return max(expected_tokens(tree, (TYPICAL,)) / max(e.length, 1.0), 1.0)
