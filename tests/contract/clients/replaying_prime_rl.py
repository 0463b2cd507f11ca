"""prime-rl's admin client, replayed with the libraries that it uses (httpx, tenacity).

Shapes from ``src/prime_rl/utils/client.py``: its own pool and limits, the suffix ``/v1`` taken off the URL, and each
call sent again on any 5xx and any lost connection.
"""

from __future__ import annotations

from typing import Any

import httpx
from tenacity import AsyncRetrying, retry_if_exception, stop_after_attempt, stop_after_delay, wait_exponential

READ_SECONDS = {"/update_weights": 720.0}
"""All others: 300."""


def _again(error: BaseException) -> bool:
    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code >= 500
    return isinstance(error, httpx.TransportError)


def _client(base_url: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        base_url=base_url.rstrip("/").removesuffix("/v1"),
        limits=httpx.Limits(max_connections=4, max_keepalive_connections=1),
        timeout=httpx.Timeout(None),
    )


async def _post(client: httpx.AsyncClient, path: str, **kwargs: Any) -> Any:
    seconds = READ_SECONDS.get(path, 300.0)
    async for attempt in AsyncRetrying(
        retry=retry_if_exception(_again),
        stop=stop_after_delay(2 * seconds) | stop_after_attempt(10),
        wait=wait_exponential(multiplier=1, min=1, max=10),
        reraise=True,
    ):
        with attempt:
            timeout = httpx.Timeout(connect=10.0, read=seconds, write=60.0, pool=10.0)
            answer = await client.post(path, timeout=timeout, **kwargs)
            answer.raise_for_status()
    return answer.json()


async def ready(url: str, model: str) -> bool:
    """What it waits for at the start."""
    async with _client(url) as client:
        (await client.get("/health")).raise_for_status()
        models = (await client.get("/v1/models")).json()["data"]
        return any(each["id"] == model for each in models)


async def init_broadcaster(url: str, world_size: int) -> int:
    """One admin URL: offset 0, and the whole world as its configuration says. It swallows errors: returns the status."""
    body = {
        "host": "127.0.0.1",
        "port": 29501,
        "rank_offset": 0,
        "inference_world_size": world_size,
        "timeout": 1200,
        "quantize_in_weight_transfer": False,
    }
    async with _client(url) as client:
        return (await client.post("/init_broadcaster", json=body)).status_code


async def update_weights(url: str, weight_dir: str | None) -> Any:
    """Pause, update, and resume whatever happened between."""
    async with _client(url) as client:
        await _post(client, "/pause", params={"mode": "keep", "clear_cache": "false"})
        try:
            return await _post(client, "/update_weights", json={"weight_dir": weight_dir})
        finally:
            await _post(client, "/resume")


async def load_lora(url: str, name: str, path: str) -> int:
    """One load; its own retries (404 and 500) are left out: this returns the status."""
    async with _client(url) as client:
        return (await client.post("/load_lora_adapter", json={"lora_name": name, "lora_path": path})).status_code
