"""Plots as SVG, written by hand so that the simulator needs nothing but Python."""

from __future__ import annotations

from math import inf
from typing import Any
from xml.sax.saxutils import escape

from benchmarks.simulate.tables import relative

Row = dict[str, Any]

COLOURS = ("#0b6e99", "#7fb8d0", "#3a8f5c", "#d08c2f", "#efc98a", "#8a5fa8", "#c0a6d3", "#b5483c", "#555555")
_STYLE = "font-family='system-ui,sans-serif' font-size='11' fill='#222'"


def bars(rows: list[Row]) -> str:
    """Mean and p99 completion of each policy, relative to the best, a panel for each trace and size of the fleet."""
    sizes = list(dict.fromkeys(row["engines"] for row in rows))
    names = list(dict.fromkeys(row["trace"] for row in rows))
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    wide, high, left, top = 150, 120, 84, 62
    out = [_open(left + wide * len(names) + 10, top + (high + 40) * len(sizes) + 40)]
    out.append(
        f"<text x='{left}' y='18' {_STYLE} font-weight='bold'>p99 completion of a rollout, times the best</text>"
    )
    for number, policy in enumerate(policies):
        x = left + number * 140
        out.append(f"<rect x='{x}' y='27' width='10' height='10' fill='{COLOURS[number % len(COLOURS)]}'/>")
        out.append(f"<text x='{x + 14}' y='36' {_STYLE}>{escape(policy)}</text>")
    for line, size in enumerate(sizes):
        base = top + line * (high + 40) + high
        out.append(f"<text x='4' y='{base - high / 2}' {_STYLE}>{size} engines</text>")
        for column, trace in enumerate(names):
            these = {row["policy"]: row["p99"] for row in rows if row["engines"] == size and row["trace"] == trace}
            low = min(these.values())
            x = left + column * wide
            out.append(f"<text x='{x + 4}' y='{base + 16}' {_STYLE}>{escape(trace)}</text>")
            for level in (1, 2, 3):
                y = base - level * high / 3.5
                out.append(f"<line x1='{x}' x2='{x + wide - 14}' y1='{y:.1f}' y2='{y:.1f}' stroke='#ddd'/>")
                if not column:
                    out.append(f"<text x='{x - 4}' y='{y + 4:.1f}' text-anchor='end' {_STYLE}>{level}</text>")
            step = (wide - 18) / len(policies)
            for number, policy in enumerate(policies):
                if policy not in these:
                    continue
                ratio = these[policy] / low
                tall = min(ratio, 3.5) * high / 3.5
                at = x + 2 + number * step
                colour = COLOURS[number % len(COLOURS)]
                tip = f"{policy}: {these[policy]:.0f} s, {ratio:.2f} times the best"
                out.append(
                    f"<rect x='{at:.1f}' y='{base - tall:.1f}' width='{step - 2:.1f}' height='{tall:.1f}' "
                    f"fill='{colour}'><title>{escape(tip)}</title></rect>"
                )
                if ratio > 3.5:
                    out.append(f"<text x='{at:.1f}' y='{base - high - 2}' {_STYLE}>{ratio:.0f}x</text>")
    return "\n".join([*out, "</svg>"]) + "\n"


def sweep(rows: list[Row]) -> str:
    """Completion against the margin, for each slack, a panel for each policy."""
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    slacks = list(dict.fromkeys(row["slack"] for row in rows))
    margins = list(dict.fromkeys(inf if row["margin"] is None else row["margin"] for row in rows))
    wide, high, left, top, most = 260, 170, 50, 50, 1.5
    out = [_open(left + wide * len(policies), top + high + 40)]
    title = "p99 completion over the keyed traces, times the best, by margin"
    out.append(f"<text x='{left}' y='18' {_STYLE} font-weight='bold'>{title}</text>")
    for number, slack in enumerate(slacks):
        x = left + number * 90
        out.append(f"<rect x='{x}' y='27' width='10' height='10' fill='{COLOURS[number * 2 % len(COLOURS)]}'/>")
        out.append(f"<text x='{x + 14}' y='36' {_STYLE}>slack {slack:g}</text>")
    for column, policy in enumerate(policies):
        these = [
            {**row, "margin": inf if row["margin"] is None else row["margin"]}
            for row in rows
            if row["policy"] == policy
        ]
        values = relative(these, ("margin", "slack"), "p99")
        x0, base = left + column * wide, top + high
        step = (wide - 60) / (len(margins) - 1)
        for level in (1.0, 1.1, 1.2, 1.3, 1.4):
            y = base - (level - 1) / (most - 1) * high
            out.append(f"<line x1='{x0}' x2='{x0 + wide - 60}' y1='{y:.1f}' y2='{y:.1f}' stroke='#ddd'/>")
            out.append(f"<text x='{x0 - 4}' y='{y + 4:.1f}' text-anchor='end' {_STYLE}>{level:g}</text>")
        for number, margin in enumerate(margins):
            label = "none" if margin == inf else f"{margin:g}"
            out.append(
                f"<text x='{x0 + number * step:.1f}' y='{base + 14}' text-anchor='middle' {_STYLE}>{label}</text>"
            )
        out.append(f"<text x='{x0}' y='{base + 30}' {_STYLE} font-weight='bold'>{escape(policy)}</text>")
        for number, slack in enumerate(slacks):
            points = " ".join(
                f"{x0 + place * step:.1f},{base - (min(values[margin, slack], most) - 1) / (most - 1) * high:.1f}"
                for place, margin in enumerate(margins)
            )
            colour = COLOURS[number * 2 % len(COLOURS)]
            out.append(f"<polyline points='{points}' fill='none' stroke='{colour}' stroke-width='2'/>")
    return "\n".join([*out, "</svg>"]) + "\n"


def _open(width: float, height: float) -> str:
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width:.0f} {height:.0f}' width='{width:.0f}' "
        f"height='{height:.0f}'><rect width='100%' height='100%' fill='white'/>"
    )
