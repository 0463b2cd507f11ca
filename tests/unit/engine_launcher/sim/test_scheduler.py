"""The engine core, stepped by hand."""

from __future__ import annotations

import asyncio

import pytest

from engine_launcher.sim import model
from engine_launcher.sim.config import SimConfig
from engine_launcher.sim.errors import BusyError, EngineDeadError, PausedError
from engine_launcher.sim.scheduler import EngineCore, Speed
from engine_launcher.sim.sequences import Generation, Sampling, SequenceState

PROMPT = list(b"hello")


def core(**settings: object) -> EngineCore:
    return EngineCore(SimConfig(**settings))  # type: ignore[arg-type]


def request(
    tokens: int = 10, *, n: int = 1, stream: bool = False, id_: str = "r", tag: str = "", **sampling: object
) -> Generation:
    generation = Generation(stream=stream, weights_tag=tag)
    settings = {"ignore_eos": True, **sampling}
    generation.add(id_, PROMPT, Sampling(max_tokens=tokens, n=n, **settings))  # type: ignore[arg-type]
    return generation


def only(generation: Generation) -> SequenceState:
    (found,) = generation.sequences
    return found


def steps(engine: EngineCore, count: int) -> None:
    for _ in range(count):
        engine.step()


def test_tokens_are_those_of_the_pure_function() -> None:
    engine = core(seed=3)
    generation = request(10)
    engine.submit(generation)
    steps(engine, 12)
    assert only(generation).tokens == model.generate(model.base_weights(3), PROMPT, 10)
    assert only(generation).finish_reason == "length"
    assert engine.unfinished == 0


def test_an_adapter_has_weights_of_its_own() -> None:
    engine = core()
    generation = request(5, tag="+lora:x")
    engine.submit(generation)
    steps(engine, 5)
    assert only(generation).tokens == model.generate(f"{model.base_weights(0)}+lora:x", PROMPT, 5)


def test_spans_follow_the_label() -> None:
    engine = core()
    generation = request(6)
    engine.submit(generation)
    steps(engine, 2)
    engine.version, engine.weights = "v1", "w1"
    steps(engine, 3)
    engine.version = "v2"
    steps(engine, 1)
    assert only(generation).spans() == [
        {"version": "default", "start": 0, "end": 2},
        {"version": "v1", "start": 2, "end": 5},
        {"version": "v2", "start": 5, "end": 6},
    ]


async def test_keep_freezes_and_resume_goes_on() -> None:
    engine = core()
    generation = request(4)
    engine.submit(generation)
    steps(engine, 2)
    await engine.pause("keep")
    late = request(1, id_="late")
    engine.submit(late)
    steps(engine, 5)
    assert len(only(generation).tokens) == 2
    engine.resume()
    steps(engine, 2)
    assert (generation.live, late.live) == (0, 0)


@pytest.mark.parametrize("mode", ["abort", "wait"])
async def test_new_requests_are_rejected_until_resume(mode: str) -> None:
    engine = core()
    await engine.pause(mode)  # type: ignore[arg-type]
    with pytest.raises(PausedError):
        engine.submit(request())
    engine.resume()
    engine.submit(request())


@pytest.mark.parametrize("mode", ["abort", "wait"])
async def test_before_0_33_they_hang_instead(mode: str) -> None:
    engine = core(compat="0.32")
    await engine.pause(mode)  # type: ignore[arg-type]
    generation = request(1)
    engine.submit(generation)
    steps(engine, 3)
    assert generation.live == 1
    engine.resume()
    steps(engine, 1)
    assert generation.live == 0


async def test_wait_ends_with_the_last_that_runs() -> None:
    engine = core()
    generation = request(3)
    engine.submit(generation)
    steps(engine, 1)
    pause = asyncio.ensure_future(engine.pause("wait"))
    await asyncio.sleep(0)
    with pytest.raises(PausedError):
        engine.submit(request())
    steps(engine, 1)
    assert not pause.done()
    steps(engine, 1)
    await pause
    assert only(generation).finish_reason == "length"


async def test_wait_ends_too_when_the_last_client_leaves() -> None:
    engine = core()
    generation = request(3)
    engine.submit(generation)
    steps(engine, 1)
    pause = asyncio.ensure_future(engine.pause("wait"))
    await asyncio.sleep(0)
    engine.abandon(generation)
    await pause


async def test_abort_keeps_the_part_that_was_made() -> None:
    engine = core()
    generation = request(10)
    queued = request(10)
    engine.submit(generation)
    steps(engine, 3)
    engine.submit(queued)
    await engine.pause("abort")
    assert (only(generation).finish_reason, len(only(generation).tokens)) == ("abort", 3)
    assert (only(queued).finish_reason, only(queued).spans()) == ("abort", [])


async def test_a_sleeping_engine_queues() -> None:
    engine = core()
    await engine.pause("abort", reject=False)
    generation = request(1)
    engine.submit(generation)
    engine.resume()
    steps(engine, 1)
    assert generation.live == 0


