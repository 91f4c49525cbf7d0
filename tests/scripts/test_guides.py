"""Guides' commands for verl train on emulated dies unedited, in an environment with the patches enabled.

`tests/upstream/test_workspace.py` runs the first of them in the assembled workspace.
"""

from __future__ import annotations

import shlex

import pytest
from omegaconf import OmegaConf

from tests.scripts.cluster_files import ROOT
from tests.scripts.guides import (
    BATCH,
    DIES,
    PRODUCTION,
    PRODUCTION_DATA,
    QUICK_START,
    QUICK_START_DATA,
    SMALL,
    STEPS,
    Environment,
    run_of,
)

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    made = Environment(tmp_path_factory.mktemp("guides"))
    made.fill_hub(tmp_path_factory.mktemp("model"))
    enabled = made.run("python3", ROOT / "scripts" / "enable_patches.py")
    assert enabled.returncode == 0, enabled.stderr
    return made


def values_of(command: str) -> list[str]:
    """Return the settings of a command, as bash reads them."""
    words = shlex.split(command.replace("\\\n", " ").replace("set -x\n", ""))
    return [word for word in words if "=" in word and not word.startswith("--") and "$" not in word]


def test_quick_start_trains_for_an_epoch(environment):
    environment.follow(QUICK_START_DATA, cwd=ROOT)
    small = SMALL | {"data.train_batch_size": BATCH, "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 10}
    environment.follow(QUICK_START, *(f"{key}={value}" for key, value in small.items()))
    config, steps = run_of(environment.elsewhere, "verl_grpo_example_gsm8k", "qwen2_7b_function_rm")
    assert len(steps) == STEPS and all(step["actor/grad_norm"] > 0 for step in steps)
    assert [step["actor/lr"] for step in steps] == [5e-7] * STEPS
    published = OmegaConf.from_dotlist([each for each in values_of(QUICK_START) if each.split("=")[0] not in small])
    published.actor_rollout_ref.model.pop("path")
    assert len(values_of(QUICK_START)) >= 33 and OmegaConf.merge(config, published) == config


def test_production_command_trains_for_an_epoch(environment):
    environment.follow(PRODUCTION_DATA, cwd=ROOT)
    words = [f"{key}={value}" for key, value in SMALL.items()]
    words += ["trainer.logger=[console]", "actor_rollout_ref.rollout.n=4"]
    exported = {"NNODES": "1", "TP": "2", "PP": "2", "DP": "2", "BATCH_SIZE": str(BATCH), "MAX_SEQ_LEN": "128"}
    environment.follow(f"{PRODUCTION} $@", *words, **exported)
    config, steps = run_of(environment.elsewhere, "verl_grpo_math", "qwen2_5_7b")
    assert len(steps) == STEPS and all(step["actor/grad_norm"] > 0 for step in steps)
    assert config.actor_rollout_ref.actor.strategy == "fsdp2" and config.actor_rollout_ref.rollout.max_model_len == 128
    assert OmegaConf.merge(config, OmegaConf.from_dotlist(values_of(PRODUCTION))) == config
    assert config.trainer.n_gpus_per_node == DIES and config.data.train_batch_size == BATCH
