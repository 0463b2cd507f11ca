"""The results of a run as a Markdown table and a plot."""

from __future__ import annotations

import statistics
from html import escape
from pathlib import Path
from typing import Any

Results = dict[str, dict[str, list[dict[str, float]]]]

# Scenario, number, heading, decimals.
COLUMNS = (
    ("c32", "cpu_us_per_request", "CPU µs/request, 32 conn.", 1),
    ("c256", "cpu_us_per_request", "256 conn.", 1),
    ("c32", "requests_per_s", "requests/s, 32 conn.", 0),
    ("open500", "added_p50_ms", "added p50 ms at 500/s", 3),
    ("open500", "added_p99_ms", "added p99 ms", 2),
    ("flat", "cpu_us_per_event", "CPU µs/event, flat out", 2),
    ("paced100", "cpu_us_per_event", "100 streams at 20 ms", 1),
    ("paced500", "cpu_us_per_event", "500 streams", 1),
    ("paced500", "added_p50_ms", "added p50 ms/event, 500", 3),
    ("paced500", "added_p99_ms", "added p99 ms/event", 2),
    ("fresh32", "cpu_us_per_request", "CPU µs/request, new connection each", 1),
    ("big", "cpu_us_per_request", "CPU µs, 5 MB in and out", 0),
    ("open2000", "kb_each", "KB per open request, 2,000", 1),
    ("open5000", "kb_each", "5,000", 1),
    ("open10000", "kb_each", "10,000", 1),
    ("engines64", "cpu_us_per_request", "CPU µs/request, 64 engines", 1),
    ("engines64", "idle_cpu_share", "idle CPU share, 64 engines", 4),
    ("restart", "first_answer_s", "start to first answer s", 2),
)

# What issue 5 asks for: scenario, number, against whom (None: an absolute limit), factor or limit, what it is.
GOALS = (
    ("c32", "cpu_us_per_request", "vllm-router", 0.6, "CPU per small request"),
    ("c32", "cpu_us_per_request", "nginx", 2.5, "CPU per small request"),
    ("open500", "added_p50_ms", "vllm-router", 1.0, "added p50 at 500/s"),
    ("flat", "cpu_us_per_event", "nginx", 1.0, "CPU per event, flat out"),
    ("paced100", "cpu_us_per_event", "vllm-router", 1.0, "CPU per event, 100 streams"),
    ("paced500", "cpu_us_per_event", "vllm-router", 1.0, "CPU per event, 500 streams"),
    ("paced500", "added_p99_ms", "vllm-router", 1.0, "added p99 per event, 500 streams"),
    ("open2000", "kb_each", None, 16.0, "KB per open request, 2,000"),
    ("open5000", "kb_each", None, 16.0, "KB per open request, 5,000"),
    ("open10000", "kb_each", None, 16.0, "KB per open request, 10,000"),
    ("held2000", "kb_each_less_body", None, 8.0, "KB per held request less its body, 2,000"),
    ("held5000", "kb_each_less_body", None, 8.0, "KB per held request less its body, 5,000"),
    ("held10000", "kb_each_less_body", None, 8.0, "KB per held request less its body, 10,000"),
    ("fanout16", "overhead_p99_ms", None, 5.0, "fan-out overhead p99 ms, 16 engines"),
    ("fanout64", "overhead_p99_ms", None, 15.0, "fan-out overhead p99 ms, 64 engines"),
    ("resume2000", "resume_last_ms", None, 250.0, "ms from resume to the last of 2,000"),
    ("soak", "growth_kb_per_minute", None, 64.0, "KB of growth a minute in a soak"),
)
AT_LEAST = (("workers2", "throughput_of_two_free_cores", 1.7, "throughput of two workers on two free cores"),)

CONTROL = ("fanout2", "fanout16", "fanout64", "resume2000", "held2000", "held5000", "held10000", "beside2000")
CONTROL += ("engines64", "workers2", "soak")


def medians(results: Results) -> dict[str, dict[str, dict[str, float]]]:
    """The median of each number over the repetitions, and what is added to going to an engine directly."""
    middle = {
        name: {
            scenario: {key: statistics.median(run[key] for run in runs if key in run) for key in runs[0]}
            for scenario, runs in found.items()
        }
        for name, found in results.items()
    }
    direct = middle.get("direct", {})
    for name, found in middle.items():
        if name == "direct":
            continue
        for scenario, numbers in found.items():
            if "p50_us" in numbers and scenario in direct:
                for rank in ("p50", "p99"):
                    if f"{rank}_us" in numbers:
                        added = numbers[f"{rank}_us"] - direct[scenario][f"{rank}_us"]
                        numbers[f"added_{rank}_ms"] = added / 1e3
    return middle


def _table(heads: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines)


def _cell(found: dict[str, dict[str, float]], scenario: str, key: str, decimals: int) -> str:
    value = found.get(scenario, {}).get(key)
    return "-" if value is None else f"{value:,.{decimals}f}"


def main_table(middle: dict[str, dict[str, dict[str, float]]]) -> str:
    """Candidates by columns."""
    used = [column for column in COLUMNS if any(column[1] in found.get(column[0], {}) for found in middle.values())]
    names = [name for name in middle if name != "direct"]
    rows = [
        [name] + [_cell(middle[name], *column[:2], column[3]) for column in used] + [_errors(middle[name])]
        for name in names
    ]
    return _table(["", *(column[2] for column in used), "errors"], rows)


def _errors(found: dict[str, dict[str, float]]) -> str:
    bad = {scenario: int(numbers["errors"]) for scenario, numbers in found.items() if numbers.get("errors")}
    return ", ".join(f"{scenario}: {count}" for scenario, count in bad.items()) or "0"


