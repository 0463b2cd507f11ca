"""Command line and environment of a vLLM server, and how its Python is found."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from engine_launcher.errors import UsageError
from engine_launcher.restore import Checkpoint
from engine_launcher.settings import EngineSpec
from engine_launcher.vllm_engine import (
    RECORD,
    VllmInstall,
    locate,
    parse_install,
    probe,
    vllm_command,
    vllm_environment,
)

CPU = VllmInstall(Path("/env/bin/python"), "0.33.0", "cpu", plugin=True)
GPU = VllmInstall(Path("/env/bin/python"), "0.33.0", "gpu", plugin=False)


def spec(*extra: str, **more: object) -> EngineSpec:
    return EngineSpec(**{"name": "0", "share": 2, "model": Path("/models/m"), "extra": extra, **more})


def value_of(argv: tuple[str, ...], flag: str) -> str:
    return argv[argv.index(flag) + 1]


def test_a_cpu_server_gets_our_backend_and_small_limits() -> None:
    argv = vllm_command(spec(), CPU, 8001).argv
    assert argv[:5] == ("/env/bin/python", "-m", "vllm.entrypoints.openai.api_server", "--model", "/models/m")
    assert value_of(argv, "--port") == "8001"
    assert json.loads(value_of(argv, "--weight-transfer-config")) == {"backend": "fleetgate_cpu"}
    assert value_of(argv, "--dtype") == "float32"
    assert {"--enable-scale-out", "--enforce-eager"} <= set(argv)


def test_a_gpu_server_gets_nccl_and_none_of_the_cpu_limits() -> None:
    argv = vllm_command(spec(), GPU, 8001).argv
    assert json.loads(value_of(argv, "--weight-transfer-config")) == {"backend": "nccl"}
    assert not {"--dtype", "--enforce-eager", "--max-model-len"} & set(argv)


def test_a_flag_that_the_user_gives_replaces_ours() -> None:
    argv = vllm_command(spec("--dtype=bfloat16", "--weight-transfer-config", '{"backend":"x"}'), CPU, 1).argv
    assert "--dtype" not in argv
    assert argv.count("--weight-transfer-config") == 1
    assert argv[-3:] == ("--dtype=bfloat16", "--weight-transfer-config", '{"backend":"x"}')


@pytest.mark.parametrize("flag", ["--port", "--host=0.0.0.0", "--model", "--uds"])
def test_flags_that_the_launcher_decides_on_are_refused(flag: str) -> None:
    with pytest.raises(UsageError, match="the launcher sets it"):
        vllm_command(spec(flag, "x"), CPU, 1)


def test_a_cpu_vllm_without_our_plugin_is_refused_unless_another_backend_is_named() -> None:
    bare = VllmInstall(CPU.python, CPU.version, "cpu", plugin=False)
    with pytest.raises(UsageError, match="lacks this project's CPU weight-transfer backend"):
        vllm_command(spec(), bare, 1)
    vllm_command(spec("--weight-transfer-config", "{}"), bare, 1)


def test_what_the_user_has_set_wins_over_our_environment() -> None:
    found = vllm_environment(spec(environment={"A": "fleet"}), CPU, {"VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "7", "A": "base"})
    assert found["VLLM_HTTP_TIMEOUT_KEEP_ALIVE"] == "7"
    assert found["A"] == "fleet"
    assert found["VLLM_SERVER_DEV_MODE"] == "1"
    assert found["VLLM_TARGET_DEVICE"] == "cpu"


def test_the_launchers_own_python_does_not_leak_into_the_engine() -> None:
    found = vllm_environment(spec(), GPU, {"PYTHONPATH": "x", "VIRTUAL_ENV": "y", "PATH": "/bin"})
    assert "PYTHONPATH" not in found
    assert "VIRTUAL_ENV" not in found
    assert found["PATH"] == os.pathsep.join(["/env/bin", "/bin"])
    assert "VLLM_TARGET_DEVICE" not in found


def executable(path: Path, text: str = "#!/bin/sh\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def test_vllm_may_be_named_by_environment_or_by_executable(tmp_path: Path) -> None:
    python = executable(tmp_path / "env" / "bin" / "python")
    assert locate(tmp_path / "env", {}) == python
    assert locate(python, {}) == python
    assert locate(None, {"FLEETGATE_VLLM": str(tmp_path / "env")}) == python
    with pytest.raises(UsageError, match="neither a Python executable nor a virtual environment"):
        locate(tmp_path, {})


def test_without_a_name_the_built_environment_counts_only_when_it_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("engine_launcher.vllm_engine.__file__", str(tmp_path / "package" / "vllm_engine.py"))
    python = executable(tmp_path / ".engine" / "bin" / "python")
    with pytest.raises(UsageError, match="make engine"):
        locate(None, {})
    (tmp_path / ".engine" / RECORD).write_text("{}")
    assert locate(None, {}) == python


def record(**change: object) -> str:
    return json.dumps({"vllm": "0.33.0", "device": "cpu", "plugin": True, **change})


@pytest.mark.parametrize("version", ["0.33.0", "0.33.1.dev3", "0.34.0", "1.0"])
def test_new_enough_versions_pass(version: str) -> None:
    assert parse_install(Path("p"), record(vllm=version)).version == version


@pytest.mark.parametrize(("version", "message"), [("", "has no vLLM"), ("0.32.0", "has vLLM 0.32.0, but 0.33")])
def test_a_missing_or_old_vllm_is_named(version: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_install(Path("p"), record(vllm=version))


async def test_the_record_of_a_built_environment_spares_the_probe(tmp_path: Path) -> None:
    python = executable(tmp_path / "bin" / "python", "#!/bin/sh\nexit 1\n")
    (tmp_path / RECORD).write_text(record())
    assert await probe(python) == VllmInstall(python, "0.33.0", "cpu", plugin=True)


async def test_a_python_that_cannot_import_torch_is_bad_usage_with_its_words(tmp_path: Path) -> None:
    python = executable(tmp_path / "bin" / "python", "#!/bin/sh\necho no torch here >&2\nexit 1\n")
    with pytest.raises(UsageError, match=r"cannot import torch.*\n.*no torch here"):
        await probe(python)


async def test_the_probe_reads_the_last_line_only(tmp_path: Path) -> None:
    python = executable(tmp_path / "bin" / "python", f"#!/bin/sh\necho a banner\necho '{record(device='gpu')}'\n")
    assert (await probe(python)).device == "gpu"


def test_an_engine_sees_its_own_gpus_and_splits_over_them() -> None:
    command = vllm_command(spec(), GPU, 1, ("2", "3"))
    assert value_of(command.argv, "--tensor-parallel-size") == "2"
    assert command.environment["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert command.environment["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


def test_gpus_named_by_id_need_no_order_and_a_given_split_stays() -> None:
    command = vllm_command(spec("-pp", "2"), GPU, 1, ("GPU-a", "GPU-b"))
    assert "--tensor-parallel-size" not in command.argv
    assert command.environment["CUDA_VISIBLE_DEVICES"] == "GPU-a,GPU-b"
    assert "CUDA_DEVICE_ORDER" not in command.environment


def test_an_order_that_the_user_has_set_stays() -> None:
    found = vllm_environment(spec(), GPU, {"CUDA_DEVICE_ORDER": "FASTEST_FIRST", "CUDA_VISIBLE_DEVICES": "0,1"}, ("1",))
    assert (found["CUDA_DEVICE_ORDER"], found["CUDA_VISIBLE_DEVICES"]) == ("FASTEST_FIRST", "1")


@pytest.mark.parametrize("extra", [("--api-server-count", "4"), ("--api_server_count=2",), ("-asc", "2")])
def test_several_api_servers_in_one_engine_are_refused(extra: tuple[str, ...]) -> None:
    with pytest.raises(UsageError, match="a pause and a weight version of its own"):
        vllm_command(spec(*extra), GPU, 1)


def test_one_api_server_may_be_said() -> None:
    assert vllm_command(spec("--api-server-count", "1"), GPU, 1).argv[-2:] == ("--api-server-count", "1")


def test_adapters_can_be_loaded_where_lora_is_on() -> None:
    variable = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
    assert vllm_environment(spec("--enable-lora"), GPU, {})[variable] == "True"
    assert variable not in vllm_environment(spec(), GPU, {})
    assert vllm_environment(spec("--enable-lora"), GPU, {variable: "0"})[variable] == "0"


def test_a_restored_engine_serves_under_the_name_of_its_base(tmp_path: Path) -> None:
    bare = Checkpoint(tmp_path, 1, {})
    argv = vllm_command(spec(), GPU, 1, restored=bare).argv
    assert value_of(argv, "--model") == str(tmp_path)
    assert value_of(argv, "--served-model-name") == "/models/m"
    assert value_of(argv, "--tokenizer") == "/models/m"
    (tmp_path / "tokenizer.json").write_text("{}")
    argv = vllm_command(spec("--served-model-name", "policy"), GPU, 1, restored=bare).argv
    assert "--tokenizer" not in argv
    assert argv.count("--served-model-name") == 1
    assert value_of(argv, "--served-model-name") == "policy"
