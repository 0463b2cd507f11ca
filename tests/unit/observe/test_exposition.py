from __future__ import annotations

import string
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Summary
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_open
from prometheus_client.parser import text_string_to_metric_families as parse_text

from proxy.observe.exposition import LINES_A_STEP, Format, PageReader, escape, merge, negotiate

RECORDED = Path(__file__).parent / "pages_recorded" / "vllm-0.33.prom"
LABEL_TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r"), max_size=12)
NAMES = st.text(string.ascii_lowercase, min_size=1, max_size=4)


def read_page(body, engine):
    """Read twice by one reader: what it remembers from the first time must not change the second."""
    reader = PageReader(engine)
    first = reader.read(body)
    assert reader.read(body) == first
    return first


def parsed(pages, fmt):
    body = b"".join(merge(pages, fmt)).decode()
    if fmt is Format.TEXT:
        return list(parse_text(body))
    return list(parse_open(body + "# EOF\n"))


def samples(families):
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def vllm_page(seed=1, ranks=("0",)):
    registry = CollectorRegistry()
    tokens = Counter("vllm:generation_tokens", 'Tokens, "generated".', ["engine", "model_name"], registry=registry)
    running = Gauge("vllm:num_requests_running", "Running.", ["engine", "model_name"], registry=registry)
    latency = Histogram(
        "vllm:e2e_request_latency_seconds",
        "Latency.",
        ["engine", "model_name"],
        registry=registry,
        buckets=(0.5, 1, 60),
    )
    size = Summary("vllm:iteration_tokens", "Tokens.", ["engine"], registry=registry)
    info = Gauge("vllm:cache_config_info", "Cache.", ["block_size", "engine", "sliding"], registry=registry)
    Gauge("vllm:no_labels", "Plain.", registry=registry).set(seed)
    Gauge("process_start_time_seconds", "Start.", registry=registry).set(seed)
    for rank in ranks:
        tokens.labels(rank, "m").inc(seed)
        running.labels(rank, "m").set(seed)
        latency.labels(rank, "m").observe(seed)
        size.labels(rank).observe(seed)
        info.labels("16", rank, "None").set(1)
    return generate_latest(registry)


@pytest.mark.parametrize("fmt", list(Format))
def test_every_family_stands_once_and_every_sample_names_its_engine(fmt):
    pages = [read_page(vllm_page(seed), f"host:{seed}") for seed in (1, 2, 3)]
    families = parsed(pages, fmt)
    names = [family.name for family in families]
    assert len(names) == len(set(names))
    found = samples(families)
    for seed in (1, 2, 3):
        labels = (("engine", f"host:{seed}"), ("model_name", "m"))
        assert found["vllm:generation_tokens_total", labels] == seed
        assert found["vllm:num_requests_running", labels] == seed
        assert found["vllm:e2e_request_latency_seconds_count", labels] == 1
        assert found["vllm:no_labels", (("engine", f"host:{seed}"),)] == seed
        cache = (("block_size", "16"), ("engine", f"host:{seed}"), ("sliding", "None"))
        assert found["vllm:cache_config_info", cache] == 1
    assert not any(name.startswith(("process_", "python_")) for name, _ in found)


@pytest.mark.parametrize("fmt", list(Format))
def test_a_page_of_a_real_vllm_comes_out_whole(fmt):
    body = RECORDED.read_bytes()
    expected = {
        (name, tuple(sorted({**dict(labels), "engine": "e"}.items()))): value
        for (name, labels), value in samples(parse_text(body.decode())).items()
        if name.startswith("vllm:") and not (fmt is Format.OPENMETRICS and name.endswith("_created"))
    }
    assert len(expected) > 300
    assert samples(parsed([read_page(body, "e")], fmt)) == expected


def test_types_and_help_are_kept():
    families = {family.name: family for family in parsed([read_page(vllm_page(), "e")], Format.OPENMETRICS)}
    assert families["vllm:generation_tokens"].type == "counter"
    assert families["vllm:generation_tokens"].documentation == 'Tokens, "generated".'
    assert families["vllm:e2e_request_latency_seconds"].type == "histogram"
    assert families["vllm:iteration_tokens"].type == "summary"