def goals_table(middle: dict[str, dict[str, dict[str, float]]]) -> str:
    """What was asked for, what was measured."""
    ours = middle.get("fleetgate", {})
    rows = []
    for scenario, key, peer, factor, what in GOALS:
        value = ours.get(scenario, {}).get(key)
        if value is None:
            continue
        if peer is None:
            rows.append([what, f"at most {factor:g}", f"{value:.2f}", "yes" if value <= factor else "**no**"])
            continue
        other = middle.get(peer, {}).get(scenario, {}).get(key)
        if other:
            ratio = value / other
            verdict = "yes" if ratio <= factor else "**no**"
            rows.append([what, f"at most {factor:g} x {peer}", f"{ratio:.2f} x ({value:.3g} / {other:.3g})", verdict])
    for scenario, key, least, what in AT_LEAST:
        value = ours.get(scenario, {}).get(key)
        if value is not None:
            rows.append([what, f"at least {least:g} x", f"{value:.2f} x", "yes" if value >= least else "**no**"])
    return _table(["", "asked for", "measured", "met"], rows) if rows else ""


def control_table(middle: dict[str, dict[str, dict[str, float]]]) -> str:
    """Everything about fleetgate that no peer has."""
    ours = middle.get("fleetgate", {})
    rows = []
    for scenario in CONTROL:
        for key, value in ours.get(scenario, {}).items():
            rows.append([scenario, key, f"{value:,.3f}".rstrip("0").rstrip(".")])
    return _table(["scenario", "number", "median"], rows) if rows else ""


PANELS = (
    ("c32", "cpu_us_per_request", "CPU µs per small request (32 connections)"),
    ("open500", "added_p50_ms", "added p50, ms, at 500 requests/s"),
    ("flat", "cpu_us_per_event", "CPU µs per SSE event, flat out"),
    ("paced500", "cpu_us_per_event", "CPU µs per SSE event, 500 paced streams"),
    ("open2000", "kb_each", "KB per open request, 2,000 open"),
)
BUSY = 0.1
"""Share of the time that a proxy waits for its core, above which a run is called disturbed."""
WIDTH, BAR, LABEL = 720, 22, 150


def plot(middle: dict[str, dict[str, dict[str, float]]]) -> str:
    """Bars by candidate, one panel a figure, as SVG."""
    names = [name for name in middle if name != "direct"]
    parts: list[str] = []
    y = 10
    for scenario, key, title in PANELS:
        values = [(name, middle[name].get(scenario, {}).get(key)) for name in names]
        shown = [(name, max(0.0, value)) for name, value in values if value is not None]
        if not shown:
            continue
        y += 24
        parts.append(f'<text x="10" y="{y}" font-weight="bold">{escape(title)}</text>')
        y += 10
        # The slowest by far would flatten all the others.
        ranked = sorted(value for _, value in shown)
        top = min(ranked[-1], 2.2 * ranked[len(ranked) * 2 // 3]) or 1.0
        for name, value in shown:
            share = min(1.0, value / top)
            width = max(1.0, share * (WIDTH - LABEL - 110))
            colour = "#1668b8" if name == "fleetgate" else "#9aa7b4"
            parts.append(f'<text x="{LABEL - 8}" y="{y + 15}" text-anchor="end">{escape(name)}</text>')
            parts.append(f'<rect x="{LABEL}" y="{y + 2}" width="{width:.0f}" height="{BAR - 6}" fill="{colour}"/>')
            more = " →" if value > top else ""
            parts.append(f'<text x="{LABEL + width + 6:.0f}" y="{y + 15}">{value:.3g}{more}</text>')
            y += BAR
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y + 12}" '
        f'viewBox="0 0 {WIDTH} {y + 12}" font-family="sans-serif" font-size="13">'
        '<rect width="100%" height="100%" fill="white"/>'
    )
    return head + "".join(parts) + "</svg>\n"


def write(document: dict[str, Any], target: Path) -> str:
    """Write the table and the plot beside the JSON file; returns the table."""
    middle = medians(document["results"])
    facts = document["machine"]
    parts = [
        f"# Benchmark, {target.stem}",
        (
            f"{facts['cpu']}, {facts['cores']} cores, Linux {facts['kernel']}, Python {facts['python']}, commit "
            f"{facts['commit']}; {facts['minutes']} minutes, load average {facts['load_before']} before it. Medians; "
            "less is better except requests/s."
        ),
        main_table(middle),
    ]
    goals = goals_table(middle)
    if goals:
        parts += ["## What was asked for", goals]
    if any(middle.get(name) for name in middle if name != "direct"):
        parts.append(f"![CPU, latency and memory by proxy]({target.stem}.svg)")
        target.with_suffix(".svg").write_text(plot(middle), encoding="utf-8")
    ours = control_table(middle)
    if ours:
        parts += ["## Fleetgate alone", ours]
    waited = sorted(
        numbers["waited_share"] for found in middle.values() for numbers in found.values() if "waited_share" in numbers
    )
    if waited and waited[len(waited) // 2] > BUSY:
        parts.append(
            "The machine was busy: proxies were ready to run but waited for their core "
            f"{waited[len(waited) // 2]:.0%} of the time (median). Latencies and throughput of this run say little, and CPU times are inflated."
        )
    if document["left_out"]:
        parts.append(
            "Not measured: " + "; ".join(f"{name} ({why.strip()[:200]})" for name, why in document["left_out"].items())
        )
    if document["notes"]:
        parts.append("Notes:\n\n" + "\n".join(f"- {note}" for note in document["notes"]))
    text = "\n\n".join(parts) + "\n"
    target.with_suffix(".md").write_text(text, encoding="utf-8")
    return text
