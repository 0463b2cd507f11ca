"""Tables of a run's results in Markdown: ``python benchmarks/gpu/tables.py results.json``."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any


def ms(value: float | None) -> str:
    """Milliseconds."""
    return "-" if value is None else f"{1000 * value:,.1f}" if value < 0.1 else f"{1000 * value:,.0f}"


def table(heads: list[str], rows: list[list[str]]) -> str:
    """A Markdown table; the first column is text, the others are numbers."""
    rule = ["---", *["---:"] * (len(heads) - 1)]
    return "\n".join("| " + " | ".join(row) + " |" for row in [heads, rule, *rows]) + "\n"


def mean(rows: list[dict[str, Any]], key: str) -> float | None:
    """Of the runs of one cell."""
    values = [each[key] for each in rows if each[key] is not None]
    return statistics.mean(values) if values else None


def throughput(rows: list[dict[str, Any]]) -> str:
    """(a)."""
    out = []
    for concurrency, stream in dict.fromkeys((each["concurrency"], each["stream"]) for each in rows):
        cells = [each for each in rows if (each["concurrency"], each["stream"]) == (concurrency, stream)]
        base = [each for each in cells if each["route"] == "straight"]
        for route in dict.fromkeys(each["route"] for each in cells):
            mine = [each for each in cells if each["route"] == route]
            speed = mean(mine, "tokens_per_second") or 0.0
            straight = mean(base, "tokens_per_second") or 0.0
            cost = "" if route == "straight" or not straight else f"{100 * (1 - speed / straight):+.1f} %"
            cores = [each["cores"].get("proxy") for each in mine if "proxy" in each["cores"]]
            out.append(
                [
                    f"{concurrency} {'streamed' if stream else 'not streamed'}, {route}",
                    f"{speed:,.0f}",
                    " / ".join(f"{each['tokens_per_second']:,.0f}" for each in mine),
                    cost,
                    ms(mean(mine, "ttft_p50")),
                    ms(mean(mine, "ttft_p99")),
                    ms(mean(mine, "rollout_p50")),
                    ms(mean(mine, "rollout_p99")),
                    f"{statistics.mean(cores):.2f}" if cores else "",
                    str(sum(each["errors"] for each in mine)),
                ]
            )
    heads = ["rollouts in flight", "tokens/s", "each run", "cost", "TTFT p50 ms", "p99", "rollout p50 ms", "p99"]
    return table([*heads, "proxy, cores", "errors"], out)


def at_equal_lengths(row: dict[str, Any]) -> str:
    """What the proxy adds had both halves rollouts of one length; only where the first token's time is known."""
    halves = [row["straight"], row["proxy"]]
    if any(each["ms_per_token_after_first"] is None or not each["tokens"] for each in halves):
        return ""
    length = sum(each["tokens"] for each in halves) / sum(each["finished"] for each in halves)
    straight, proxy = (
        (each["ms_per_token"] - each["ms_per_token_after_first"]) * each["tokens"] / each["finished"] / length
        + each["ms_per_token_after_first"]
        for each in halves
    )
    return f"{100 * (proxy / straight - 1):+.1f} %"


def paired(rows: list[dict[str, Any]]) -> str:
    """(a), both routes at once."""
    out = []
    for each in rows:
        for route in ("straight", "proxy"):
            mine, base = each[route], each["straight"]["ms_per_token"]
            cost = "" if route == "straight" or not base else f"{100 * (mine['ms_per_token'] / base - 1):+.1f} %"
            out.append(
                [
                    f"{each['concurrency']} {'streamed' if each['stream'] else 'not streamed'}, {route}",
                    f"{mine['ms_per_token']:.2f}",
                    cost,
                    at_equal_lengths(each) if route == "proxy" else "",
                    f"{mine['tokens'] / max(1, mine['finished']):.0f}",
                    ms(mine["ttft_p50"]),
                    ms(mine["ttft_p99"]),
                    ms(mine["rollout_p50"]),
                    ms(mine["rollout_p99"]),
                    str(mine["finished"]),
                    str(mine["errors"]),
                    f"{each['proxy_cores']:.2f}" if route == "proxy" else "",
                    f"{each['tokens_per_second']:,.0f}",
                ]
            )
    heads = [
        "rollouts in flight, half by each route",
        "ms/token",
        "difference",
        "at equal lengths",
        "tokens each",
        "TTFT p50 ms",
        "p99",
        "rollout p50 ms",
    ]
    return table([*heads, "p99", "rollouts", "errors", "proxy, cores", "tokens/s of all"], out)


