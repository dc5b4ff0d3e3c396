"""The doctor's words: one table of figures, then the findings. Prints what evidence and findings hold, nothing else."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from foretell.doctor.evidence import Evidence
from foretell.doctor.findings import Finding, Rank
from foretell.spec.acceptance import break_even


def show(console: Console, evidence: Evidence, findings: Sequence[Finding]) -> None:
    """For people."""
    if evidence.load_error is None:
        console.print(_figures(evidence))
    serious = [f for f in findings if f.rank is not Rank.HINT]
    if not serious:
        console.print("Nothing is wrong.")
    for place, finding in enumerate(findings, start=1):
        gain = f" (about {finding.gain:.2f} times as fast)" if finding.gain >= 1.02 else ""
        console.print(f"[bold]{place}. {escape(finding.title)}[/bold] \\[{finding.code}]{gain}")
        console.print(f"   {escape(finding.figure)}")
        console.print(f"   What to do: {escape(finding.remedy)}")


def _figures(e: Evidence) -> Table:
    table = Table(title=f"{e.checkpoint or e.method}, {e.rows} at once", title_justify="left")
    table.add_column("measure")
    table.add_column("value", justify="right")
    table.add_row("tokens/s without drafts", f"{e.plain.per_second:.1f}")
    if e.speculates:
        for name, value in _speculation(e):
            table.add_row(name, value)
    table.add_row("tokens a step by n-gram lookup, in these texts", f"{e.ngram:.2f}")
    return table


def _speculation(e: Evidence) -> list[tuple[str, str]]:
    plain, now = e.costs.seconds(e.rows, e.costs.plain), e.costs.seconds(e.rows, e.tree)
    draft = e.costs.draft_seconds(e.rows, e.tree)
    even = break_even(e.costs, e.rows, e.tree)
    asked, best = e.costs.trees[e.tree], e.costs.trees[e.best]
    rows = [
        ("tokens/s with drafts", f"{e.drafted.per_second:.1f}"),
        ("speed-up of decode steps, measured", f"{e.measured_speedup:.2f}"),
        ("speed-up of decode steps, predicted", f"{e.predicted_speedup:.2f}"),
        ("tokens a step", f"{e.length:.2f}"),
        ("acceptance by position", ", ".join(f"{rate:.0%}" for rate in e.rates[:8]) or "none"),
        ("a plain step, ms", f"{plain * 1e3:.2f}"),
        (f"a step with {asked.nodes - 1} drafted tokens, ms", f"{now * 1e3:.2f}"),
        ("of it drafting, ms", f"{draft * 1e3:.2f}" if draft else "not timed apart"),
        ("acceptance where it breaks even", "never" if even is None else f"{even:.0%}"),
        ("best number of drafted tokens here", f"{best.nodes - 1}"),
        ("same text as without drafts", {True: "yes", False: "NO", None: "-"}[e.same_text]),
    ]
    rows += [(f"tokens a step on {kind}", f"{value:.2f}") for kind, value in e.by_kind.items()]
    if e.control is not None and e.tested is not None:
        rows.append(("self-test / with shuffled features", f"{e.tested:.2f} / {e.control:.2f}"))
    return rows


def as_dict(evidence: Evidence, findings: Sequence[Finding]) -> dict[str, object]:
    """The same as JSON can hold it."""
    e = evidence
    data: dict[str, object] = {
        "method": e.method,
        "checkpoint": e.checkpoint,
        "rows": e.rows,
        "temperature": e.temperature,
        "load_error": e.load_error,
        "healthy": all(f.rank is Rank.HINT for f in findings),
        "findings": [finding.as_dict() for finding in findings],
        "tokens_per_s_plain": round(e.plain.per_second, 3),
        "ngram_tokens_per_step": round(e.ngram, 4),
        "busy_cores": round(e.machine.busy_cores, 2),
    }
    if e.load_error is None and e.speculates:
        data |= {
            "tokens_per_s": round(e.drafted.per_second, 3),
            "speedup_measured": round(e.measured_speedup, 4),
            "speedup_predicted": round(e.predicted_speedup, 4),
            "tokens_per_step": round(e.length, 4),
            "rates": [round(rate, 4) for rate in e.rates],
            "by_kind": {kind: round(value, 4) for kind, value in e.by_kind.items()},
            "break_even": break_even(e.costs, e.rows, e.tree),
            "same_text": e.same_text,
            "preemptions": e.preemptions,
            "costs": e.costs.as_json(),
        }
    return data
