"""What the GPU run rests on and a laptop can tell: equal loads for both routes, archives that arrive whole, the NCCL plugin."""

import asyncio
import contextlib
import importlib.util
import json
import lzma
import random
import sys
import types
from pathlib import Path

import pytest

GPU = Path(__file__).parents[3] / "benchmarks" / "gpu"


def load(name):
    """A module of the run; its neighbours import one another by bare names, so none stays in `sys.modules`."""
    spec = importlib.util.spec_from_file_location(f"gpu_{name}", GPU / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[spec.name]
    return module


class Engine(asyncio.Protocol):
    """Answers each request whole and keeps its body."""

    bodies: list[dict]

    def connection_made(self, transport):
        self.transport, self.rest = transport, b""

    def data_received(self, data):
        self.rest += data
        head, found, body = self.rest.partition(b"\r\n\r\n")
        length = int(next((line for line in head.split(b"\r\n") if line.startswith(b"Content-Length")), b":0")[15:])
        if not found or len(body) < length:
            return
        self.bodies.append(json.loads(body[:length]))
        self.rest = body[length:]
        answer = json.dumps(
            {
                "choices": [{"finish_reason": "length"}],
                "usage": {"completion_tokens": self.bodies[-1]["max_tokens"]},
            }
        ).encode()
        self.transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(answer), answer))


async def asked(module, seed, slot, count):
    """Bodies of the first requests of one slot, at a server of its own."""
    bodies: list[dict] = []
    engine = type("One", (Engine,), {"bodies": bodies})
    server = await asyncio.get_running_loop().create_server(engine, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    client = module.Client(module.Plan([url], 1, seed, stream=False))
    task = asyncio.ensure_future(client.slot(slot))
    while len(client.rollouts) < count:
        await asyncio.sleep(0)
    client.stopping = True
    await task
    server.close()
    return bodies[:count]


async def test_every_route_is_asked_for_the_same_rollouts():
    module = load("load")
    one = await asked(module, 7, 3, 5)
    assert one == await asked(module, 7, 3, 5)
    assert one != await asked(module, 7, 4, 5)
    assert len({each["max_tokens"] for each in one}) > 1


def test_archives_cut_over_several_loads_arrive_whole(tmp_path, monkeypatch):
    pack, arrive = load("pack"), load("arrive")
    monkeypatch.setattr(arrive, "INBOX", tmp_path / "inbox")
    contents = {name: random.Random(name).randbytes(3000) for name in ("first", "second")}
    pieces = [tmp_path / f"{name}.tar.xz" for name in contents]
    for piece, content in zip(pieces, contents.values(), strict=True):
        piece.write_bytes(lzma.compress(content))
    monkeypatch.setattr(pack, "LIMIT", 2000)
    loads = pack.fill(pieces, tmp_path)
    assert len(loads) > 2
    for each in loads:
        assert sum(one.stat().st_size for one in each.iterdir()) <= pack.LIMIT
        arrive.take(each)
    for name, content in contents.items():
        pieces = sorted(arrive.INBOX.glob(f"{name}.tar.xz*"))
        with contextlib.closing(arrive.Joined(pieces)) as joined, lzma.open(joined) as source:
            assert source.read() == content


@pytest.fixture
def nccl(monkeypatch):
    """vLLM as far as the plugin knows it, and the names that its NCCL lacks."""
    module = load("old_nccl")
    wrapper = types.ModuleType("vllm.distributed.device_communicators.pynccl_wrapper")
    names = ["ncclBroadcast", *module.SLEEP_ONLY]
    wrapper.NCCLLibrary = type(
        "NCCLLibrary", (), {"exported_functions": [types.SimpleNamespace(name=each) for each in names]}
    )
    for name in ("vllm", "vllm.distributed", "vllm.distributed.device_communicators"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, wrapper.__name__, wrapper)
    monkeypatch.delenv(module.OFF, raising=False)
    return module, lambda: [each.name for each in wrapper.NCCLLibrary.exported_functions]


def test_the_plugin_takes_out_what_is_missing_and_nothing_else(nccl, monkeypatch):
    module, exported = nccl
    monkeypatch.setattr(module, "missing", list)
    module.register()
    assert exported() == ["ncclBroadcast", "ncclCommSuspend", "ncclCommResume"]
    monkeypatch.setattr(module, "missing", lambda: ["ncclCommSuspend"])
    module.register()
    assert exported() == ["ncclBroadcast", "ncclCommResume"]


def test_the_plugin_leaves_vllm_alone_where_told_so(nccl, monkeypatch):
    module, exported = nccl
    monkeypatch.setattr(module, "missing", lambda: list(module.SLEEP_ONLY))
    monkeypatch.setenv(module.OFF, "1")
    module.register()
    assert exported() == ["ncclBroadcast", "ncclCommSuspend", "ncclCommResume"]
