"""A small parent for one engine that ends the whole process tree, whatever happens to the launcher.

Run by path, with the standard library only: ``python -I guard.py GRACE_SECONDS LOG MAX_BYTES KEEP COMMAND [ARG...]``.

vLLM spawns children (``VLLM::EngineCore``, workers) that can outlive their API server, and a launcher that is ended by
SIGKILL cannot clean up. Both are settled here:

- standard input is a pipe whose other end only the launcher holds, so its end-of-file means that the launcher is gone,
  however it went;
- the guard is a child subreaper (``prctl(2)``, ``PR_SET_CHILD_SUBREAPER``): every orphan below it becomes its own
  child, so it can name, signal and wait for all of them, also those that moved to a session of their own;
- the guard may be killed itself: a worker of Ray whose node is given up sends SIGKILL to its children and ends. So
  there are two of it, and each ends the tree when the other is gone. The outer one only passes signals on.

What the engine writes goes through here into ``LOG``, so that the file can be turned over at ``MAX_BYTES`` without
losing a line; ``KEEP`` older ones stay beside it as ``LOG.1``, ``LOG.2``... With ``-`` for ``LOG`` the engine writes to
the guard's own output.

Signals: SIGTERM or SIGINT end the engine (SIGTERM to it, SIGKILL to whatever is left after the grace time); SIGUSR1
kills the whole tree at once, as a crash would, also during that grace time. The exit code is the engine's, or 128 + N
when signal N ended it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""What the launcher says to the outer guard is for the inner one."""

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36

POLL_SECONDS = 0.05
"""How often children are looked at while the tree is being ended: a grandchild's end raises no signal here."""

READ_BYTES = 64 * 1024
"""Most that is taken from the engine's output at once: what a pipe holds on Linux."""

LAST_WORDS_SECONDS = 2.0
"""How long the end of the output is waited for once every process is gone; it is in the pipe by then."""


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl failed")


def parents() -> dict[int, int]:
    """Parent of every live process that this user can see, by process id (from ``/proc/PID/stat``)."""
    found: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError, ValueError, IndexError):
            # The name field may hold spaces and brackets, so the fields are counted from its last bracket.
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            if state not in "ZX":
                found[int(entry.name)] = int(parent)
    return found


def descendants(root: int) -> list[int]:
    """Live process ids below ``root``, parents before children."""
    children: dict[int, list[int]] = {}
    for pid, parent in parents().items():
        children.setdefault(parent, []).append(pid)
    found: list[int] = []
    queue = [root]
    while queue:
        below = children.get(queue.pop(0), [])
        found += below
        queue += below
    return found


