"""The keys of overlay.mindspeed: when the engine is on, and which configurations the driver rejects with it."""

import json
import sys

import pytest

from overlay import ConfigurationError, SettingsError
from rehearsal.tiny_model.architecture import TINY_MODELS
from verl_patches.features.mindspeed import feature
from verl_patches.features.mindspeed.feature import MINDSPEED, MODEL_KEYS, PACKAGES, is_importable
from verl_patches.features.settings import OverlaySettings
from verl_patches.trainer.configuration_checks import check_configuration
from verl_patches.trainer.main_ppo import compose

MEGATRON = "actor_rollout_ref.actor.megatron"
MODEL = "actor_rollout_ref.model"
RECOMPUTED = (
    f"{MODEL}.enable_gradient_checkpointing=true",
    f"{MODEL}.gradient_checkpointing_kwargs.activations_checkpoint_granularity=full",
    f"{MODEL}.gradient_checkpointing_kwargs.activations_checkpoint_method=block",
    f"{MODEL}.gradient_checkpointing_kwargs.activations_checkpoint_num_layers=1",
)

VIRTUAL_STAGES = [
    f"{MEGATRON}.virtual_pipeline_model_parallel_size=2",
    f"{MEGATRON}.override_transformer_config.num_layer_list=[1,1,1,1]",
]


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.setattr(feature, "is_importable", lambda: True)


def check(*overrides):
    return check_configuration(compose("rehearsal", list(overrides)))


def test_auto_means_where_everything_can_be_imported(tmp_path, monkeypatch):
    settings = OverlaySettings()
    assert settings.mindspeed.engine == "auto" and not is_importable() and not MINDSPEED.is_on(settings)
    for name in PACKAGES:
        folder = tmp_path / name.replace(".", "/")
        folder.mkdir(parents=True)
        (folder / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.partition(".")[0] == "megatron"]:
        monkeypatch.delitem(sys.modules, name)
    assert is_importable() and MINDSPEED.is_on(settings)
    (tmp_path / "mindspeed_llm" / "__init__.py").unlink()
    (tmp_path / "mindspeed_llm").rmdir()
    assert not is_importable()


def test_on_rejected_where_they_cannot():
    with pytest.raises(ConfigurationError, match="mindspeed.engine=on needs .*mindspeed_llm.*assemble_workspace.sh"):
        check("actor_rollout_ref.overlay.mindspeed.engine=on")
    check("actor_rollout_ref.overlay.mindspeed.engine=auto")


@pytest.mark.parametrize("value", ["engine=yes", "swap_optimizer_times=0", "fused_operators=1", "recompute_layers=1"])
def test_unknown_keys_and_values_are_errors(value):
    with pytest.raises(SettingsError, match=value.partition("=")[0]):
        check(f"+actor_rollout_ref.overlay.mindspeed.{value}" if "layers" in value else f"{MINDSPEED.section}.{value}")


def test_the_rehearsal_and_the_recomputing_configuration_pass(installed):
    assert MINDSPEED.is_on(check())
    check(*RECOMPUTED, f"{MINDSPEED.section}.swap_optimizer=true")


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (VIRTUAL_STAGES, "virtual_pipeline_model_parallel_size.*to null"),
        ([f"{MEGATRON}.sequence_parallel=false"], "sequence_parallel=False.*set it to True"),
        ([f"{MEGATRON}.use_distributed_optimizer=false"], "use_distributed_optimizer=False.*set it to True"),
        (
            [f"+{MEGATRON}.override_transformer_config.moe_aux_loss_coeff=0.1"],
            "moe_aux_loss_coeff.*only num_layer_list",
        ),
        ([f"{MEGATRON}.override_transformer_config.moe_tp_extend_ep=false"], "moe_tp_extend_ep=False.*set it to true"),
        ([f"{MODEL}.override_config.moe_config.freeze_moe_router=true"], "freeze_moe_router.*set it to False"),
        ([*RECOMPUTED, f"{RECOMPUTED[1][:-4]}selective"], "activations_checkpoint_granularity=selective.*choose full"),
        (
            [f"{MINDSPEED.section}.swap_optimizer=true", "actor_rollout_ref.overlay.precision=float32"],
            "swap_optimizer moves the float32 copies.*precision=float32 has none. Set it to false",
        ),
    ],
)
def test_untranslated_keys_rejected_by_name(installed, overrides, says):
    with pytest.raises(ConfigurationError, match=says) as caught:
        check(*overrides)
    assert "\n" not in str(caught.value)
    check(*overrides, f"{MINDSPEED.switch}=off")


def test_another_model_is_left_to_its_own_code(installed, tmp_path):
    def describe(name):
        values = {"model_type": name, **TINY_MODELS[name], "num_hidden_layers": 4}
        (tmp_path / "config.json").write_text(json.dumps(values))

    describe("qwen2")
    no_experts = "actor_rollout_ref.overlay.rollout.expert_parallel_size=1"
    asked = [*VIRTUAL_STAGES, f"{MODEL}.path={tmp_path}"]
    own = [no_experts, *(f"~{MEGATRON}.override_transformer_config.{name}" for name in MODEL_KEYS)]
    with pytest.raises(ConfigurationError, match="engine=on .* builds DeepSeek-V3 but not the model in "):
        check(*asked, *own, f"{MINDSPEED.switch}=on")
    check(*asked, *own)
    describe("deepseek_v3")
    with pytest.raises(ConfigurationError, match="virtual_pipeline_model_parallel_size"):
        check(*asked)
