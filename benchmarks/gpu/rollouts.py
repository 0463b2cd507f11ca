"""What the single rollouts of a cell say: ``python benchmarks/gpu/rollouts.py rollouts-1.json --window 60``.

Both routes are given other lengths, and where a first token waits long, the half with the shorter rollouts looks slower. So
the routes are compared at equal lengths too: the mean wait for the first token over the mean length of both halves, plus
the time of a token after the first. Intervals (95 %) come from drawing the rollouts anew, each for itself.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any, Final

DRAWS: Final = 600
STEP: Final = 10
"""Seconds of the starts whose waits are shown together."""
ROUTES: Final = ("", "proxy")

Row = tuple[float, float, float, int]
"""Started, first token, ended, tokens; seconds since the window began."""


def plain(rows: list[Row]) -> float:
    """Milliseconds a token of whole rollouts."""
    return 1000 * sum(ended - started for started, _, ended, _ in rows) / sum(each[3] for each in rows)


def waited(rows: list[Row]) -> float:
    """Mean seconds to the first token."""
    return sum(first - started for started, first, _, _ in rows) / len(rows)


def after(rows: list[Row]) -> float:
    """Milliseconds a token after the first."""
    return 1000 * sum(ended - first for _, first, ended, _ in rows) / sum(each[3] for each in rows)


def compared(straight: list[Row], proxy: list[Row]) -> tuple[float, float]:
    """The proxy's difference in percent: as it stands, and at equal lengths."""
    length = sum(each[3] for each in (*straight, *proxy)) / (len(straight) + len(proxy))
    a, b = (1000 * waited(each) / length + after(each) for each in (straight, proxy))
    return 100 * (plain(proxy) / plain(straight) - 1), 100 * (b / a - 1)


def main() -> None:
    """One cell after another."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, nargs="+")
    parser.add_argument("--window", type=float, default=60.0)
    args = parser.parse_args()
    chance = random.Random(1)
    for path in args.file:
        found: list[list[Any]] = [each for each in json.loads(path.read_text()) if each[3] is not None]
        cell: dict[str, list[Row]] = {
            route: [
                (started, first, ended, tokens)
                for mine, _, started, first, ended, tokens, outcome in found
                if mine == route and started >= 0 and ended <= args.window and outcome in ("length", "stop")
            ]
            for route in ROUTES
        }
        drawn = [compared(*(chance.choices(cell[each], k=len(cell[each])) for each in ROUTES)) for _ in range(DRAWS)]
        print(path.name)
        for name, index in (("as it stands", 0), ("at equal lengths", 1)):
            values = sorted(each[index] for each in drawn)
            low, high = values[DRAWS // 40], values[-DRAWS // 40 - 1]
            print(f"  {name}: {compared(*cell.values())[index]:+.2f} % ({low:+.2f} to {high:+.2f})")
        for route, rows in cell.items():
            mean = sum(each[3] for each in rows) / len(rows)
            print(
                f"  {route or 'straight'}: {len(rows)} rollouts of {mean:.0f} tokens, {plain(rows):.2f} ms a token; "
                f"first token after {waited(rows):.2f} s, then {after(rows):.2f} ms a token"
            )
        zero = min(each[2] for each in found)
        for begin in range(0, round(args.window - zero), STEP):
            waits = [
                [r[3] - r[2] for r in found if r[0] == route and 0 <= r[2] - zero - begin < STEP] for route in ROUTES
            ]
            if all(waits):
                means = " and ".join(f"{sum(each) / len(each):.2f} s ({len(each)})" for each in waits)
                print(
                    f"  started {begin} to {begin + STEP} s after the load: first token after {means}, straight and by the proxy"
                )


if __name__ == "__main__":
    main()
