"""verl's data set processes the image task as transformers' processor does, with positions in three parts."""

import io

import numpy
import pyarrow.parquet
import torch
from omegaconf import OmegaConf
from PIL import Image
from transformers import AutoConfig, AutoProcessor

from post_training.data.parquet import IMAGE_SCHEMA, write_files
from rehearsal.image_task import draw_exercises, write_image_task
from rehearsal.plan import DEFAULT_TRAIN_DATA
from rehearsal.tiny_model.checkpoint import CheckpointRequest, make_checkpoint
from verl_patches.utils.tokenizer import hf_processor

LENGTHS = {"max_prompt_length": 64, "filter_overlong_prompts": False, "image_key": "images"}


def rows_of(file, processor):
    """Return verl's rows of a file."""
    from verl.utils.dataset.rl_dataset import RLHFDataset

    data = RLHFDataset(str(file), processor.tokenizer, OmegaConf.create(LENGTHS), processor)
    return [data[number] for number in range(len(data))]


def enlarged(file, folder):
    """Write the same rows with images of several sizes, and with two images in some prompts."""
    rows, random = pyarrow.parquet.read_table(file).to_pylist(), numpy.random.default_rng(0)
    for number, row in enumerate(rows):
        count = 1 + number % 2
        row["prompt"][0]["content"] = "<image>" * count + "How many shapes?"
        row["images"] = []
        for width, height in ((56 + 28 * number, 84), (84, 56))[:count]:
            content = io.BytesIO()
            Image.fromarray(random.integers(0, 256, (height, width, 3), numpy.uint8)).save(content, format="PNG")
            row["images"].append({"bytes": content.getvalue(), "path": None})
    write_files({folder / "large.parquet": rows}, IMAGE_SCHEMA)
    return folder / "large.parquet"


def test_rows_with_images_equal_transformers(tmp_path):
    from transformers import Qwen2_5_VLForConditionalGeneration
    from vllm.model_executor.layers.rotary_embedding import MRotaryEmbedding

    request = CheckpointRequest(DEFAULT_TRAIN_DATA, 0, "float32", None, "qwen2_5_vl")
    make_checkpoint(request, tmp_path / "model", lambda step, loss: None)
    config = AutoConfig.from_pretrained(tmp_path / "model")
    processor = hf_processor(AutoProcessor.from_pretrained, str(tmp_path / "model"), use_fast=True)  # as verl does
    with torch.device("meta"):
        model = Qwen2_5_VLForConditionalGeneration(config)
    write_image_task(tmp_path, 1, 4)
    rows = rows_of(tmp_path / "train.parquet", processor)
    assert len(rows) == 4
    for row, exercise in zip(rows, draw_exercises(1, 4)[0], strict=True):
        expected = processor.image_processor(exercise.picture.draw(), return_tensors="pt")
        assert torch.equal(row["multi_modal_inputs"]["pixel_values"], expected["pixel_values"])
    seen = set()
    for row in rows + rows_of(enlarged(tmp_path / "train.parquet", tmp_path), processor):
        grid, mask = row["multi_modal_inputs"]["image_grid_thw"], row["attention_mask"].bool()
        tokens = row["input_ids"][mask]
        expected, _ = model.model.get_rope_index(tokens.unsqueeze(0), grid)
        assert torch.equal(row["position_ids"][:, mask], expected[:, 0])
        rollout, _ = MRotaryEmbedding.get_input_positions_tensor(tokens.tolist(), config, grid.tolist(), None, [])
        assert torch.equal(rollout, expected[:, 0])
        assert (tokens == config.image_token_id).sum() == grid.prod(1).sum() // 4
        seen.add((len(grid), int(expected.max())))
    assert len(seen) > 4
