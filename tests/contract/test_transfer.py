"""The order of the weight-transfer calls, adapters, and checksums: without a trainer, so that both kinds can take it."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

from engine_launcher.vllm_engine import locate
from proxy.core.history import History, read

from . import shapes
from .conftest import ROOT, Target
from .traffic import COMPLETIONS, token_ids

_MAKE_ADAPTER = """
import json, sys, torch
from safetensors.torch import save_file
hidden, rank = 64, 4
tensors = {}
for layer in range(2):
    name = f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_"
    tensors[name + "A.weight"] = torch.ones(rank, hidden) * 0.1
    tensors[name + "B.weight"] = torch.ones(128, rank) * 0.1
save_file(tensors, sys.argv[1] + "/adapter_model.safetensors")
json.dump({"peft_type": "LORA", "r": rank, "lora_alpha": 8, "target_modules": ["q_proj"], "bias": "none",
           "base_model_name_or_path": "tiny", "task_type": "CAUSAL_LM"}, open(sys.argv[1] + "/adapter_config.json", "w"))
"""


async def test_start_opens_once(engine: Target, record: bool) -> None:
    answer = await engine.post("/start_weight_update")
    assert (answer.status, answer.json()) == (200, {"message": "Weight update started"})
    again = await engine.post("/start_weight_update")
    busy = await engine.post("/shutdown_weight_transfer_engine")
    # No group was joined, so the update fails; a failed update closes the session.
    failed = await engine.post("/update_weights", {"update_info": {"names": [], "dtype_names": [], "shapes": []}})
    after = await engine.post("/finish_weight_update", {"weight_version": "never"})
    assert [each.status for each in (again, busy, failed, after)] == [500, 500, 500, 500]
    assert "already active" in again.json()["error"]["message"]
    assert "without a matching start" in after.json()["error"]["message"]
    assert (await engine.get("/weight_info")).json() == {"weight_version": "default"}
    shapes.check("transfer-start-twice", again, record=record)
    shapes.check("transfer-shutdown-busy", busy, record=record)
    assert (await engine.post("/start_weight_update")).status == 200
    assert (await engine.post("/update_weights", {"update_info": {}})).status == 500


async def test_the_page_tells_how_far_a_round_is(engine: Target) -> None:
    async def history() -> History:
        return read((await engine.get("/metrics")).body)

    first = await history()
    await engine.post("/start_weight_update")
    begun = await history()
    await engine.post("/update_weights", {"update_info": []})
    failed = await history()
    await engine.post("/start_weight_update")
    await engine.post("/finish_weight_update")
    last = await history()
    assert begun == replace(first, started=first.started + 1)
    assert failed == replace(begun, failed=first.failed + 1)
    assert (last.started - begun.started, last.finished - begun.finished) == (1, 1)
    assert (last.failed, last.running) == (failed.failed, 0)


async def test_an_update_list_is_indexed_from_zero(engine: Target, record: bool) -> None:
    await engine.post("/start_weight_update")
    answer = await engine.post("/update_weights", {"update_info": []})
    assert answer.status == 500
    shapes.check("transfer-list-too-short", answer, record=record)
    assert (await engine.post("/finish_weight_update")).status == 500


async def test_finish_sets_the_label(engine: Target) -> None:
    await engine.post("/start_weight_update")
    answer = await engine.post("/finish_weight_update", {"weight_version": "w1"})
    assert (answer.status, answer.json()) == (200, {"message": "Weight update finished"})
    assert (await engine.get("/weight_info")).json() == {"weight_version": "w1"}
    await engine.post("/start_weight_update")
    assert (await engine.post("/finish_weight_update")).status == 200
    assert (await engine.get("/weight_info")).json() == {"weight_version": "w1"}
    await engine.post("/update_weight_version", {"new_version": "default"})


async def test_a_label_inside_an_open_session_stays_after_its_finish(engine: Target) -> None:
    """The proxy writes its label before it sends the finish."""
    await engine.post("/start_weight_update")
    answer = await engine.post("/update_weight_version", {"new_version": "u7"})
    assert (answer.status, answer.json()) == (200, {"success": True, "new_version": "u7"})
    assert (await engine.get("/weight_info")).json() == {"weight_version": "u7"}
    assert (await engine.post("/finish_weight_update")).status == 200
    assert (await engine.get("/weight_info")).json() == {"weight_version": "u7"}
    await engine.post("/update_weight_version", {"new_version": "default"})


async def test_shutdown_without_a_group_is_fine(engine: Target) -> None:
    answer = await engine.post("/shutdown_weight_transfer_engine")
    assert (answer.status, answer.json()) == (200, {"message": "Weight transfer shut down"})


async def test_bad_init_info_is_named(engine: Target) -> None:
    answer = await engine.post("/init_weight_transfer_engine", {"init_info": {"nonsense": 1}})
    assert answer.status == 500
    assert answer.json()["error"]["message"].startswith(
        "Call to collective_rpc method failed: Worker failed with error 'Invalid init_info for "
    )


async def test_checksums_compare(engine: Target) -> None:
    found = (await engine.post("/weight_checker", {"action": "checksum"})).json()["checksums"]
    assert all(name.startswith("dp0:pp0:pcp0:tp0:") and len(value) == 64 for name, value in found.items())
    same = await engine.post("/weight_checker", {"action": "compare", "baseline": found})
    assert same.json() == {"match": True, "mismatches": []}
    name = min(found)
    other = await engine.post("/weight_checker", {"action": "compare", "baseline": {**found, name: "0"}})
    assert other.json() == {"match": False, "mismatches": [name]}


async def test_unknown_worker_method(engine: Target) -> None:
    answer = await engine.post("/collective_rpc", {"method": "no_such_method"})
    assert answer.status == 500
    assert "no_such_method" in answer.json()["error"]["message"]


def _adapter(engine: Target, directory: Path) -> str:
    if engine.kind == "vllm":
        subprocess.run([locate(None, os.environ), "-c", _MAKE_ADAPTER, str(directory)], check=True, cwd=ROOT)
    else:
        (directory / "adapter_config.json").write_text(json.dumps({}))
    return str(directory)


async def test_adapter_comes_and_goes_in_plain_text(engine: Target, tmp_path: Path, record: bool) -> None:
    path = _adapter(engine, tmp_path)
    answer = await engine.post("/v1/load_lora_adapter", {"lora_name": "half", "lora_path": path})
    shapes.check("lora-load", answer, record=record)
    again = await engine.post("/v1/load_lora_adapter", {"lora_name": "half", "lora_path": path})
    shapes.check("lora-load-again", again, record=record)
    listed = await engine.get("/v1/models")
    assert [(card["id"], card["parent"]) for card in listed.json()["data"]] == [("tiny", None), ("half", "tiny")]
    base = await engine.post(COMPLETIONS.path, COMPLETIONS.body(16))
    adapted = await engine.post(COMPLETIONS.path, COMPLETIONS.body(16, model="half"))
    assert adapted.json()["model"] == "half"
    assert token_ids(adapted) != token_ids(base)
    answer = await engine.post("/v1/unload_lora_adapter", {"lora_name": "half"})
    shapes.check("lora-unload", answer, record=record)
    assert (await engine.post(COMPLETIONS.path, COMPLETIONS.body(model="half"))).status == 404
