import pytest

from proxy.core.membership import Change, difference, read_list


def test_a_list_is_read_line_by_line_with_comments_and_doubles():
    text = "# engines\nhttp://a:1\n\n  http://b:2/  # second\nhttp://a:1\n"
    assert read_list(text) == ["http://a:1", "http://b:2"]


def test_a_bad_line_spoils_the_whole_list_and_is_named():
    with pytest.raises(ValueError, match=r"line 2.*scheme"):
        read_list("http://a:1\nb:2\n")


def test_difference_keeps_the_sources_order():
    assert difference(["x", "y"], ["z", "y", "w"]) == Change(add=("z", "w"), remove=("x",))
    assert difference([], []) == Change()
