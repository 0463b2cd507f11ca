import json

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core import jsonspan

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(st.text(min_size=1, max_size=5), VALUES, min_size=1, max_size=5), st.sampled_from([None, 2]))
def test_every_member_is_found_where_it_stands(data, indent):
    text = json.dumps(data, indent=indent, ensure_ascii=False).encode()
    found = jsonspan.members(text, 0)
    assert [json.loads(text[a:b]) for _, a, b in found] == list(data.values())


@given(st.lists(VALUES, max_size=6), st.sampled_from([None, 1]))
def test_every_element_is_found_where_it_stands(data, indent):
    text = json.dumps(data, indent=indent).encode()
    assert [json.loads(text[a:b]) for a, b in jsonspan.elements(text, 0)] == data


@given(VALUES, st.integers())
def test_a_replacement_changes_nothing_else(other, number):
    data = {"x": other, "init_info": {"a": other, "rank_offset": 1, "b": [other]}, "y": other}
    text = json.dumps(data, indent=1).encode()
    changed = jsonspan.replace(text, "init_info.rank_offset", str(number).encode())
    data["init_info"]["rank_offset"] = number
    assert orjson.loads(changed) == orjson.loads(json.dumps(data))


def test_spacing_and_number_formats_stay():
    text = b'{ "a" : 1.50e3 ,\n"b":{"rank": 1 ,"c":"\\"rank\\": 7"}}'
    assert jsonspan.replace(text, "b.rank", b"42") == text.replace(b'"rank": 1 ', b'"rank": 42 ')


def test_a_missing_key_is_added_and_a_missing_object_is_an_error():
    assert orjson.loads(jsonspan.replace(b'{"a": {}}', "a.b", b"1")) == {"a": {"b": 1}}
    assert orjson.loads(jsonspan.replace(b'{"a": {"c":2}}', "a.b", b"1")) == {"a": {"b": 1, "c": 2}}
    assert orjson.loads(jsonspan.replace(b"{}", "b", b"1")) == {"b": 1}
    with pytest.raises(KeyError):
        jsonspan.replace(b'{"a": 1}', "a.b", b"1")


def test_of_repeated_keys_the_last_counts_as_it_does_for_the_parser():
    text = b'{"r": 1, "r": 2}'
    assert jsonspan.replace(text, "r", b"9") == b'{"r": 1, "r": 9}'
    assert jsonspan.find(b"[]", "a") is None
    assert jsonspan.find(b'"x"', "a") is None
