"""May this engine answer clients? Facts in, verdict out.

This is the only place that decides ``ADMIT``. The rules are those of the contract ("Weights"), in the order in which
they are asked. An engine leaves the fence only

1. by hand (``POST /fleet/engines/ID/admit``),
2. as a plain one: it has no versions, so there is nothing to compare,
3. because nothing was ever updated and all labels are ``default``: a restarted engine is as good as before,
4. because it took part in the update that made the fleet's version, or because its version is the fleet's while its
   process never restarted and no update was half done,
5. because its checksums equal those recorded for the fleet's version.

A whole successful round sets ``epoch`` to the fleet's and clears ``tainted``, so it arrives here as rule 4. Nothing
that arrives late can do that: the shell compares the boot number and the round before it writes a fact.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

DEFAULT = "default"
"""vLLM's label before anybody sets one."""

UNKNOWN_EPOCH = -1
"""The engine's weights are not known to be any update's: it restarted."""


class Decision(StrEnum):
    """What to do with an engine."""

    ADMIT = "admit"
    FENCE = "fence"
    COMPARE = "compare"
    """Fence it, but its weights may turn out equal: compare checksums."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The decision and its reason, for people."""

    decision: Decision
    reason: str


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of one engine and the fleet.

    Attributes:
        plain: no RL routes.
        was_rl: it had them earlier in this proxy's life.
        version: its label, or None if it has not said.
        fleet_version: the fleet's label, or None where nobody knows (a tie at start).
        tie: the fleet's version is unknown because labels are tied.
        pristine: no update was ever seen and no engine has a label but ``default``.
        tainted: an update began on it and did not end well, or its weights were wiped.
        in_round: it is inside an update now.
        epoch: number of the last update that it is known to hold.
        fleet_epoch: number of the last update that the whole fleet took.
        by_hand: None, or what an operator said: True admit, False fence.
        recorded: checksums of the fleet's version are known for an engine of its size.
        checksums_equal: None if not compared, else the result.
        checked: its checksums were compared already for this boot and version.
    """

    plain: bool = False
    was_rl: bool = False
    version: str | None = None
    fleet_version: str | None = None
    tie: bool = False
    pristine: bool = True
    tainted: bool = False
    in_round: bool = False
    epoch: int = 0
    fleet_epoch: int = 0
    by_hand: bool | None = None
    recorded: bool = False
    checksums_equal: bool | None = None
    checked: bool = False


def judge(facts: Facts) -> Verdict:
    """The verdict on one engine that answers."""
    if facts.by_hand is False:
        return Verdict(Decision.FENCE, "fenced by hand; POST /fleet/engines/ID/admit lets it back")
    if facts.in_round:
        return Verdict(Decision.FENCE, "inside a weight update")
    if facts.tainted:
        reason = "a weight update was left half done; run a whole one (start, update, finish)"
        if facts.fleet_version is None or facts.tie or facts.checked or not facts.recorded:
            return Verdict(Decision.FENCE, reason)
        return Verdict(Decision.COMPARE, reason)
    if facts.by_hand is True:
        return Verdict(Decision.ADMIT, "admitted by hand")
    if facts.plain:
        if facts.was_rl and not facts.pristine:
            return Verdict(Decision.FENCE, "came back without RL routes; start it with VLLM_SERVER_DEV_MODE=1")
        return Verdict(Decision.ADMIT, "plain engine: no weight versions to check")
    if facts.version is None:
        return Verdict(Decision.FENCE, "its weight version is not known yet")
    if facts.pristine and facts.version == DEFAULT:
        return Verdict(Decision.ADMIT, "no weight update was ever seen")
    return _compare(facts)


def _compare(facts: Facts) -> Verdict:
    if facts.tie or facts.fleet_version is None:
        return Verdict(
            Decision.FENCE,
            f"holds {facts.version!r}, but the engines' labels are tied; run a weight sync, or admit one by hand",
        )
    if facts.checksums_equal:
        return Verdict(Decision.ADMIT, f"its checksums are those of {facts.fleet_version!r}")
    undecided = Decision.COMPARE if facts.recorded and not facts.checked else Decision.FENCE
    if facts.version != facts.fleet_version:
        return Verdict(undecided, f"holds weights {facts.version!r}, the fleet has {facts.fleet_version!r}")
    if facts.epoch == UNKNOWN_EPOCH:
        return Verdict(undecided, "its process restarted; it needs a whole weight sync")
    if facts.epoch != facts.fleet_epoch:
        return Verdict(undecided, "missed a weight update")
    return Verdict(Decision.ADMIT, f"holds the fleet's weights {facts.fleet_version!r}")


@dataclass(frozen=True, slots=True)
class Vote:
    """The fleet's version at start.

    Attributes:
        version: the label of most engines, or None on a tie or without labels.
        tied: the labels that hold each other up; empty if there is a winner.
    """

    version: str | None
    tied: tuple[str, ...] = ()


def vote(labels: Iterable[str | None]) -> Vote:
    """The label that most engines hold. ``default`` never wins against a real label; a tie has no winner."""
    counts = Counter(label for label in labels if label is not None)
    real = Counter({label: count for label, count in counts.items() if label != DEFAULT})
    if not real:
        return Vote(DEFAULT if counts else None)
    best = max(real.values())
    winners = sorted(label for label, count in real.items() if count == best)
    if len(winners) > 1:
        return Vote(None, tuple(winners))
    return Vote(winners[0])


def is_automatic(label: str) -> bool:
    """Whether a label has the form of the proxy's own."""
    return label[:1] == "u" and label[1:].isdecimal()


def next_label(seen: Iterable[str | None], *, beyond: int = 0) -> str:
    """The next automatic label, ``u1, u2...``: beyond any that an engine ever showed, so that none is used twice.

    Args:
        seen: labels.
        beyond: a number that it is above as well, where labels may have been used that nobody shows any more.
    """
    numbers = [int(label[1:]) for label in seen if label and is_automatic(label)]
    return f"u{max([*numbers, beyond]) + 1}"
