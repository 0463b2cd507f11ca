"""Let vLLM 0.33 use an NCCL older than the 2.29.7 that it was made for; torch 2.11 brings 2.28.

vLLM looks ``ncclCommSuspend`` and ``ncclCommResume`` up in its NCCL, which only its sleep mode calls. Where they are
missing, ``PyNcclCommunicator`` disables itself without a word (vllm/distributed/device_communicators/pynccl.py):
broadcasts then do nothing on either side, every call of a weight sync answers 200, and the engine serves whatever was in
the memory that it meant to receive into.

A vLLM plugin (``vllm.general_plugins``), and called by the trainer. ``python old_nccl.py`` says what is missing here.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from typing import Any, Final

SLEEP_ONLY: Final = ("ncclCommSuspend", "ncclCommResume")
"""Called after `has_symbol` said that they are there; nothing else needs them."""

OFF: Final = "FLEETGATE_PLAIN_NCCL"
"""Set for a process in which vLLM is to be left as it is, to show what it does then."""


def missing() -> list[str]:
    """Those of `SLEEP_ONLY` that vLLM's NCCL lacks; all of them where there is no NCCL."""
    from vllm.utils.nccl import find_nccl_library

    try:
        library = ctypes.CDLL(find_nccl_library())
    except OSError:
        return list(SLEEP_ONLY)
    return [each for each in SLEEP_ONLY if not hasattr(library, each)]


def register() -> None:
    """Have vLLM do without what is missing."""
    if os.environ.get(OFF):
        return
    from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary

    lacking = missing()
    NCCLLibrary.exported_functions = [each for each in NCCLLibrary.exported_functions if each.name not in lacking]


def facts() -> dict[str, Any]:
    """Version of NCCL and what it lacks."""
    import torch

    return {"nccl": ".".join(str(each) for each in torch.cuda.nccl.version()), "nccl_lacks": missing()}


if __name__ == "__main__":
    json.dump(facts(), sys.stdout)
