"""What the launcher reports: each message says what was wrong and what would be right."""

from __future__ import annotations

USAGE_EXIT = 2
"""Exit code for bad usage or configuration (the same for every fleetgate command)."""

FAILURE_EXIT = 1
"""Exit code for anything else that ends a command: an engine died, a port was taken."""


class LauncherError(Exception):
    """The launcher cannot go on; ``str()`` of it is meant for a person."""

    exit_code: int = FAILURE_EXIT


class UsageError(LauncherError):
    """What was asked for cannot work: a missing model, a count below one, a vLLM that is too old."""

    exit_code = USAGE_EXIT


class PortTakenError(LauncherError):
    """A port that was asked for by number is in use by another process."""


class EngineDiedError(LauncherError):
    """An engine ended by itself; the message holds the end of its log."""


class EngineSlowError(LauncherError):
    """An engine did not answer ``/health`` within the ready wait; the message holds the end of its log."""
