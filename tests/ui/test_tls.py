"""TLS on both listeners and towards engines, with a CA of one's own."""

from __future__ import annotations

import asyncio
import json
import shutil
import ssl
import subprocess

import aiohttp
import pytest
from aiohttp import web

from proxy import app as proxy_app
from proxy.config import Settings
from proxy.core.engine_state import State
from proxy.examine import Examiner, Grade
from proxy.sources import ConfigError, load
from tests.scenarios.control.mock import MockEngine
from tests.tools.process import proxy_process


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """A certificate that is its own CA, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate of these tests")
    folder = tmp_path_factory.mktemp("tls")
    key, cert = folder / "key.pem", folder / "cert.pem"
    what = ["-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    names = ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run(
        ["openssl", "req", "-x509", *what, *names, "-keyout", key, "-out", cert], check=True, capture_output=True
    )
    return cert, key


class TlsEngine(MockEngine):
    """The same behind TLS."""

    context: ssl.SSLContext

    @property
    def url(self):
        return f"https://127.0.0.1:{self.port}"

    async def start(self):
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, shutdown_timeout=0.05, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, ssl_context=self.context, reuse_address=True).start()
        self.port = self._runner.addresses[0][1]
        return self


@pytest.fixture
async def engine(certificate):
    engine = TlsEngine()
    engine.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    engine.context.load_cert_chain(*certificate)
    await engine.start()
    yield engine
    await engine.kill()


@pytest.fixture
async def session(certificate):
    trust = ssl.create_default_context(cafile=str(certificate[0]))
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=trust)) as session:
        yield session


async def until(check):
    async with asyncio.timeout(20):
        while not check():
            await asyncio.sleep(0.02)


async def test_everything_goes_over_tls_to_the_client_the_trainer_and_the_engine(certificate, engine, session):
    cert, key = certificate
    settings = Settings(
        engine=[engine.url], engine_ca=cert, tls_cert=cert, tls_key=key, port=0, control_port=0, control_token="t",
        drain_timeout=0.0, probe_interval=0.1,
    )  # fmt: skip
    app = await proxy_app.start(settings)
    try:
        assert app.url.startswith("https://")
        assert app.control_url.startswith("https://")
        control = {"Authorization": "Bearer t"}
        async with session.post(f"{app.url}/v1/completions", json={"prompt": "x"}) as answer:
            assert answer.status == 200
        async with session.post(f"{app.control_url}/pause?mode=keep", headers=control) as answer:
            assert answer.status == 200
        assert engine.paused
        async with session.post(f"{app.control_url}/resume", headers=control) as answer:
            assert answer.status == 200
        async with session.get(f"{app.url}/metrics") as answer:
            assert "fleetgate_eligible_engines 1.0" in await answer.text()
        with pytest.raises(aiohttp.ClientError):
            await session.get(app.url.replace("https:", "http:") + "/health")
        await engine.restart()
        (known,) = app.fleet
        await until(lambda: known.boot == 1 and known.state is State.READY)
    finally:
        await app.stop()


async def test_workers_speak_tls_on_both_sides(certificate, engine, session):
    cert, key = certificate
    async with proxy_process(engine.url, workers=2, engine_ca=cert, tls_cert=cert, tls_key=key) as proxy:
        assert proxy.url.startswith("https://")
        for _ in range(4):
            async with session.post(f"{proxy.url}/v1/completions", json={"prompt": "x"}) as answer:
                assert answer.status == 200
        async with session.post(f"{proxy.url}/pause") as answer:
            assert answer.status == 200


async def test_an_engine_whose_certificate_nobody_vouches_for_is_down_and_says_why(engine):
    app = await proxy_app.start(
        Settings(engine=[engine.url], port=0, drain_timeout=0.0, probe_interval=0.05, probe_fall=1, hold_timeout=0.1)
    )
    try:
        (known,) = app.fleet
        await until(lambda: known.state is State.DOWN)
        assert "certificate verify failed" in known.reason + known.last_error
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{app.url}/v1/completions", json={"prompt": "x"}) as answer,
        ):
            assert answer.status == 503
            assert json.loads(await answer.read())["error"]["code"] == "hold_timeout"
        assert engine.calls("/v1/completions") == []
    finally:
        await app.stop()


async def test_the_doctor_says_so_too(certificate, engine, monkeypatch):
    monkeypatch.setattr("proxy.examine.KEEP_ALIVE_WAIT", 0.1)
    reach, _ = await Examiner(engine.url, Settings()).reach()
    assert reach.grade is Grade.FAIL
    assert "certificate verify failed" in reach.text
    found = await Examiner(engine.url, Settings(engine_ca=certificate[0])).examine()
    assert found.findings[0].grade is Grade.OK


@pytest.mark.parametrize("name", ["engine_ca", "tls_cert"])
def test_a_file_that_is_not_there_is_named_before_anything_starts(name, tmp_path):
    absent = tmp_path / "absent.pem"
    given = {name: absent} | ({"tls_key": absent} if name == "tls_cert" else {})
    with pytest.raises(ConfigError, match=rf"--{name.replace('_', '-')}: cannot read .*absent\.pem: No such file"):
        load(given)


def test_a_file_that_holds_something_else_is_told(certificate, tmp_path):
    cert, key = certificate
    other = tmp_path / "other.pem"
    other.write_text("not a certificate")
    load({"tls_cert": cert, "tls_key": key, "engine_ca": cert})
    for given, words in (
        ({"tls_cert": other, "tls_key": key}, "--tls-cert"),
        ({"tls_cert": cert, "tls_key": cert}, "--tls-key"),
        ({"engine_ca": other}, "--engine-ca"),
    ):
        with pytest.raises(ConfigError, match=words):
            load(given)