def syncs(rows: list[dict[str, Any]]) -> str:
    """(b)."""
    out = []
    for each in rows:
        judged = each["check"]["greedy"]
        out.append(
            [
                each["mode"],
                str(each["syncs"]),
                ms(each["window"]["p50"]),
                ms(each["window"]["max"]),
                ms(each["engines_own"]["p50"]),
                f"{ms(each['proxy_added']['p50'])} / {ms(each['proxy_added']['max'])}",
                f"{each['tokens_per_second_without']:,.0f}",
                f"{each['tokens_lost_per_sync']:,.0f}",
                str(each["errors"]),
                str(each["finished"]),
                "yes" if each["check"]["versions_right"] and each["check"]["checksums_equal"] else "NO",
                ", ".join(f"{one['equal_bfloat16']}/{one['tokens']}" for one in judged),
                f"{max(one['largest_gap'] for one in judged):.3f}",
            ]
        )
    heads = ["mode", "syncs", "window p50 ms", "max", "engines' own p50", "proxy adds p50 / max", "tokens/s without"]
    heads += ["tokens lost a sync", "client errors", "rollouts", "versions, checksums equal", "greedy tokens equal"]
    return table([*heads, "largest logit gap"], out)


def probes(rows: dict[str, dict[str, Any]]) -> str:
    """Whether weights arrive over NCCL."""
    out = [
        [
            name,
            "yes" if each["nccl_disabled"] else "no",
            f"{each['trainers_checksums_equal']} of {each['trainers_checksums']}",
            ", ".join(f"{one['equal_bfloat16']} of {one['tokens']}" for one in each["greedy"]),
            ms(each["send_seconds"]),
        ]
        for name, each in rows.items()
    ]
    heads = ["one update over NCCL", "NCCL disabled", "checksums equal to the trainer's", "greedy tokens equal"]
    return table([*heads, "start to finish, ms"], out)


def policies(rows: list[dict[str, Any]]) -> str:
    """(c)."""
    names = {
        "keep": "keep", "abort": "abort, clients ask again", "wait": "generation stopped (wait)", "none": "no syncs",
    }  # fmt: skip
    out = [
        [
            names[each["mode"]],
            f"{each['finished_per_minute']:,.0f}",
            f"{each['tokens_per_second']:,.0f}",
            str(each["syncs"]),
            ms(each["window"]["p50"]),
            ms(each["window"]["max"]),
            str(each["asked_again"]),
            str(each["errors"]),
        ]
        for each in rows
    ]
    heads = ["way", "finished rollouts/min", "tokens/s", "syncs", "window p50 ms", "max", "asked again", "errors"]
    return table(heads, out)


def kill(found: dict[str, Any]) -> str:
    """(d)."""

    def seconds(value: float | None) -> str:
        return "-" if value is None else f"{value:.2f} s"

    speed = found["others_tokens_per_second"]
    rows = [
        ["rollouts, of which lost", f"{found['rollouts']}, {found['lost_on_killed'] + found['lost_elsewhere']}"],
        ["lost that ran on other engines", str(found["lost_elsewhere"])],
        ["sent again by the proxy, unseen by clients", str(found["sent_again_by_proxy"])],
        ["tokens/s of the others before / after", f"{speed['before']:,.0f} / {speed['after']:,.0f}"],
        ["killed until out of service", seconds(found["seconds_to_out_of_service"])],
        ["killed until it answers again", seconds(found["seconds_to_healthy_again"])],
        ["its state then", found["state_when_back"]],
        ["new group and sync", seconds(found["seconds_init_and_sync"])],
        ["killed until it serves again", seconds(found["seconds_to_ready"])],
        ["rollouts on it after that", str(found["used_after_ready"])],
        ["versions, checksums equal", str(found["check"]["versions_right"] and found["check"]["checksums_equal"])],
    ]
    return table(["engine killed under load", ""], rows)


def page(found: dict[str, Any]) -> str:
    """All tables that there are results for."""
    parts = [f"{found.get('date', '')}: {json.dumps(found.get('versions', {}))}, {found['gpus']} engines"]
    titles = {
        "throughput": ("Throughput", throughput),
        "paired": ("Both routes at once", paired),
        "syncs": (f"Syncs of all engines ({found.get('backend')})", syncs),
        "nccl_probes": ("Whether weights arrive over NCCL", probes),
        "syncs_nccl": ("Syncs over NCCL", syncs),
        "policies": ("Ways of pausing", policies),
        "kill": ("Engine killed", kill),
    }
    for name, (title, make) in titles.items():
        if found.get(name):
            parts.append(f"## {title}\n\n{make(found[name])}")
    for name in ("failed", "not_run", "ipc_failed"):
        if found.get(name):
            parts.append(f"## {name}\n\n```\n{json.dumps(found[name], indent=1)}\n```\n")
    return "\n\n".join(parts)


if __name__ == "__main__":
    print(page(json.loads(Path(sys.argv[1]).read_text())))