@pytest.mark.parametrize("fmt", list(Format))
def test_each_data_parallel_rank_is_an_engine_of_its_own(fmt):
    found = samples(parsed([read_page(vllm_page(7, ("0", "1")), "h:1")], fmt))
    for name in ("h:1", "h:1/1"):
        assert found["vllm:generation_tokens_total", (("engine", name), ("model_name", "m"))] == 7


def test_what_looks_like_the_label_inside_another_labels_value_is_left_alone():
    line = b'vllm:x{a="p,engine=\\"9\\",",engine="0"} 1\n'
    (block,) = read_page(line, "e").values()
    assert block.samples == b'vllm:x{a="p,engine=\\"9\\",",engine="e"} 1\n'


@pytest.mark.parametrize(
    "line",
    [
        b"vllm:x",
        b"vllm:x{",
        b'vllm:x{a="1} 2',
        b'vllm:x{a="1"} two',
        b'vllm:x{a="1"}',
        b'vllm:x{a="\\q"} 1',
        b"vllm:x{a=1} 1",
        b'vllm:x{a="1"} 1 2 3',
        b"<html>vllm:x 1</html>",
    ],
)
def test_a_broken_line_costs_itself_only(line):
    page = read_page(b"# TYPE vllm:y gauge\nvllm:y 1\n" + line + b"\nvllm:z 2\n", "e")
    assert set(page) == {b"vllm:y", b"vllm:z"}


def test_what_is_not_utf_8_is_made_so():
    page = read_page(b'vllm:x{a="\xff"} 1\n', "e")
    assert page[b"vllm:x"].samples.decode("utf-8") == 'vllm:x{engine="e",a="\ufffd"} 1\n'


def test_what_is_remembered_gives_way_to_what_the_page_says():
    reader = PageReader("e")
    reader.read(b"# TYPE vllm:x gauge\nvllm:x 1\nvllm:x_sum 5\nvllm:old 3\n")
    page = reader.read(b"# TYPE vllm:x summary\nvllm:x_sum 6\nvllm:x_count two\nvllm:x_count 2\n")
    assert set(page) == {b"vllm:x"}
    assert page[b"vllm:x"].kind == b"summary"
    assert page[b"vllm:x"].samples == b'vllm:x_sum{engine="e"} 6\nvllm:x_count{engine="e"} 2\n'


def test_a_timestamp_is_never_taken_for_a_value():
    reader = PageReader("e")
    for moment in (5, 6):
        page = reader.read(f'vllm:x 5 {moment}\nvllm:y{{a="1"}} 5 {moment}\n'.encode())
        assert page[b"vllm:x"].samples == b'vllm:x{engine="e"} 5\n'
        assert page[b"vllm:y"].samples == b'vllm:y{engine="e",a="1"} 5\n'


def test_timestamps_line_ends_and_trailing_commas_go():
    page = read_page(b'# TYPE vllm:x gauge\r\nvllm:x{a="1",} 2.5e3 1700000000000\r\n', "e")
    assert page[b"vllm:x"].samples == b'vllm:x{engine="e",a="1"} 2.5e3\n'


@pytest.mark.parametrize("fmt", list(Format))
def test_an_engine_that_gives_a_name_another_type_is_left_out_there(fmt):
    pages = [
        read_page(b"# TYPE vllm:x gauge\nvllm:x 1\n", "a"),
        read_page(b'# TYPE vllm:x histogram\nvllm:x_bucket{le="+Inf"} 1\nvllm:x_count 1\nvllm:x_sum 1\n', "b"),
    ]
    assert samples(parsed(pages, fmt)) == {("vllm:x", (("engine", "a"),)): 1}


def test_openmetrics_has_no_creation_times_and_no_clashing_names():
    text = (
        b"# TYPE vllm:a_created gauge\nvllm:a_created 5\n# TYPE vllm:a_total counter\nvllm:a_total 1\n"
        b"# TYPE vllm:a gauge\nvllm:a 3\n# TYPE vllm:odd counter\nvllm:odd 4\nvllm:bare 6\n"
    )
    page = read_page(text, "e")
    assert {name for name, _ in samples(parsed([page], Format.TEXT))} >= {"vllm:a_created", "vllm:a_total", "vllm:a"}
    families = {family.name: family.type for family in parsed([page], Format.OPENMETRICS)}
    assert families == {"vllm:a": "counter", "vllm:odd": "unknown", "vllm:bare": "unknown"}


