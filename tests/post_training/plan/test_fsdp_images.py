"""Plans of jobs with images in their prompts: published sizes, which phases grow, and transformers' own block."""

import json
from dataclasses import replace

import pytest
import torch
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLVisionBlock

from post_training.models.sizes import VisionSizes
from post_training.plan.fsdp import fsdp_memory, read_fsdp_job
from post_training.plan.vision import ImageLoad
from scripts import plan
from tests.post_training.models.published_configs import PUBLISHED_CONFIGS, nested
from verl_patches.trainer.configuration_checks.values import resolved
from verl_patches.trainer.main_ppo import compose

JOBS = {"3B": "qwen2_5_vl_3b_geo3k_one_card", "7B": "qwen2_5_vl_7b_geo3k", "32B": "qwen2_5_vl_32b_geo3k"}
# Half of the total bytes in each model's model.safetensors.index.json.
PARAMETERS = {"3B": 3_754_622_976, "7B": 8_292_166_656, "32B": 33_452_718_336}
DIE = 61 << 30


def published(size):
    return PUBLISHED_CONFIGS[f"Qwen/Qwen2.5-VL-{size}-Instruct"]


def planned(capsys, folder, size, *more, form=dict):
    (folder / "config.json").write_text(json.dumps(form(published(size))))
    named = ["--config-name", JOBS[size], "--model", str(folder / "config.json"), *more]
    return plan.main(named), capsys.readouterr()


@pytest.mark.parametrize("size", JOBS)
@pytest.mark.parametrize("form", [dict, nested])
def test_published_model_fits_its_job(capsys, tmp_path, size, form):
    code, printed = planned(capsys, tmp_path, size, "--json", form=form)
    found, dies = json.loads(printed.out), {"3B": 2, "7B": 16, "32B": 32}[size]
    assert found["weights"] == found["gradients"] == -(-PARAMETERS[size] // dies) * 4
    assert code == 0 and max(found["phases"].values()) < 0.8 * found["die"]


def test_plan_names_images_and_tower(capsys, tmp_path):
    _, printed = planned(capsys, tmp_path, "7B")
    assert "images            up to 1024 image tokens a prompt, of 4 patches; 0.63e9 of the parameters" in printed.out


def test_longer_prompts_hold_more_images(capsys, tmp_path):
    more = ("--json", "data.max_prompt_length=8192", "actor_rollout_ref.rollout.max_num_batched_tokens=16384")
    _, short = planned(capsys, tmp_path, "7B", "--json")
    _, long = planned(capsys, tmp_path, "7B", *more)
    phases = [json.loads(printed.out)["phases"] for printed in (short, long)]
    assert all(phases[1][phase] > phases[0][phase] for phase in ("rollout", "update", "old_log_prob"))


def test_images_cost_memory_beside_the_decoder():
    """Each phase that runs the vision tower needs more memory than in a text-only job of the same size."""
    job = read_fsdp_job(resolved(compose(JOBS["7B"], [])), published("7B"))
    # Images fill the whole context, so memory peaks while the vision tower runs.
    images = replace(job.images, tokens=65536, engine_tokens=65536)
    with_images = fsdp_memory(replace(job, images=images), DIE).phases
    without = fsdp_memory(replace(job, images=None), DIE).phases
    assert {phase for phase in without if with_images[phase] > without[phase]} == {
        "rollout", "old_log_prob", "ref", "update",
    }  # fmt: skip


def test_engine_encodes_all_patches_of_its_tokens():
    tower = VisionSizes(1, hidden=8, intermediate=16, heads=2, patch=10, patches_per_token=4, block="visual.blocks.0.")
    images = ImageLoad(tower, block=100, tokens=5, engine_tokens=3, itemsize=2, width=32)
    pixels, at_work, embeddings = 12 * 10 * (4 + 2), 12 * 2 * (4 * 8 + 3 * 16), 3 * 32 * 2
    assert images.engine(1) == pixels + at_work + embeddings


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_block_keeps_what_transformers_saves(dtype):
    """The plan's bytes equal the tensors that autograd saves in a block of the published size."""
    values, patches = published("7B")["vision_config"], 64
    sizes = {name: values[name] for name in ("hidden_size", "intermediate_size", "num_heads")}
    block = Qwen2_5_VLVisionBlock(Qwen2_5_VLVisionConfig(**sizes, depth=1), attn_implementation="sdpa").to(dtype)
    angles = tuple(torch.randn(patches, values["hidden_size"] // values["num_heads"]) for _ in range(2))
    not_counted = {tensor.untyped_storage().data_ptr() for tensor in (*block.parameters(), *angles)}
    saved = {}

    def keep(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    hidden = torch.randn(patches, values["hidden_size"], dtype=dtype, requires_grad=True)
    bounds = torch.tensor([0, patches], dtype=torch.int32)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        block(hidden, cu_seqlens=bounds, position_embeddings=angles)
    measured = sum(each.untyped_storage().nbytes() for at, each in saved.items() if at not in not_counted)
    job = read_fsdp_job(resolved(compose(JOBS["7B"], [])), published("7B"))
    images = replace(job.images, tokens=patches // 4, itemsize=dtype.itemsize, block=0)
    assert images.backward(1) == pytest.approx(measured, rel=0.1)
