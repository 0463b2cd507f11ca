import pytest

from proxy.core.identity import Look, restarted, start_time


@pytest.mark.parametrize(
    ("page", "want"),
    [
        (b"process_start_time_seconds 1.7e9\n", 1.7e9),
        (b"# TYPE process_start_time_seconds gauge\nprocess_start_time_seconds 12.5\nx 1\n", 12.5),
        (b'process_start_time_seconds{engine="0"} 3\n', 3.0),
        (b"xprocess_start_time_seconds 3\n", None),
        (b"process_start_time_seconds e\n", None),
        (b"", None),
    ],
)
def test_start_times(page, want):
    assert start_time(page) == want


@pytest.mark.parametrize(
    ("before", "now", "refused", "broken", "want"),
    [
        (Look("v1", start_time=1.0), Look("v1", start_time=1.0), True, True, None),
        (Look("v1", start_time=1.0), Look("v1", start_time=1.01), False, False, None),
        (Look("v1", start_time=1.0), Look("v1", start_time=9.0), False, False, "start time"),
        (Look("v1", start_time=1764.0), Look("v1", start_time=1764.1), False, False, "start time"),
        (Look("v1", start_time=1.0), Look("default", start_time=1.0), True, True, None),
        (Look("v1"), Look("default"), False, False, "back to 'default'"),
        (Look("v1", start_time=1.0), Look("default"), False, False, "back to 'default'"),
        (Look("v1"), Look("v1"), True, False, "refused connections"),
        (Look("v1"), Look("v1"), False, True, None),
        (Look("v1"), Look("v2"), False, True, None),
        (Look("default"), Look("default"), False, True, "connections broke"),
        (Look("default"), Look("default"), False, False, None),
        (Look("v1", plain=False), Look(None, plain=True), False, False, "lost its RL routes"),
        (Look(None, plain=True), Look(None, plain=True), False, True, None),
    ],
)
def test_another_process_is_told_from_the_same_one(before, now, refused, broken, want):
    why = restarted(before, now, refused=refused, broken=broken)
    assert (why is None) if want is None else (want in str(why))
