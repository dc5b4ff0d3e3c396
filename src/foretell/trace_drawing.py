"""Draws a draft tree, with what was accepted of it: a layout of dots and lines, written as SVG here or as PNG by
matplotlib. Knows places and rates, no engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

from foretell.trace import Place, PlaceCount, Summary

ACROSS, DOWN, RADIUS, MARGIN, HEAD = 30.0, 64.0, 11.0, 30.0, 34.0  # in pixels
NEVER, ALWAYS = (
    (0xE6, 0xE9, 0xEF),
    (0x1B, 0x7F, 0x5C),
)  # colours of nothing and of everything accepted
PLAIN = "#c9d4e3"  # of a tree without counts
INK = "#1f2933"


@dataclass(frozen=True, slots=True)
class Dot:
    """A node on paper."""

    place: Place
    x: float
    y: float
    fill: str
    label: str
    dark: bool  # the label is light
    about: str  # for who points at it


@dataclass(frozen=True, slots=True)
class Drawing:
    """What is drawn; lines join dots by index."""

    title: str
    width: float
    height: float
    dots: tuple[Dot, ...]
    lines: tuple[tuple[int, int], ...]


def draw_tree(places: Sequence[Place], title: str) -> Drawing:
    """A tree without counts: every node shows its rank."""
    return _draw(places, title, {})


def draw_summary(summary: Summary, title: str, least: int = 1) -> Drawing:
    """A tree with the share of accepted drafts at every node.

    Args:
        least: places drafted fewer times are left out (grown trees have many).

    Raises:
        ValueError: no place is left.
    """
    kept = {place: count for place, count in summary.places.items() if count.drafted >= least}
    known = {place for place in kept if all(place[:i] in kept for i in range(1, len(place)))}
    if not known:
        raise ValueError(
            f"the trace has {summary.steps} steps and no node that was drafted {least} times; trace more, or lower "
            "--least"
        )
    said = (
        f"{title}: {summary.accepted_length:.2f} tokens a step over {summary.steps} steps "
        f"({len(known)} nodes)"
    )
    return _draw(sorted(known), said, kept)


def _draw(places: Sequence[Place], title: str, counts: Mapping[Place, PlaceCount]) -> Drawing:
    tree = [(), *sorted({place for place in places if place})]
    columns = _columns(tree)
    dots = []
    for place in tree:
        count = counts.get(place)
        rate = None if count is None else count.rate
        dots.append(
            Dot(
                place=place,
                x=MARGIN + columns[place] * ACROSS,
                y=HEAD + MARGIN + len(place) * DOWN,
                fill=PLAIN if rate is None else _mix(rate),
                label=_label(place, rate),
                dark=rate is not None and rate > 0.55,
                about=_about(place, count),
            )
        )
    index = {place: i for i, place in enumerate(tree)}
    lines = tuple((index[place[:-1]], index[place]) for place in tree if place)
    depth = max(map(len, tree))
    width = max(2 * MARGIN + max(columns.values()) * ACROSS, 7.0 * len(title) + 2 * MARGIN)
    return Drawing(title, width, HEAD + 2 * MARGIN + depth * DOWN, tuple(dots), lines)


def _columns(tree: Sequence[Place]) -> dict[Place, float]:
    """Leaves side by side, every other node over the middle of its children."""
    children: dict[Place, list[Place]] = {place: [] for place in tree}
    for place in tree:
        if place:
            children[place[:-1]].append(place)
    columns: dict[Place, float] = {}
    leaves = 0
    for place in tree:  # sorted: leaves from left to right
        if not children[place]:
            columns[place] = float(leaves)
            leaves += 1
    for place in sorted(tree, key=len, reverse=True):
        if children[place]:
            below = [columns[child] for child in children[place]]
            columns[place] = (below[0] + below[-1]) / 2
    return columns


def _label(place: Place, rate: float | None) -> str:
    if not place:
        return ""
    return str(place[-1]) if rate is None else f"{100 * rate:.0f}"


def _about(place: Place, count: PlaceCount | None) -> str:
    if not place:
        return "the last committed token"
    where = f"place {'.'.join(map(str, place))}"
    if count is None:
        return where
    mean = count.probability / count.drafted
    return (
        f"{where}: {count.accepted} of {count.drafted} accepted ({100 * count.rate:.1f} %), the target's mean "
        f"probability {mean:.3f}"
    )


def _mix(rate: float) -> str:
    share = min(max(rate, 0.0), 1.0) ** 0.7  # small rates differ visibly
    values = (round(a + (b - a) * share) for a, b in zip(NEVER, ALWAYS, strict=True))
    return "#" + "".join(f"{value:02x}" for value in values)


def save_drawing(drawing: Drawing, path: Path) -> None:
    """Write the drawing, as the file's name says: .svg or .png.

    Raises:
        ValueError: another kind of file.
        ImportError: a PNG is wanted and matplotlib is missing.
    """
    match path.suffix.lower():
        case ".svg":
            path.write_text(to_svg(drawing), encoding="utf-8")
        case ".png":
            _save_png(drawing, path)
        case other:
            raise ValueError(f"trees are drawn as .svg or .png, not {other or path.name}")


def to_svg(drawing: Drawing) -> str:
    """The drawing as an SVG document."""
    size = f'width="{drawing.width:.0f}" height="{drawing.height:.0f}"'
    box = f'viewBox="0 0 {drawing.width:.0f} {drawing.height:.0f}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} {box} font-family="sans-serif">',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        f'<text x="{MARGIN:.0f}" y="{HEAD - 8:.0f}" font-size="13" fill="{INK}">{escape(drawing.title)}</text>',
    ]
    for start, end in drawing.lines:
        a, b = drawing.dots[start], drawing.dots[end]
        parts.append(
            f'<line x1="{a.x:.1f}" y1="{a.y:.1f}" x2="{b.x:.1f}" y2="{b.y:.1f}" stroke="#9aa5b1"/>'
        )
    for dot in drawing.dots:
        ink = "#ffffff" if dot.dark else INK
        parts.append(
            f'<g><title>{escape(dot.about)}</title><circle cx="{dot.x:.1f}" cy="{dot.y:.1f}" r="{RADIUS:.0f}" '
            f'fill="{dot.fill}" stroke="{INK}" stroke-width="0.8"/>'
            f'<text x="{dot.x:.1f}" y="{dot.y + 3.5:.1f}" font-size="10" text-anchor="middle" fill="{ink}">'
            f"{escape(dot.label)}</text></g>"
        )
    return "\n".join((*parts, "</svg>")) + "\n"


def _save_png(drawing: Drawing, path: Path) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            f"{path.name}: PNG needs matplotlib, which is not installed; install it, or write an .svg"
        ) from error
    scale = 100.0  # pixels an inch
    figure = Figure(figsize=(drawing.width / scale, drawing.height / scale), dpi=2 * scale)
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set_xlim(0, drawing.width)
    axes.set_ylim(drawing.height, 0)
    axes.axis("off")
    axes.text(MARGIN, HEAD - 8, drawing.title, fontsize=9, color=INK)
    for start, end in drawing.lines:
        a, b = drawing.dots[start], drawing.dots[end]
        axes.plot((a.x, b.x), (a.y, b.y), color="#9aa5b1", linewidth=0.8, zorder=1)
    for dot in drawing.dots:
        axes.scatter(dot.x, dot.y, s=180, color=dot.fill, edgecolors=INK, linewidths=0.6, zorder=2)
        ink = "#ffffff" if dot.dark else INK
        style = {"ha": "center", "va": "center", "fontsize": 7, "color": ink}
        axes.text(dot.x, dot.y, dot.label, zorder=3, **style)  # type: ignore[arg-type]
    figure.savefig(path)
