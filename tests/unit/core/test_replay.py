from proxy.core.calls import CALLS
from proxy.core.replay import Memory, fingerprint

UPDATE, PAUSE = CALLS["/update_weights"], CALLS["/pause"]


def test_a_fingerprint_is_of_every_part():
    base = ("POST", "/x", b"a=1", b"body")
    others = [("GET", "/x", b"a=1", b"body"), ("POST", "/y", b"a=1", b"body"), ("POST", "/x", b"a=2", b"body"),
              ("POST", "/x", b"a=1", b"bod"), ("POST", "/x", b"a=1", None), ("POST", "/x", b"a=1", b"")]  # fmt: skip
    assert fingerprint(*base) == fingerprint(*base)
    assert len({fingerprint(*item) for item in [base, *others]}) == 7
    assert fingerprint("POST", "/x", b"ab", b"c") != fingerprint("POST", "/x", b"a", b"bc")


def test_an_answer_is_kept_for_its_window():
    memory = Memory[str](5.0)
    memory.keep(b"k", "done", 100.0)
    assert memory.answer(UPDATE, b"k", 104.9) == "done"
    assert memory.answer(UPDATE, b"other", 104.9) is None
    assert memory.answer(UPDATE, b"k", 105.1) is None


def test_calls_that_may_run_twice_are_not_answered_from_memory():
    memory = Memory[str](5.0)
    memory.keep(b"k", "done", 100.0)
    assert memory.answer(PAUSE, b"k", 100.0) is None


def test_another_call_in_between_ends_it():
    memory = Memory[str](5.0)
    memory.keep(b"k", "done", 100.0)
    memory.forget()
    assert memory.answer(UPDATE, b"k", 100.0) is None
