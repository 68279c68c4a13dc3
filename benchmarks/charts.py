"""Bar and line charts as SVG, which are readable on a light and on a dark page."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

WIDTH: Final = 720
LABEL_WIDTH: Final = 200
BAR_HEIGHT: Final = 26
VALUE_WIDTH: Final = 90
TITLE_HEIGHT: Final = 40
PLOT_HEIGHT: Final = 300
MARGIN_LEFT: Final = 60
MARGIN_BOTTOM: Final = 50
LEGEND_WIDTH: Final = 130
STYLE: Final = """\
text { font: 13px system-ui, sans-serif; fill: #24292f; }
.title { font-weight: 600; }
.note { fill: #57606a; font-size: 12px; }
.grid { stroke: #d0d7de; }
.line { fill: none; stroke-width: 2; }
.a { fill: #8c959f; stroke: #8c959f; }
.b { fill: #1a7f37; stroke: #1a7f37; }
.c { fill: #bc4c00; stroke: #bc4c00; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; }
  .note { fill: #9198a1; }
  .grid { stroke: #3d444d; }
  .a { fill: #7d8590; stroke: #7d8590; }
  .b { fill: #3fb950; stroke: #3fb950; }
  .c { fill: #f0883e; stroke: #f0883e; }
}"""
# The gateway has its own colour; what it is compared with is grey, or if there are more lines, orange.
COMPARED: Final = "a"
EMPHASIZED: Final = "b"
SECOND_COMPARED: Final = "c"


@dataclass(frozen=True)
class Bar:
    label: str
    value: float
    is_emphasized: bool = False


@dataclass(frozen=True)
class Line:
    label: str
    points: Sequence[tuple[float, float]]
    colour: str


def format_number(value: float) -> str:
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def join_svg(title: str, height: int, parts: Iterator[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}"'
        f' height="{height}" role="img" aria-label="{escape(title)}">'
    )
    title_text = f'<text class="title" x="8" y="22">{escape(title)}</text>'
    return "\n".join([head, f"<style>\n{STYLE}\n</style>", title_text, *parts, "</svg>\n"])


def draw_bars(title: str, bars: Sequence[Bar], unit: str) -> str:
    """Return a chart of horizontal bars, each with its value."""
    largest = max(bar.value for bar in bars)
    scale = (WIDTH - LABEL_WIDTH - VALUE_WIDTH) / largest

    def draw() -> Iterator[str]:
        for number, bar in enumerate(bars):
            top = TITLE_HEIGHT + number * BAR_HEIGHT
            middle = top + BAR_HEIGHT / 2 + 2
            width = max(bar.value * scale, 1)
            colour = EMPHASIZED if bar.is_emphasized else COMPARED
            yield (
                f'<text x="{LABEL_WIDTH - 8}" y="{middle:.0f}" text-anchor="end">'
                f"{escape(bar.label)}</text>"
            )
            yield (
                f'<rect class="{colour}" x="{LABEL_WIDTH}" y="{top}" width="{width:.1f}"'
                f' height="{BAR_HEIGHT - 8}" rx="2"/>'
            )
            yield (
                f'<text x="{LABEL_WIDTH + width + 6:.1f}" y="{middle:.0f}">'
                f"{format_number(bar.value)} {escape(unit)}</text>"
            )

    return join_svg(title, TITLE_HEIGHT + len(bars) * BAR_HEIGHT + 8, draw())


def list_ticks(low: float, high: float) -> list[float]:
    """Return 1, 2 and 5 times each power of ten in a range."""
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [step * 10.0**exponent for exponent in exponents for step in (1, 2, 5)]
    return [tick for tick in ticks if low <= tick <= high]


def make_scale(values: Sequence[float], start: float, end: float) -> Callable[[float], float]:
    """Return the function from a value to its place on a logarithmic axis."""
    low = math.log10(min(values))
    span = math.log10(max(values)) - low or 1.0
    return lambda value: start + (end - start) * (math.log10(value) - low) / span


def draw_lines(title: str, lines: Sequence[Line], x_label: str, y_label: str) -> str:
    """Return a chart of lines on logarithmic axes."""
    xs = [x for line in lines for x, _ in line.points]
    ys = [y for line in lines for _, y in line.points]
    right = WIDTH - LEGEND_WIDTH
    bottom = TITLE_HEIGHT + PLOT_HEIGHT
    place_x = make_scale(xs, MARGIN_LEFT, right)
    place_y = make_scale(ys, bottom, TITLE_HEIGHT + 20)

    def draw() -> Iterator[str]:
        for tick in list_ticks(min(ys), max(ys)):
            y = place_y(tick)
            yield f'<line class="grid" x1="{MARGIN_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>'
            place = f'x="{MARGIN_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end"'
            yield f'<text class="note" {place}>{tick:g}</text>'
        for tick in list_ticks(min(xs), max(xs)):
            x = place_x(tick)
            place = f'x="{x:.1f}" y="{bottom + 20}" text-anchor="middle"'
            yield f'<text class="note" {place}>{tick:,g}</text>'
        yield f'<text class="note" x="{MARGIN_LEFT}" y="{bottom + 40}">{escape(x_label)}</text>'
        yield f'<text class="note" x="8" y="{TITLE_HEIGHT + 4}">{escape(y_label)}</text>'
        for number, line in enumerate(lines):
            places = [(place_x(x), place_y(y)) for x, y in line.points]
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
            yield f'<polyline class="line {line.colour}" style="fill: none" points="{path}"/>'
            yield from (
                f'<circle class="{line.colour}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>'
                for x, y in places
            )
            y = TITLE_HEIGHT + 24 + 22 * number
            yield f'<rect class="{line.colour}" x="{right + 14}" y="{y - 10}" width="12" height="12"/>'
            yield f'<text x="{right + 32}" y="{y}">{escape(line.label)}</text>'

    return join_svg(title, bottom + MARGIN_BOTTOM, draw())


def make_bars(values: Mapping[str, float], emphasized: str) -> list[Bar]:
    """Return bars in ascending order; those whose label begins with `emphasized` have another colour."""
    ordered = sorted(values.items(), key=lambda item: item[1])
    return [Bar(label, value, label.startswith(emphasized)) for label, value in ordered]
