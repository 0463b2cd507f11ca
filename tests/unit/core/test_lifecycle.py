import pytest

from proxy.core.calls import CALLS, Kind
from proxy.core.lifecycle import Holder, Phase, Round, RoundState, phase
from proxy.errors import Conflict

START, UPDATE, FINISH = (CALLS[p] for p in ("/start_weight_update", "/update_weights", "/finish_weight_update"))


def test_a_whole_round():
    update = Round()
    update.check(START)
    update.open({"a": 0})
    assert update.live
    update.check(UPDATE)
    update.updated({"a": 0})
    update.updated({"a": 0})
    assert update.state is RoundState.UPDATED
    update.check(FINISH)
    assert update.finished()
    assert update.state is RoundState.NONE


def test_a_round_without_an_update_says_so():
    update = Round()
    update.open({})
    assert not update.finished()


def test_a_second_start_is_a_mistake_unless_something_came_between():
    update = Round()
    update.open({})
    with pytest.raises(Conflict, match="open already"):
        update.check(START)
    update.passed_by = True
    update.check(START)


def test_a_broken_round_takes_only_a_new_start():
    update = Round()
    update.open({})
    assert update.broken("engine x died")
    assert not update.broken("again")
    assert update.why == "engine x died"
    for call in (UPDATE, FINISH):
        with pytest.raises(Conflict, match="engine x died"):
            update.check(call)
    update.check(START)


def test_a_finish_is_refused_only_by_a_proxy_that_knows_better():
    update = Round()
    update.check(FINISH)
    update.updated({"a": 1})
    assert update.members == {"a": 1}
    update.finished()
    update.check(FINISH)
    update.seen_start = True
    with pytest.raises(Conflict, match="no update round"):
        update.check(FINISH)
    update.check(UPDATE)


@pytest.mark.parametrize(
    ("running", "closed", "live", "want"),
    [
        (None, False, False, Phase.OPEN),
        (None, True, False, Phase.PAUSED),
        (None, True, True, Phase.UPDATING),
        (Kind.PAUSE, True, False, Phase.PAUSING),
        (Kind.UPDATE, True, True, Phase.UPDATING),
        (Kind.FINISH, True, True, Phase.FINISHING),
        (Kind.RESUME, True, False, Phase.RESUMING),
        (Kind.LABEL, True, False, Phase.PAUSED),
    ],
)
def test_phases(running, closed, live, want):
    assert phase(running, gate_closed=closed, round_live=live) is want


def test_a_holder_can_be_told_to_others():
    holder = Holder("/pause", "10.0.0.7", "step-3", 100.0)
    assert holder.describe(102.5) == "/pause by 10.0.0.7 (X-Request-Id step-3), running for 2.5 s"
    assert Holder("/pause", "10.0.0.7", "", 100.0).describe(99.0) == "/pause by 10.0.0.7, running for 0.0 s"
    assert holder.as_json()["client"] == "10.0.0.7"
