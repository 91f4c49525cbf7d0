"""A configuration that cannot be combined with sample references is rejected in one sentence."""

from __future__ import annotations

import pytest

from overlay import ConfigurationError
from verl_patches.features.sample_handles.feature import SAMPLE_HANDLES

JOB = {
    "actor_rollout_ref": {"actor": {"strategy": "megatron"}},
    "algorithm": {"adv_estimator": "grpo", "use_kl_in_reward": False},
    "reward_model": {"enable": False},
}
(check,) = SAMPLE_HANDLES.checks


@pytest.mark.parametrize(
    ("section", "changes", "sentence"),
    [
        (
            "actor_rollout_ref",
            {"actor": {"strategy": "fsdp"}},
            "actor.strategy=fsdp. Set it to false",
        ),
        ("algorithm", {"adv_estimator": "gae"}, "algorithm.adv_estimator=gae: a critic's worker reads the tokens"),
        ("algorithm", {"use_kl_in_reward": True}, "algorithm.use_kl_in_reward=True: the driver reads ref_log_prob"),
        ("algorithm", {"use_pf_ppo": True}, "algorithm.use_pf_ppo=True: it draws samples again"),
        ("reward_model", {"enable": True}, "reward_model.enable=True: a reward model's worker reads"),
    ],
)
def test_features_that_read_samples_elsewhere_rejected(section, changes, sentence):
    check(JOB, None)
    with pytest.raises(ConfigurationError, match=sentence) as rejected:
        check(JOB | {section: JOB[section] | changes}, None)
    assert "sample_handles.enabled=true" in str(rejected.value) and "\n" not in str(rejected.value)


def test_it_is_off_unless_it_is_asked_for():
    assert not SAMPLE_HANDLES.settings().enabled
