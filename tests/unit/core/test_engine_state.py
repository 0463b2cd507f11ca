from itertools import product

import pytest

from proxy.core.engine_state import IGNORED, MOVES, Event, IllegalMoveError, State, move


def test_every_pair_is_a_move_ignored_or_refused():
    for state, event in product(State, Event):
        listed = (state, event) in MOVES
        ignored = (state, event) in IGNORED
        assert not (listed and ignored)
        if listed:
            assert move(state, event) is MOVES[state, event]
        elif ignored:
            assert move(state, event) is state
        else:
            with pytest.raises(IllegalMoveError, match=f"{state}.*{event}"):
                move(state, event)


def test_only_admission_leads_to_ready():
    assert {event for (_, event), after in MOVES.items() if after is State.READY} == {Event.ADMIT}


@pytest.mark.parametrize("state", list(State))
def test_a_lost_engine_is_down_from_every_state(state):
    assert move(state, Event.LOST) is State.DOWN


def test_a_lost_engine_comes_back_fenced():
    assert move(State.DOWN, Event.CAME) is State.FENCED
