"""Jobs whose model reads images: rehearsed settings pass the checks, and others are rejected by name."""

import json

import pyarrow
import pyarrow.parquet
import pytest
from transformers import Qwen2_5_VLConfig

from tests.post_training.models.published_configs import PUBLISHED_CONFIGS
from tests.stack_2026.verl.test_asynchronous_jobs import SEPARATED
from verl_plugin.jobs import JobError, check_job, compose_job
from verl_plugin.trainer_modes import MODE_KEY, MODULES_KEY, RECORDED, REGISTRATION

JOB, ON_MEGATRON = "qwen3_0_6b_gsm8k_one_card", "qwen3_30b_a3b_gsm8k_one_node"
MODEL = PUBLISHED_CONFIGS["Qwen/Qwen2.5-VL-3B-Instruct"]
RECORDS = ["+trainer.record_steps=[1]", f"{MODE_KEY}={RECORDED}", f"++{MODULES_KEY}={REGISTRATION}"]
PADDED = "actor_rollout_ref.model.use_remove_padding=false"
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
VLLM = f"+{ROLLOUT}.engine_kwargs.vllm"


def test_padded_batches_on_fsdp2_accepted():
    config = check_job(compose_job(JOB, [PADDED]), MODEL)
    assert config["actor_rollout_ref"]["actor"]["strategy"] == "fsdp2"


def test_config_that_transformers_5_wrote_accepted(tmp_path):
    Qwen2_5_VLConfig(**json.loads(json.dumps(MODEL))).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text()) | {"architectures": MODEL["architectures"]}
    assert "rope_scaling" not in written
    check_job(compose_job(JOB, [PADDED]), written)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            [],
            "use_remove_padding=True is invalid: verl's attention for packed batches of this model computes in 16 bits",
        ),
        ([PADDED, f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size=2"], "only packed batches can be shared"),
        ([PADDED, f"{VLLM}.mm_encoder_tp_mode=data"], "alltoallv splits the vision tower over tensor parallel ranks"),
        ([PADDED, *RECORDS], "positions of images are not recorded"),
        ([PADDED, "trainer.resume_mode=auto"], "resume_mode=auto is invalid: no run with images has been resumed"),
        ([PADDED, f"{ROLLOUT}.agent.default_agent_loop=tool_agent"], "default_agent_loop=tool_agent is invalid: with"),
        ([PADDED, f"{ROLLOUT}.multi_turn.function_tool_path=tools.py"], "function_tool_path=tools.py is invalid"),
        (
            [PADDED, f"{ROLLOUT}.multi_turn.tool_config_path=tools.yaml"],
            "no tool that returns pictures",
        ),
    ],
)
def test_options_not_rehearsed_with_images_rejected(overrides, says):
    with pytest.raises(JobError) as error:
        check_job(compose_job(JOB, overrides), MODEL)
    assert says in str(error.value)


@pytest.mark.parametrize(("column", "key"), [("videos", []), ("clips", ["data.video_key=clips"])])
def test_column_of_videos_rejected(tmp_path, column, key):
    file = tmp_path / "train.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a"], column: [["film.mp4"]]}), file)
    with pytest.raises(JobError) as error:
        check_job(compose_job(JOB, [PADDED, f"data.train_files={file}", *key]), MODEL)
    assert f"data.video_key={column} is invalid: {file} has that column" in str(error.value)
    check_job(compose_job(JOB, [PADDED, f"data.train_files=[{file}]", "data.video_key=films"]), MODEL)


def test_images_with_separate_dies_rejected(monkeypatch):
    monkeypatch.setenv("VERL_LOGGING_LEVEL", "WARN")
    keys = [key for key in SEPARATED if "env_vars" not in key]
    with pytest.raises(JobError, match="separate_async is invalid: images were not rehearsed with dies that only"):
        check_job(compose_job(JOB, [PADDED, *keys]), MODEL)


def test_images_on_megatron_rejected():
    with pytest.raises(
        JobError, match="strategy=megatron is invalid: alltoallv has no layout of Qwen2.5-VL in Megatron"
    ):
        check_job(compose_job(ON_MEGATRON), MODEL)


def test_model_without_a_layout_rejected_by_its_name():
    other = MODEL | {"architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl"}
    with pytest.raises(JobError, match="no sharding spec for architecture Qwen3VLForConditionalGeneration"):
        check_job(compose_job(JOB, [PADDED]), other)