@settings(deadline=None)
@given(
    st.lists(
        st.dictionaries(
            NAMES,
            st.tuples(
                st.sampled_from(["counter", "gauge", "histogram"]),
                st.dictionaries(st.tuples(LABEL_TEXT, st.sampled_from(["0", "1"])), st.floats(0, 1e9), max_size=3),
            ),
            max_size=4,
        ),
        max_size=3,
    ),
    st.sampled_from(list(Format)),
)
def test_no_sample_is_lost_doubled_or_given_to_another_engine(engines, fmt):
    kinds = {}
    expected = {}
    pages = []
    for number, metrics in enumerate(engines):
        registry = CollectorRegistry()
        for name, (drawn, series) in metrics.items():
            kind = kinds.setdefault(name, drawn)
            make = {"counter": Counter, "gauge": Gauge, "histogram": Histogram}[kind]
            metric = make(f"vllm:{name}", "h", ["engine", "text"], registry=registry)
            for (text, rank), value in series.items():
                child = metric.labels(rank, text)
                getattr(child, {"counter": "inc", "gauge": "set", "histogram": "observe"}[kind])(value)
                engine = f"e{number}" if rank == "0" else f"e{number}/1"
                suffix = {"counter": "_total", "gauge": "", "histogram": "_sum"}[kind]
                expected[f"vllm:{name}{suffix}", (("engine", engine), ("text", text))] = value
        pages.append(read_page(generate_latest(registry), f"e{number}"))
    found = samples(parsed(pages, fmt))
    assert {key: found.get(key) for key in expected} == expected
    names = {name for name, _ in expected}
    assert {key for key in found if key[0] in names} == set(expected)


@settings(deadline=None)
@given(st.binary(max_size=300), st.sampled_from(list(Format)))
def test_no_engine_can_spoil_the_page(body, fmt):
    good = read_page(vllm_page(), "good")
    for start in (b"", b"vllm:", b"# TYPE vllm:x gauge\nvllm:x", b'vllm:x{a="'):
        bad = read_page(start + body, "bad")
        found = samples(parsed([good, bad], fmt))
        assert found["vllm:num_requests_running", (("engine", "good"), ("model_name", "m"))] == 1


@settings(deadline=None)
@given(LABEL_TEXT)
def test_an_escaped_value_reads_back(text):
    (family,) = parse_text(f'x{{a="{escape(text).decode()}"}} 1\n')
    assert family.samples[0].labels["a"] == text


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        ("", Format.TEXT),
        ("*/*", Format.TEXT),
        ("text/plain", Format.TEXT),
        ("text/html,application/xhtml+xml;q=0.9,*/*;q=0.8", Format.TEXT),
        ("application/openmetrics-text", Format.OPENMETRICS),
        ("application/openmetrics-text; version=1.0.0; charset=utf-8", Format.OPENMETRICS),
        ("application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1", Format.OPENMETRICS),
        ("application/openmetrics-text;version=1.0.0;q=0.4,text/plain;version=0.0.4;q=0.5", Format.TEXT),
        ("application/openmetrics-text;version=2.0.0", Format.TEXT),
        ("application/openmetrics-text;q=0", Format.TEXT),
        ("application/openmetrics-text;q=much", Format.TEXT),
        (
            "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,text/plain;version=0.0.4;q=0.3,*/*;q=0.2",
            Format.OPENMETRICS,
        ),
    ],
)
def test_the_format_is_what_the_scraper_likes_best(accept, expected):
    assert negotiate(accept) is expected


def test_a_fleet_of_64_is_merged_in_pieces():
    pages = [read_page(vllm_page(number), f"e{number}") for number in range(64)]
    pieces = list(merge(pages, Format.TEXT))
    assert pieces.count(b"") == 64, "a pause is possible after each engine"
    families = [piece for piece in pieces if piece]
    assert len(families) == len(pages[0])
    assert all(piece.count(b"# TYPE") == 1 for piece in families)


def test_a_page_is_read_in_steps_of_a_few_lines():
    body = RECORDED.read_bytes()
    lines = body.count(b"\n") + 1
    steps = PageReader("e").steps(body)
    pauses = 0
    while True:
        try:
            next(steps)
        except StopIteration as end:
            page = end.value
            break
        pauses += 1
    assert pauses == lines // LINES_A_STEP
    assert pauses > 2
    assert page == PageReader("e").read(body)
