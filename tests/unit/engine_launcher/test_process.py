"""An engine's process and its guard: real children, small ones, and none of them left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from engine_launcher import guard
from engine_launcher.errors import LauncherError
from engine_launcher.process import EngineProcess
from engine_launcher.settings import EngineCommand, Rotation

# Like vLLM: a server with a child in a session of its own, which ignores SIGTERM and outlives its parent. Each line is
# one write, as the two share a pipe and `print` may write a line in pieces.
FAMILY = r"""
import os, signal, sys, time
pid = os.fork()
if pid == 0:
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.write(1, b"child %d\n" % os.getpid())
    time.sleep(600)
signal.signal(signal.SIGTERM, {on_term})
os.write(1, b"server %d\n" % os.getpid())
while True:
    time.sleep(600)
"""
OBEYS = "lambda *_: sys.exit(0)"
IGNORES = "signal.SIG_IGN"


def command(code: str) -> EngineCommand:
    return EngineCommand((sys.executable, "-c", textwrap.dedent(code)), dict(os.environ))


@pytest.fixture
async def make(tmp_path: Path) -> AsyncIterator[Callable[..., EngineProcess]]:
    made: list[EngineProcess] = []

    def build(code: str, grace: float = 30.0) -> EngineProcess:
        made.append(EngineProcess(f"engine {len(made)}", command(code), tmp_path / "logs" / "e.log", grace))
        return made[-1]

    yield build
    for each in made:
        await each.kill()


async def logged(process: EngineProcess, *words: str) -> list[int]:
    """Wait until each word has been logged, and return the number after each."""
    while True:
        lines = dict(line.split() for line in process.tail().splitlines() if len(line.split()) == 2)
        if all(word in lines for word in words):
            return [int(lines[word]) for word in words]
        assert process.alive, process.tail()
        await asyncio.sleep(0.01)


def state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def running(pid: int) -> bool:
    return state(pid) not in "ZX"


async def until(true: Callable[[], bool]) -> None:
    while not true():
        await asyncio.sleep(0.01)


async def test_the_exit_code_is_the_engines(make: Callable[..., EngineProcess]) -> None:
    process = make("import sys; print('last words'); sys.exit(3)")
    await process.start()
    assert await process.wait() == 3
    assert not process.alive
    assert process.tail() == "last words"


async def test_a_signal_that_ended_the_engine_shows_in_the_exit_code(make: Callable[..., EngineProcess]) -> None:
    process = make("import os; os.kill(os.getpid(), 9)")
    await process.start()
    assert await process.wait() == 128 + signal.SIGKILL


async def test_a_command_that_is_not_there_is_said_in_the_log(tmp_path: Path) -> None:
    process = EngineProcess("e", EngineCommand(("/no/such/python",), dict(os.environ)), tmp_path / "e.log", 1.0)
    await process.start()
    assert await process.wait() == 127
    assert "cannot start /no/such/python" in process.tail()


async def test_stop_ends_children_that_ignore_it_and_have_left_the_group(make: Callable[..., EngineProcess]) -> None:
    process = make(FAMILY.format(on_term=OBEYS))
    await process.start()
    pids = await logged(process, "server", "child")
    assert {each.pid for each in process.processes()} == set(pids)
    await process.stop()
    assert not any(running(pid) for pid in pids)
    assert process.returncode == 0


async def test_a_server_that_ignores_the_request_is_killed_after_the_grace_time(
    make: Callable[..., EngineProcess],
) -> None:
    process = make(FAMILY.format(on_term=IGNORES), grace=0.1)
    await process.start()
    pids = await logged(process, "server", "child")
    await process.stop()
    assert not any(running(pid) for pid in pids)
    assert process.returncode == 128 + signal.SIGKILL


async def test_kill_cuts_a_running_grace_time_short(make: Callable[..., EngineProcess]) -> None:
    process = make(FAMILY.format(on_term=IGNORES), grace=3600)
    await process.start()
    pids = await logged(process, "server", "child")
    stopping = asyncio.ensure_future(process.stop())
    await asyncio.sleep(0)
    await process.kill()
    await stopping
    assert not any(running(pid) for pid in pids)


async def test_a_server_that_crashes_takes_its_children_along(make: Callable[..., EngineProcess]) -> None:
    process = make(FAMILY.format(on_term=OBEYS))
    await process.start()
    server, child = await logged(process, "server", "child")
    os.kill(server, signal.SIGKILL)
    assert await process.wait() == 128 + signal.SIGKILL
    assert not running(child)


async def test_nothing_is_left_when_the_launcher_itself_is_killed(tmp_path: Path) -> None:
    log = tmp_path / "e.log"
    launcher = f"""
        import asyncio, os, sys
        from pathlib import Path
        from engine_launcher.process import EngineProcess
        from engine_launcher.settings import EngineCommand
        async def main():
            code = {FAMILY.format(on_term=OBEYS)!r}
            process = EngineProcess("e", EngineCommand((sys.executable, "-c", code), dict(os.environ)), Path({str(log)!r}), 1.0)
            await process.start()
            await process.wait()
        asyncio.run(main())
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(launcher)]) as parent:  # noqa: ASYNC220 - brief
        watcher = EngineProcess("watch", command(""), log, 1.0)
        await until(lambda: watcher.tail().count("\n") == 1)
        pids = [int(line.split()[1]) for line in watcher.tail().splitlines()]
        assert all(running(pid) for pid in pids)
        parent.kill()
    await until(lambda: not any(running(pid) for pid in pids))


