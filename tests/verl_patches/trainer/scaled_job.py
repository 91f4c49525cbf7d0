"""Jobs for many nodes, scaled down as docs/cluster.md says, in processes of their own."""

from __future__ import annotations

import json
import math
import os
import subprocess
from pathlib import Path

from post_training.overrides import setting
from rehearsal.jobs import scale_of
from rehearsal.plan import run_environment
from tests.shared_templates import started_with
from tests.shared_training import command_of
from verl_patches.features.measure.run_files import read_executed

ROOT = Path(__file__).parents[3]
RANDOM, TRUE = "deepseek_v3_256die_random_init", "deepseek_v3_256die_true_weight"
DAPO = "deepseek_v3_256die_dapo"
# Scaled further, to two dies: TP2, one stage, experts over both; one rollout instance.
TWO_DIES = (
    "trainer.n_gpus_per_node=2", "rollout_instance.half_of_the_dies=2", "trainer.total_training_steps=2",
    "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=1",
    "actor_rollout_ref.actor.megatron.expert_model_parallel_size=1",
    "actor_rollout_ref.actor.megatron.override_transformer_config.num_layer_list=[3]",
    "actor_rollout_ref.rollout.engine_kwargs.vllm.max_num_seqs=16",
    "actor_rollout_ref.rollout.engine_kwargs.vllm.additional_config.torchair_graph_config.graph_batch_sizes=[16]",
    # There is only one engine, so requests cannot migrate.
    "actor_rollout_ref.overlay.rollout_rebalance.enabled=false",
)  # fmt: skip
REWARD = Path(__file__).parent / "uneven_reward.py"
SECONDS_ALLOWED = 900


def run_scaled_job(
    job: str, folder: Path, model: Path, data: Path, *overrides: str, dies: int = 8, root: Path = ROOT, **variables: str
) -> list[dict]:
    """Run a job from the sources in `root`, writing to `folder`. Return the metrics of its steps.

    Args:
        model: its attention must have the widths of DeepSeek-V3's (`mla_inputs`) if the rollout runs in graphs.
        variables: added to the environment; their PYTHONPATH goes behind `root`.

    Raises:
        AssertionError: with the end of the log, if the run fails.
    """
    # The token exchange in graphs (MC2) accepts only 16-bit types, in torch_npu too.
    exchanges = job.startswith("deepseek") and "+graph=off" not in overrides
    given = [
        scale_of(job).setting, "ray_init.address=local",
        "actor_rollout_ref.overlay.measure.verify_weights=true",
        f"actor_rollout_ref.overlay.precision={'bfloat16' if exchanges else 'float32'}",
        # Random weights solve no problem, and the recipe's learning rate would change too little to see.
        setting("custom_reward_function.path", REWARD),
        "actor_rollout_ref.actor.optim.lr=1e-3",
        f"actor_rollout_ref.overlay.measure.output_dir={folder}", f"actor_rollout_ref.model.path={model}",
        f"data.train_files={data}", f"data.val_files={data}",
    ]  # fmt: skip
    environment = started_with(os.environ) | {"NPU_EMULATOR_NODE": os.environ["NPU_EMULATOR_NODE"]}
    environment.pop("RAY_ADDRESS", None)
    environment |= run_environment(given) | variables
    environment |= {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(root), variables.get("PYTHONPATH")])),
        "NPU_EMULATOR_DEVICES": str(dies),
        "NPU_EMULATOR_CAPACITY_MB": "512",
    }
    line = command_of(["--config-name", job, *given, *overrides], environment)
    ended = subprocess.run(
        line, env=environment, cwd=folder, text=True, timeout=SECONDS_ALLOWED,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout[-6000:]
    (folder / "output").write_text(ended.stdout)
    steps = [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == list(range(1, len(steps) + 1))
    return [step["metrics"] for step in steps]


def executed(folder: Path) -> set[str]:
    """Return the patches that some process of the run called."""
    return set(read_executed(folder))


def ran_graphs(folder: Path) -> bool:
    """Return whether the rollout requested a graph from torchair."""
    return any("._get_torchair_lazy_compiled_model@" in name for name in executed(folder))


def assert_exact(metrics: list[dict], steps: int, in_float32: bool = False) -> None:
    """Check `steps` steps whose rollout had training's weights bit for bit, and in float32 its probabilities.

    With other weights, or a cache that is read wrongly, tokens have other probabilities than in training. In bfloat16
    this cannot tell a healthy run from stale weights.
    """
    assert len(metrics) == steps
    for step in metrics:
        assert step["reshard/weights_exact"] == 1 and step["overlay/patches_ineffective"] == 0
        assert 0 < step["training/rollout_logprob_diff_max"] < (1e-3 if in_float32 else math.inf)


def assert_left_the_reference(metrics: list[dict], same: float = 1e-6) -> None:
    """Check that every step trained: the policy starts as the reference and has left it after the first step.

    `same` bounds the KL of a model with itself, because two passes pack its tokens into different micro batches.
    """
    assert all(step["actor/kl_loss"] > 1e-4 for step in metrics[1:]) and metrics[0]["actor/kl_loss"] < same
