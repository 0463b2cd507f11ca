"""The many spellings of one path."""

from urllib.parse import unquote_to_bytes

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from proxy.core.spelling import normal_form, percent_decode, plain


@given(st.binary(max_size=60))
def test_decoding_is_that_of_the_standard_library(raw):
    assert percent_decode(raw) == unquote_to_bytes(raw)


@given(st.binary(max_size=60))
@example(b"%\x0000")
@example(b"%25%0970ause")
def test_a_normal_form_is_its_own_normal_form(raw):
    form = normal_form(b"/" + raw)
    assert form is None or normal_form(form) == form


@given(st.binary(max_size=60))
@example(b"a/.")
@example(b"a/")
@example(b"a/..")
@example(b"/")
def test_a_plain_path_is_its_normal_form(raw):
    """The quick look at a path misses no spelling that has another normal form."""
    assert plain(b"/" + raw) == (normal_form(b"/" + raw) or b"/" + raw)


@pytest.mark.parametrize("path", [b"/v1/completions", b"/v1/files/a.b/c-d_e~f", b"/x:y@z=1,2"])
def test_a_usual_path_is_plain_as_it_is(path):
    assert plain(path) is path