def send(pids: list[int], signum: int) -> None:
    """Send ``signum`` to each process; one that has ended meanwhile is fine."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signum)


def reap() -> dict[int, int]:
    """Wait status by process id of every child that has ended since the last call."""
    ended: dict[int, int] = {}
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            ended[pid] = status
    return ended


class Wakeups:
    """Signals and the end of standard input, as one thing to wait for."""

    def __init__(self) -> None:
        self._read, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(write)
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGCHLD):
            signal.signal(signum, lambda *_: None)
        self._sources = [self._read, 0]

    def wait(self, seconds: float | None) -> str:
        """``"kill"``, ``"stop"``, or ``""`` when a child ended or the time is up."""
        ready, _, _ = select.select(self._sources, [], [], seconds)
        got = os.read(self._read, 4096) if self._read in ready else b""
        gone = 0 in ready and not os.read(0, 4096)
        if gone:
            self._sources.remove(0)
        if signal.SIGUSR1 in got:
            return "kill"
        return "stop" if gone or signal.SIGTERM in got or signal.SIGINT in got else ""


class Log:
    """A file that is turned over when it is full. A disk that is full loses lines; it does not stop the engine."""

    def __init__(self, path: Path, max_bytes: int, keep: int) -> None:
        self._path = path
        self._max = max_bytes
        self._keep = keep
        self._fd = -1
        self._size = 0

    def write(self, data: bytes) -> None:
        """Append ``data``; a file ends with a whole line where one ends in ``data``."""
        with contextlib.suppress(OSError):
            if self._fd < 0:
                self._open()
            while data:
                room = max(0, self._max - self._size)
                fits = len(data) if len(data) <= room else data.rfind(b"\n", 0, room) + 1
                if not fits and self._size:
                    self._turn_over()
                    continue
                # A line longer than a whole file is cut.
                done = os.write(self._fd, data[: fits or room])
                self._size += done
                data = data[done:]

    def _open(self) -> None:
        self._fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._size = os.fstat(self._fd).st_size

    def _turn_over(self) -> None:
        os.close(self._fd)
        self._fd = -1
        names = [self._path, *(self._path.with_name(f"{self._path.name}.{number + 1}") for number in range(self._keep))]
        for older, newer in zip(names[:0:-1], names[-2::-1], strict=True):
            with contextlib.suppress(FileNotFoundError):
                newer.replace(older)
        if not self._keep:
            self._path.unlink()
        self._open()


def pump(source: int, log: Log) -> threading.Thread:
    """Carry what comes from ``source`` into ``log`` until every writer is gone."""

    def run() -> None:
        while data := os.read(source, READ_BYTES):
            log.write(data)

    thread = threading.Thread(target=run, name="log", daemon=True)
    thread.start()
    return thread


def spawn(command: list[str], output: int | None) -> int:
    """Start the engine in a session of its own; it dies with the guard, should that be killed."""
    guard = os.getpid()

    def in_child() -> None:
        # The guard has one thread as yet, so running Python between fork and exec is safe here.
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guard:
            os._exit(128 + signal.SIGKILL)

    engine = subprocess.Popen(  # noqa: S603 - the command is the launcher's own
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
        preexec_fn=in_child,  # noqa: PLW1509 - see in_child
    )
    return engine.pid


def main(argv: list[str]) -> int:
    """Run ``argv[4:]`` as the engine and return its exit code; before it, see the head of this file."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    # A signal that comes too early waits until there is somebody to take it.
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
    outer = os.getpid()
    inner = os.fork()
    if inner:
        return watch_over(inner)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    _prctl(PR_SET_PDEATHSIG, signal.SIGUSR1)
    if os.getppid() != outer:
        return 128 + signal.SIGKILL
    return run(argv)


def watch_over(inner: int) -> int:
    """Pass signals on to the inner guard and return its exit code; what it leaves behind is ended."""
    for signum in PASSED_ON:
        signal.signal(signum, lambda got, _: send([inner], got))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    _, status = os.waitpid(inner, 0)
    while left := descendants(os.getpid()):
        send(left, signal.SIGKILL)
        reap()
        time.sleep(POLL_SECONDS)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def run(argv: list[str]) -> int:
    """Start the engine, end it when that is asked for, and return its exit code."""
    grace, log, command = float(argv[0]), argv[1], argv[4:]
    wakeups = Wakeups()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    source, output = (None, None) if log == "-" else os.pipe2(os.O_CLOEXEC)
    try:
        engine = spawn(command, output)
    except OSError as error:
        print(f"cannot start {command[0]}: {error}", file=sys.stderr, flush=True)  # noqa: T201 - the engine's log
        return 127
    words = None
    if source is not None and output is not None:
        os.close(output)
        words = pump(source, Log(Path(log), int(argv[2]), int(argv[3])))
    ended: dict[int, int] = {}
    kill_at: float | None = None
    while True:
        asked = wakeups.wait(None if kill_at is None else POLL_SECONDS)
        ended |= reap()
        left = descendants(os.getpid())
        if engine in ended:
            # What an engine leaves behind cannot serve any more.
            kill_at = time.monotonic()
            if not left:
                break
        elif asked == "kill":
            kill_at = time.monotonic()
        elif asked == "stop" and kill_at is None:
            # Only the server is asked: it takes its own children down in order.
            send([engine], signal.SIGTERM)
            kill_at = time.monotonic() + grace
        if kill_at is not None and time.monotonic() >= kill_at:
            send(left, signal.SIGKILL)
    if words is not None:
        words.join(LAST_WORDS_SECONDS)
    code = os.waitstatus_to_exitcode(ended[engine])
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
