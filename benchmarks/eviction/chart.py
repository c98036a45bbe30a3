"""Hit ratio by capacity as SVG: one panel a trace, one line a policy. Plain text, no dependency."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

Line = Sequence[tuple[int, float]]
"""(capacity in blocks, hit ratio), ascending."""

_PANEL_WIDTH, _PANEL_HEIGHT, _MARGIN = 420, 260, 56
_COLOURS = ("#777777", "#1f6fb4", "#c8501e", "#2a8f4f")
_DASHES = ("6 4", "", "", "")


def draw(panels: Mapping[str, Mapping[str, Line]]) -> str:
    """An SVG of panels side by side. panels: title -> name of a line -> its points."""
    width = len(panels) * (_PANEL_WIDTH + _MARGIN) + _MARGIN
    height = _PANEL_HEIGHT + 2 * _MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for number, (title, lines) in enumerate(panels.items()):
        left = _MARGIN + number * (_PANEL_WIDTH + _MARGIN)
        parts.append(f'<g transform="translate({left} {_MARGIN})">')
        parts += _panel(title, lines)
        parts.append("</g>")
    return "\n".join([*parts, "</svg>", ""])


def _panel(title: str, lines: Mapping[str, Line]) -> list[str]:
    capacities = sorted({capacity for line in lines.values() for capacity, _ in line})
    top = math.ceil(10 * max(ratio for line in lines.values() for _, ratio in line)) / 10
    first, span = math.log(capacities[0]), math.log(capacities[-1] / capacities[0]) or 1.0

    def x(capacity: int) -> float:
        return (math.log(capacity) - first) / span * _PANEL_WIDTH

    def y(ratio: float) -> float:
        return _PANEL_HEIGHT * (1 - ratio / top)

    parts = [_text(_PANEL_WIDTH / 2, -16, title, "middle", bold=True)]
    for tenth in range(round(10 * top) + 1):
        parts.append(_rule(0, y(tenth / 10), _PANEL_WIDTH, y(tenth / 10)))
        parts.append(_text(-6, y(tenth / 10) + 4, f"{tenth / 10:.1f}", "end"))
    for capacity in capacities:
        parts.append(_rule(x(capacity), 0, x(capacity), _PANEL_HEIGHT))
        parts.append(_text(x(capacity), _PANEL_HEIGHT + 16, _short(capacity), "middle"))
    caption = "capacity, blocks of 512 tokens"
    parts.append(_text(_PANEL_WIDTH / 2, _PANEL_HEIGHT + 36, caption, "middle"))
    for number, (name, line) in enumerate(lines.items()):
        colour, dash = _COLOURS[number % 4], _DASHES[number % 4]
        points = " ".join(f"{x(capacity):.1f},{y(ratio):.1f}" for capacity, ratio in line)
        style = f'fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}"'
        parts.append(f'<polyline points="{points}" {style}/>')
        height = _PANEL_HEIGHT - 14 - 16 * (len(lines) - 1 - number)
        parts.append(_text(_PANEL_WIDTH - 8, height, name, "end", colour=colour))
    return parts


def _short(capacity: int) -> str:
    return f"{capacity // 1000}k" if capacity % 1000 == 0 else str(capacity)


def _rule(x1: float, y1: float, x2: float, y2: float) -> str:
    ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {ends} stroke="#dddddd"/>'


def _text(
    x: float, y: float, text: str, anchor: str, *, bold: bool = False, colour: str = "black"
) -> str:
    weight = ' font-weight="bold"' if bold else ""
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}"'
    return f"<text {place}{weight}>{escape(text)}</text>"
