"""Groups of keys of the data."""

from __future__ import annotations

from typing import Literal

from verl_patches.trainer.configuration_checks.schema.values import (
    Count,
    CountOrNone,
    Files,
    KeyGroup,
    Name,
    Seed,
    Whole,
)


class CustomClass(KeyGroup):
    path: Name | None
    name: Name | None


class Data(KeyGroup):
    tokenizer: Name | None
    train_files: Files
    val_files: Files
    prompt_key: Name
    reward_fn_key: Name
    max_prompt_length: Count
    max_response_length: Count
    train_batch_size: Count
    val_batch_size: CountOrNone
    return_raw_input_ids: bool
    return_raw_chat: bool
    return_full_prompt: bool
    shuffle: bool
    filter_overlong_prompts: bool
    filter_overlong_prompts_workers: Count
    truncation: Literal["error", "left", "right", "middle"]
    custom_cls: CustomClass
    trust_remote_code: bool = False
    seed: Seed = 1
    dataloader_num_workers: Whole = 8
    gen_batch_size: CountOrNone = None
    cache_dir: Name = "~/.cache/verl/rlhf"
    chat_template_func: Name | None = None
    filter_prompts: bool = True
    image_key: Name = "images"
    video_key: Name = "videos"
    need_tools_kwargs: bool = False
    use_shm: bool = False
