"""``python -m engine_launcher.sim``: one simulated engine in a process of its own."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import resource
import signal
import sys

import uvloop

from engine_launcher.sim.config import SimConfig
from engine_launcher.sim.server import SimEngine


def _parser() -> argparse.ArgumentParser:
    defaults = SimConfig()
    parser = argparse.ArgumentParser(
        prog="python -m engine_launcher.sim",
        description="A simulated vLLM server: the wire behaviour of vLLM, tokens that can be recomputed, no GPU.",
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 picks a free port; the URL is printed on stdout")
    parser.add_argument("--model-name", default=defaults.model_name)
    parser.add_argument("--seed", type=int, default=defaults.seed, help="picks the base weights")
    parser.add_argument(
        "--tokens-per-second", type=float, default=defaults.tokens_per_second, help="of one sequence; 0 is flat out"
    )
    parser.add_argument(
        "--step-overhead", type=float, default=0.0, help="seconds added to a step for each running sequence"
    )
    parser.add_argument("--world-size", type=int, default=defaults.world_size, help="workers of this engine")
    parser.add_argument("--data-parallel-size", type=int, default=defaults.data_parallel_size)
    parser.add_argument("--max-num-seqs", type=int, default=defaults.max_num_seqs)
    parser.add_argument("--max-num-queued-reqs", type=int, default=None)
    parser.add_argument("--max-num-queued-tokens", type=int, default=None)
    parser.add_argument("--max-model-len", type=int, default=defaults.max_model_len)
    parser.add_argument("--keep-alive", type=float, default=defaults.keep_alive_seconds, help="seconds")
    parser.add_argument("--api-key", default=None)
    parser.add_argument("--no-dev-mode", action="store_true", help="leave out the control routes")
    parser.add_argument("--no-scale-out", action="store_true", help="answer 403 on /inference/v1/generate")
    parser.add_argument("--no-runtime-lora", action="store_true", help="leave out the adapter routes")
    parser.add_argument("--no-profiler", action="store_true", help="leave out the profile routes")
    parser.add_argument("--enable-request-id-headers", action="store_true")
    parser.add_argument("--no-weight-transfer", action="store_true", help="as without --weight-transfer-config")
    parser.add_argument("--compat", choices=["0.32", "0.33"], default=defaults.compat)
    parser.add_argument(
        "--extra-control-path", action="append", default=[], help="one more recorded POST path; may be repeated"
    )
    return parser


def config_from(args: argparse.Namespace) -> SimConfig:
    """Return the settings that the command line asks for."""
    return SimConfig(
        model_name=args.model_name,
        seed=args.seed,
        tokens_per_second=args.tokens_per_second,
        step_overhead_seconds=args.step_overhead,
        world_size=args.world_size,
        data_parallel_size=args.data_parallel_size,
        max_num_seqs=args.max_num_seqs,
        max_num_queued_reqs=args.max_num_queued_reqs,
        max_num_queued_tokens=args.max_num_queued_tokens,
        max_model_len=args.max_model_len,
        keep_alive_seconds=args.keep_alive,
        api_key=args.api_key,
        dev_mode=not args.no_dev_mode,
        scale_out=not args.no_scale_out,
        runtime_lora=not args.no_runtime_lora,
        profiler=not args.no_profiler,
        request_id_headers=args.enable_request_id_headers,
        weight_transfer_backend=None if args.no_weight_transfer else "sim",
        compat=args.compat,
        extra_control_paths=tuple(args.extra_control_path),
    )


def raise_file_limit() -> None:
    """Allow as many open connections as the system lets this process have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def serve(engine: SimEngine) -> None:
    """Serve until SIGTERM or SIGINT."""
    await engine.start()
    sys.stdout.write(f"{engine.url}\n")
    sys.stdout.flush()
    stop = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, stop.set)
    await stop.wait()
    await engine.stop()


def main(argv: list[str] | None = None) -> int:
    """Run one engine; return the exit code."""
    args = _parser().parse_args(argv)
    raise_file_limit()
    engine = SimEngine(config_from(args), host=args.host, port=args.port, exit_on_death=True)
    try:
        uvloop.run(serve(engine))
    except OSError as error:
        sys.stderr.write(f"cannot listen on {args.host}:{args.port}: {error.strerror}; try --port 0\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
