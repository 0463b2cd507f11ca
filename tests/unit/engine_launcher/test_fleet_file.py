"""``fleet.yaml``: what it may say, what it becomes, and how a slip is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine_launcher.errors import UsageError
from engine_launcher.fleet_file import read, unequal
from engine_launcher.settings import FleetSpec


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "fleet.yaml"
    path.write_text(text)
    return path


def test_unequal_engines_take_what_they_leave_out_from_the_top(tmp_path: Path) -> None:
    file = read(
        written(
            tmp_path,
            """
            model: /models/policy
            args: [--max-model-len, 8192]
            env: {A: 1, B: true}
            engines:
              - {count: 2}
              - name: big
                gpus: 4
                model: /models/judge
                args: --gpu-memory-utilization 0.85
                env: {B: no way}
                port: 9000
            """,
        )
    )
    fleet = FleetSpec(count=1, model=file.model, extra=file.args, environment=file.env)
    first, second, big = unequal(file.engines, fleet)
    assert [each.name for each in (first, second, big)] == ["0", "1", "big"]
    assert first.model == Path("/models/policy")
    assert first.extra == ("--max-model-len", "8192")
    assert first.environment == {"A": "1", "B": "true"}
    assert first.gpus is None
    assert big.extra == ("--max-model-len", "8192", "--gpu-memory-utilization", "0.85")
    assert big.environment == {"A": "1", "B": "no way"}
    assert (big.model, big.gpus, big.port, big.share) == (Path("/models/judge"), 4, 9000, 3)


def test_an_entry_with_a_name_and_a_count_is_numbered(tmp_path: Path) -> None:
    file = read(written(tmp_path, "engines: [{name: s, count: 2, kind: sim, port: 7000}]"))
    found = unequal(file.engines, FleetSpec(count=1))
    assert [(each.name, each.port) for each in found] == [("s-0", 7000), ("s-1", 7001)]


def test_dashes_are_as_good_as_underscores_at_the_top(tmp_path: Path) -> None:
    assert read(written(tmp_path, "ready-wait: 5\nproxy: {min-engines: 2}")).flags() == {"ready_wait": 5.0}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("modle: x", r"fleet\.yaml: unknown key 'modle'; did you mean model\?"),
        ("engines: [{gpu: 1}]", r"engines\[0\]: unknown key 'gpu'; did you mean gpus\?"),
        ("engines: [{count: 1}, {argz: []}]", r"engines\[1\]: unknown key 'argz'; did you mean args\?"),
        ("engines: [{count: 0}]", r"engines\[0\]\.count: .*greater than or equal to 1"),
        ("engines: [{kind: llama}]", r"engines\[0\]\.kind: .*'vllm' or 'sim'"),
        ("engines: [{name: a/b}]", r"engines\[0\]\.name: 'a/b' becomes part of a file name"),
        ("proxy: {polici: sticky}", r"proxy: unknown key 'polici'; did you mean policy\?"),
        ("restarts: many", r"restarts: .*integer"),
        ("- a list", "must be a mapping"),
        ("{", "is not YAML"),
    ],
)
def test_a_slip_is_told_with_its_place(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        read(written(tmp_path, text))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read .*absent"):
        read(tmp_path / "absent")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("engines: [{name: a}, {name: a}]", "two engines are called 'a'"),
        ("engines: [{port: 7001, count: 2}, {port: 7002}]", "two engines are to listen on 127.0.0.1:7002"),
    ],
)
def test_what_is_given_twice_is_refused(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        unequal(read(written(tmp_path, text)).engines, FleetSpec(count=1))
