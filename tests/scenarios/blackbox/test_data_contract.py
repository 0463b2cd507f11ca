"""Sentences of docs/contract.md about requests, checked from outside the process."""

from aiohttp import web

from tests.scenarios.blackbox.conftest import fleet


async def test_an_engine_that_keeps_breaking_requests_is_left_out_for_a_while():
    async with fleet(2, "--outlier-failures", "3") as (engines, http, _):
        # With a label its process is known to be the same one after each broken connection.
        async with http.post("/update_weight_version", json={"new_version": "v1"}):
            pass

        async def breaks(engine, request):
            request.transport.abort()
            return web.Response()

        engines[1].overrides["/v1/completions"] = breaks
        answers = []
        for _ in range(40):
            async with http.post("/v1/completions", json={"prompt": "p"}) as reply:
                answers.append(reply.status)
        # Each broken request was sent again; after a few the engine is not even tried.
        assert answers == [200] * 40
        assert 3 <= len(engines[1].calls("/v1/completions")) <= 6


async def test_a_4xx_never_leaves_an_engine_out():
    async with fleet(1) as (engines, http, _):

        async def refuses(engine, request):
            return web.json_response({"error": {"message": "bad", "code": 400}}, status=400)

        engines[0].overrides["/v1/completions"] = refuses
        for _ in range(20):
            async with http.post("/v1/completions", json={"prompt": "p"}) as reply:
                assert reply.status == 400
        del engines[0].overrides["/v1/completions"]
        async with http.post("/v1/completions", json={"prompt": "p"}) as reply:
            assert reply.status == 200