def test_abort_of_all_counts_children_and_parents() -> None:
    engine = core()
    engine.submit(request(5, n=2))
    engine.submit(request(5, id_="other"))
    steps(engine, 1)
    assert engine.abort_all() == 4
    assert engine.abort_all() == 0


def test_abort_of_ids_counts_what_was_sent() -> None:
    engine = core()
    generation, other = request(5, id_="a"), request(5, id_="b")
    engine.submit(generation)
    engine.submit(other)
    assert engine.abort_ids(["a", "nobody"]) == 2
    assert (only(generation).finish_reason, only(other).finish_reason) == ("abort", None)


def test_queue_limits() -> None:
    engine = core(max_num_queued_reqs=2)
    engine.submit(request(5))
    with pytest.raises(BusyError):
        engine.submit(request(5, n=2))
    engine.submit(request(5))
    engine = core(max_num_queued_tokens=5)
    engine.submit(request(5))
    with pytest.raises(BusyError):
        engine.submit(request(5))
    steps(engine, 1)
    engine.submit(request(5))


def test_only_so_many_run_at_once() -> None:
    engine = core(max_num_seqs=2)
    for _ in range(3):
        engine.submit(request(2))
    steps(engine, 1)
    assert (len(engine.running), len(engine.waiting)) == (2, 1)
    steps(engine, 2)
    assert (len(engine.running), len(engine.waiting)) == (1, 0)


async def test_death_fails_what_runs_and_what_comes() -> None:
    engine = core()
    generation = request(5)
    engine.submit(generation)
    steps(engine, 1)
    engine.kill()
    with pytest.raises(EngineDeadError):
        await generation.finished()
    with pytest.raises(EngineDeadError):
        engine.submit(request())


def test_a_stream_is_told_each_token_once() -> None:
    engine = core()
    generation = request(5, stream=True)
    engine.submit(generation)
    steps(engine, 6)
    deltas = generation.drain()
    assert [delta.tokens for delta in deltas] == [[token] for token in only(generation).tokens]
    assert "".join(delta.text for delta in deltas) == only(generation).text
    assert [delta.finish_reason for delta in deltas] == [None] * 4 + ["length"]
    assert deltas[0].first
    assert not deltas[1].first


def test_stop_string_ends_and_is_never_shown_in_part() -> None:
    engine = core()
    text = "".join(map(chr, model.generate(model.base_weights(0), PROMPT, 30)))
    stop = text[10:14]
    generation = request(30, stream=True, stop=(stop,))
    engine.submit(generation)
    steps(engine, 40)
    sequence = only(generation)
    assert (sequence.finish_reason, sequence.stop_reason, sequence.text) == ("stop", stop, text[: text.index(stop)])
    assert "".join(delta.text for delta in generation.drain()) == sequence.text


def test_stop_string_can_be_kept() -> None:
    engine = core()
    text = "".join(map(chr, model.generate(model.base_weights(0), PROMPT, 30)))
    generation = request(30, stop=(text[5],), include_stop=True)
    engine.submit(generation)
    steps(engine, 40)
    assert only(generation).text.endswith(text[5])


def test_stop_token_ends_with_itself_as_reason() -> None:
    engine = core()
    token = model.generate(model.base_weights(0), PROMPT, 1)[0]
    generation = request(30, stop_token_ids=frozenset({token}))
    engine.submit(generation)
    steps(engine, 2)
    assert (only(generation).finish_reason, only(generation).stop_reason) == ("stop", token)


def test_the_end_token_ends_unless_ignored() -> None:
    seed = next(s for s in range(100_000) if model.next_token(model.base_weights(s), PROMPT) == model.EOS)
    for ignore, reason, length in ((False, "stop", 1), (True, "length", 3)):
        engine = core(seed=seed)
        generation = request(3, ignore_eos=ignore)
        engine.submit(generation)
        steps(engine, 5)
        assert (only(generation).finish_reason, len(only(generation).tokens)) == (reason, length)
    engine = core(seed=seed)
    generation = request(3, ignore_eos=False, min_tokens=1)
    engine.submit(generation)
    steps(engine, 1)
    assert only(generation).tokens[0] != model.EOS


async def test_a_collective_holds_up_everything_else() -> None:
    engine = core()
    gate = asyncio.Event()

    async def collective() -> str:
        await gate.wait()
        return "done"

    call = asyncio.ensure_future(engine.collective(collective))
    await asyncio.sleep(0)
    other = asyncio.ensure_future(engine.turn())
    await asyncio.sleep(0)
    assert not other.done()
    gate.set()
    assert await call == "done"
    await other


async def test_a_collective_goes_on_without_its_caller() -> None:
    engine = core()
    gate = asyncio.Event()
    call = asyncio.ensure_future(engine.collective(gate.wait))
    await asyncio.sleep(0)
    call.cancel()
    await asyncio.sleep(0)
    other = asyncio.ensure_future(engine.turn())
    await asyncio.sleep(0)
    assert not other.done()
    gate.set()
    await other


def test_speed() -> None:
    assert Speed().step_seconds(100) == 0
    assert Speed(tokens_per_second=50, step_overhead_seconds=0.001).step_seconds(10) == pytest.approx(0.03)
