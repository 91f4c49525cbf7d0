"""The names that verl's release, which runs here, has and the cluster's commit lacks, as far as a job may need them.

Given the checkout, `tests/upstream/test_cluster_commit.py` derives both lists again.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

# Keys, by configuration file.
ABSENT_KEYS: dict[str, frozenset[str]] = {
    "ppo_megatron_trainer.yaml": frozenset(
        {
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
            "actor_rollout_ref.model.trust_remote_code",
            "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu",
            "actor_rollout_ref.ref.log_prob_use_dynamic_bsz",
            "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu",
            "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz",
            "algorithm.pf_ppo.reweight_method",
            "algorithm.pf_ppo.weight_pow",
            "algorithm.use_pf_ppo",
            "critic.forward_max_token_len_per_gpu",
            "critic.model.trust_remote_code",
            "critic.ppo_max_token_len_per_gpu",
            "data.trust_remote_code",
            "ray_init.timeline_json_file",
            "reward_model.forward_max_token_len_per_gpu",
            "reward_model.model.trust_remote_code",
        }
    ),
    "ppo_trainer.yaml": frozenset(
        {
            "actor_rollout_ref.model.lora_alpha",
            "actor_rollout_ref.model.lora_rank",
            "actor_rollout_ref.model.target_modules",
            "actor_rollout_ref.model.use_shm",
            "actor_rollout_ref.rollout.layered_summon",
            "algorithm.pf_ppo.reweight_method",
            "algorithm.pf_ppo.weight_pow",
            "algorithm.use_pf_ppo",
            "critic.model.lora_alpha",
            "critic.model.lora_rank",
            "critic.model.target_modules",
            "critic.model.use_shm",
            "data.trust_remote_code",
            "data.use_shm",
            "ray_init.timeline_json_file",
            "reward_model.model.use_shm",
        }
    ),
}
# Members of `self` in the modules for which there is a file of patches.
ABSENT_MEMBERS: frozenset[str] = frozenset(
    {
        "_is_lora",
        "_lora_rank",
        "accelerator_type",
        "base_sync_done",
        "layered_summon",
        "log_generations_to_clearml",
        "log_generations_to_tensorboard",
        "lora_kwargs",
        "ref_in_actor",
        "vllm_dp_rank",
        "vllm_tp_rank",
        "vllm_tp_size",
    }
)

_NAME = re.compile(r"[A-Za-z_]\w*")
_MEMBER = re.compile(rf"\bself\.({_NAME.pattern})")


def keys(node: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the full keys of all leaves."""
    for name, value in node.items():
        if isinstance(value, dict):
            yield from keys(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def absent_keys(file: str, release: Path, commit: Path) -> frozenset[str]:
    """Return the keys of a configuration file that the package `release` has and the package `commit` lacks."""
    here, there = (yaml.safe_load((verl / "trainer" / "config" / file).read_text()) for verl in (release, commit))
    return frozenset(keys(here)) - frozenset(keys(there))


def absent_members(patches: Path, release: Path, commit: Path) -> frozenset[str]:
    """Return the members of `self` that modules of `release` use and the same modules of `commit` never name."""
    modules = [path.relative_to(patches) for path in patches.rglob("*.py") if path.name != "__init__.py"]
    shared = [module for module in modules if (release / module).is_file() and (commit / module).is_file()]
    found = (
        set(_MEMBER.findall((release / module).read_text())) - set(_NAME.findall((commit / module).read_text()))
        for module in shared
    )
    return frozenset().union(*found)