@pytest.mark.parametrize("which", ["outer", "inner"])
async def test_nothing_is_left_when_a_guard_is_killed(make: Callable[..., EngineProcess], which: str) -> None:
    """Ray kills the children of a worker whose node it gives up, and the engine's server dies with its guard."""
    process = make(FAMILY.format(on_term=IGNORES), grace=3600)
    await process.start()
    pids = await logged(process, "server", "child")
    assert process._process is not None
    outer = process._process.pid
    inner = guard.descendants(outer)[0]
    assert inner not in pids
    os.kill(outer if which == "outer" else inner, signal.SIGKILL)
    await until(lambda: not any(running(pid) for pid in (*pids, outer, inner)))
    assert await process.wait() in (-signal.SIGKILL, 128 + signal.SIGKILL)


async def test_it_can_be_started_again_and_the_tail_is_of_the_last_run(make: Callable[..., EngineProcess]) -> None:
    process = make("print('once')")
    await process.start()
    await process.wait()
    process.command = command("print('twice')")
    await process.start()
    await process.wait()
    assert process.tail() == "twice"
    assert process.log.read_text() == "once\ntwice\n"


async def test_starting_twice_is_refused(make: Callable[..., EngineProcess]) -> None:
    process = make(FAMILY.format(on_term=OBEYS))
    await process.start()
    with pytest.raises(LauncherError, match="running already"):
        await process.start()


async def test_a_log_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    process = EngineProcess("e", command(""), tmp_path / "file" / "e.log", 1.0)
    with pytest.raises(LauncherError, match="choose another --log-dir"):
        await process.start()


async def test_frozen_processes_can_be_thawed(make: Callable[..., EngineProcess]) -> None:
    process = make(FAMILY.format(on_term=OBEYS))
    await process.start()
    (server,) = await logged(process, "server")
    process.signal_all(signal.SIGSTOP)
    await until(lambda: state(server) == "T")
    process.signal_all(signal.SIGCONT)
    await process.stop()
    assert process.returncode == 0


def test_a_process_says_what_it_is(tmp_path: Path) -> None:
    assert (
        repr(EngineProcess("engine 1", command(""), tmp_path / "e.log", 1.0)) == "<EngineProcess engine 1 not started>"
    )


async def test_a_full_log_is_turned_over_without_losing_a_line(tmp_path: Path) -> None:
    code = "for number in range(400): print(f'line {number:04d} ' + 'x' * 90, flush=True)"
    process = EngineProcess("e", command(code), tmp_path / "e.log", 1.0, Rotation(max_bytes=20_000, keep=5))
    await process.start()
    assert await process.wait() == 0
    logs = [tmp_path / "e.log", *(tmp_path / f"e.log.{number}" for number in range(1, 6))]
    there = [each for each in logs if each.exists()]
    assert 2 < len(there) < 6
    lines = [line.split()[1] for line in "".join(each.read_text() for each in reversed(there)).splitlines()]
    assert lines == [f"{number:04d}" for number in range(400)]
    assert all(each.stat().st_size <= 20_000 for each in there)
    assert process.tail(1).startswith("line 0399")


@pytest.mark.parametrize("keep", [0, 1])
async def test_no_more_old_logs_are_kept_than_asked_for(keep: int, tmp_path: Path) -> None:
    code = "for number in range(200): print('x' * 99, flush=True)"
    process = EngineProcess("e", command(code), tmp_path / "e.log", 1.0, Rotation(max_bytes=1000, keep=keep))
    await process.start()
    assert await process.wait() == 0
    assert len(os.listdir(tmp_path)) == 1 + keep


async def test_a_log_that_fails_later_does_not_stop_the_engine(tmp_path: Path) -> None:
    code = "for number in range(3000): print('x' * 99, flush=True)"
    (tmp_path / "e.log.1").mkdir()
    (tmp_path / "e.log.1" / "in the way").write_text("")
    process = EngineProcess("e", command(code), tmp_path / "e.log", 1.0, Rotation(max_bytes=1000, keep=1))
    await process.start()
    assert await process.wait() == 0
