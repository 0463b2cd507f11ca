"""A proxy that cannot have an address says which, and which flag gives it another."""

from __future__ import annotations

import asyncio
import socket
import sys

import pytest


async def end_of(*flags: str) -> tuple[int | None, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "proxy", *flags, stderr=asyncio.subprocess.PIPE
    )
    _, said = await asyncio.wait_for(process.communicate(), 30)
    return process.returncode, said.decode()


@pytest.mark.parametrize("workers", ["1", "2"])
@pytest.mark.parametrize("flag", ["--port", "--control-port"])
async def test_a_port_that_is_taken_is_named_with_its_flag(flag: str, workers: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        flags = {"--port": "0", "--workers": workers, flag: port}
        code, said = await end_of(*(word for pair in flags.items() for word in pair))
    assert code == 1
    assert f"cannot listen on 127.0.0.1:{port}" in said
    assert f"choose another {flag}," in said


async def test_an_address_of_another_machine_is_told_with_its_flag() -> None:
    code, said = await end_of("--host", "192.0.2.1", "--port", "0", "--control-token", "t")
    assert code == 1
    assert "cannot listen on 192.0.2.1:0" in said
    assert "choose another --host," in said
