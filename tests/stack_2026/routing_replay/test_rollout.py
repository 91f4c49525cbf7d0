"""vLLM-Ascend returns the experts that its model uses: with graphs, chunks of prompts, and prefixes from the cache."""

import json

from tests.ranks import run_ranks
from tests.stack_2026.routing_replay.reference import write_models
from tests.stack_2026.routing_replay.rollout_program import CASES


def test_returned_experts_are_those_of_transformers(tmp_path, monkeypatch):
    write_models(tmp_path)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    run_ranks("tests.stack_2026.routing_replay.rollout_program", len(CASES), tmp_path, timeout=500)
    for rank, (model, options) in enumerate(CASES):
        found = json.loads((tmp_path / f"rollout.{rank}.json").read_text())
        assert all(each["same"] and each["dtype"] == "torch.uint8" for each in found), (model, found)
        assert any(each["cached"] for each in found) == options["enable_prefix_caching"]
