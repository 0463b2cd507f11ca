"""Runs inside ``.clients``: calls functions of ``using_*.py`` as the test process asks for them, many at a time.

One JSON line in for each call, ``{"id", "call": "using_openai.chat", "kwargs"}``, and one out when it has ended:
``{"id", "result"}``, or ``{"id", "error"}`` with the exception as the client raised it. Standard output is kept for
these lines; what libraries print goes to standard error.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import sys
import threading
from typing import IO, Any

PACKAGE = "tests.contract.clients"


def describe(error: BaseException) -> dict[str, Any]:
    """What a test may ask about an exception: its class, its message, and what HTTP clients hang on it."""
    cause = error.__cause__
    return {
        "type": type(error).__name__,
        "message": str(error),
        "status": getattr(error, "status_code", None) or getattr(getattr(error, "response", None), "status_code", None),
        "body": getattr(error, "body", None),
        "cause": None if cause is None else type(cause).__name__,
    }


def run(call: str, kwargs: dict[str, Any]) -> dict[str, Any]:
    """One call, to its end."""
    module, _, function = call.rpartition(".")
    try:
        result = getattr(importlib.import_module(f"{PACKAGE}.{module}"), function)(**kwargs)
        if inspect.iscoroutine(result):
            result = asyncio.run(result)
    except Exception as error:
        return {"error": describe(error)}
    return {"result": result}


def serve(questions: IO[str], answers: IO[str]) -> None:
    """Answer until the questions end."""
    lock = threading.Lock()

    def answer(question: dict[str, Any]) -> None:
        line = json.dumps({"id": question["id"], **run(question["call"], question["kwargs"])}, default=str)
        with lock:
            answers.write(line + "\n")
            answers.flush()

    for line in questions:
        # A daemon: a call that hangs must not keep the process alive when its test has given up.
        threading.Thread(target=answer, args=(json.loads(line),), daemon=True).start()


if __name__ == "__main__":
    out, sys.stdout = sys.stdout, sys.stderr
    serve(sys.stdin, out)
