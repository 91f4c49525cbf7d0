"""Exporting an FSDP checkpoint of a model that reads images keeps transformers' logits and the processor's files."""

import copy

import torch
from PIL import Image
from transformers import AutoProcessor, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from post_training.checkpoint.command_line import run_tool
from post_training.checkpoint.manifest import Manifest
from post_training.checkpoint.training_files import MASTER, entry_name, file_name, write_file
from post_training.layouts.layout import whole_slice
from scripts import export_hf, verify_ckpt
from tests.post_training.checkpoint.verl_files import save_fsdp2
from tests.post_training.data.small_processor import SPECIAL, small_processor
from tests.post_training.models.published_configs import PUBLISHED_CONFIGS
from verl_patches.features.training_checkpoint.fsdp_rank import FullyShardedRank

FILES = ("preprocessor_config.json", "video_preprocessor_config.json", "chat_template.jinja", "tokenizer.json")


def small_model(processor):
    """Make the published model with small widths."""
    config = copy.deepcopy(PUBLISHED_CONFIGS["Qwen/Qwen2.5-VL-3B-Instruct"])
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    config |= {**sizes, "vocab_size": len(processor.tokenizer), "rope_scaling": {"type": "mrope"}}
    config["rope_scaling"]["mrope_section"] = [2, 3, 3]
    config["vision_config"] |= {"hidden_size": 32, "num_heads": 2, "out_hidden_size": 32, "depth": 2}
    config["vision_config"] |= {"intermediate_size": 40, "fullatt_block_indexes": [1], "window_size": 28}
    ids = processor.tokenizer.convert_tokens_to_ids(list(SPECIAL))
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    config |= dict(zip(names, ids[3:], strict=True))
    torch.manual_seed(3)
    model = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(**config))
    return model.to(torch.float32).eval()


def saved(model, folder, monkeypatch):
    """Write the checkpoint folder of a step as a single FSDP2 rank would, and return it."""
    monkeypatch.setattr("verl_patches.features.compatibility.fully_sharded.release", lambda model: None)
    rank = FullyShardedRank(model, torch.optim.AdamW(model.parameters()), 0, 1)
    weights = {entry_name(MASTER, shard.local, whole_slice(shard.shape)): shard for shard in rank.optimizer_shards}
    actor = folder / "actor"
    actor.mkdir(parents=True)
    tensors = {name: shard.master.view(shard.shape) for name, shard in weights.items()}
    written = write_file(actor / file_name(0, 1), tensors, {})
    manifest = Manifest({}, complete=True)
    manifest.files[file_name(0, 1)] = written
    manifest.write(actor)
    Manifest({}, complete=True).write(folder)
    return folder


def test_export_has_the_weights_and_the_processor(tmp_path, monkeypatch):
    processor = small_processor()
    model = small_model(processor)
    model.config.torch_dtype = torch.float32
    model.config.save_pretrained(tmp_path / "model")
    processor.save_pretrained(tmp_path / "model")
    checkpoint = saved(model, tmp_path / "run" / "global_step_1", monkeypatch)
    arguments = [str(checkpoint), str(tmp_path / "out"), "--hf-dir", str(tmp_path / "model")]
    assert run_tool(export_hf.parse_arguments(arguments), export_hf.plan) == 0
    for name in FILES:
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "model" / name).read_bytes()
    assert verify_ckpt.main([str(checkpoint), str(tmp_path / "out")]) == 0
    text = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>x<|im_end|>\n"
    loaded = AutoProcessor.from_pretrained(tmp_path / "out")
    inputs = loaded(text=[text], images=[Image.new("RGB", (84, 56), "red")], return_tensors="pt")
    exported = Qwen2_5_VLForConditionalGeneration.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        assert torch.equal(exported(**inputs).logits, model(**inputs).logits)


def test_ranks_of_a_model_that_reads_images_are_exported(tmp_path):
    """The vision tower's convolution has five dimensions, of which FSDP2 cuts the first."""
    processor = small_processor()
    model = small_model(processor)
    model.config.torch_dtype = torch.float32
    model.config.save_pretrained(tmp_path / "model")
    checkpoint = save_fsdp2(model, tmp_path / "run", ranks=3)
    arguments = [str(checkpoint), str(tmp_path / "out"), "--hf-dir", str(tmp_path / "model")]
    assert run_tool(export_hf.parse_arguments(arguments), export_hf.plan) == 0
    inputs = processor(
        text=["<|im_start|><|vision_start|><|image_pad|><|vision_end|>x<|im_end|>"],
        images=[Image.new("RGB", (84, 56), "red")],
        return_tensors="pt",
    )
    exported = Qwen2_5_VLForConditionalGeneration.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        assert torch.equal(exported(**inputs).logits, model(**inputs).logits)
