"""Lengths for data that the rehearsal's configuration was not made for."""

from pathlib import Path

from post_training.overrides import setting

# The tiny model learns nothing from text; the point of such a run is that real data pass through every stage.
_LONGEST_PROMPT = 256
_RESPONSE_TOKENS = 32
_PROMPTS_A_STEP_AND_DIE = 2
_RESPONSES_A_PROMPT = 4
_MICRO_BATCH = 8


def measured_settings(train_data: Path, checkpoint: Path, dies: int) -> list[str]:
    """Returns overrides under which every stage can take the prompts of ``train_data``.

    Prompts above a limit are left out by verl's own filter; a step is small, since real prompts are long.
    """
    import pyarrow.parquet
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    prompts = pyarrow.parquet.read_table(train_data, columns=["prompt"]).column("prompt").to_pylist()
    longest = max(len(tokenizer.apply_chat_template(prompt, add_generation_prompt=True)) for prompt in prompts)
    limit = min(longest, _LONGEST_PROMPT)
    batch = _PROMPTS_A_STEP_AND_DIE * dies
    sizes: dict[str, str | int] = {
        "data.max_prompt_length": limit,
        "data.max_response_length": _RESPONSE_TOKENS,
        "data.filter_overlong_prompts": "true",
        "data.train_batch_size": batch,
        "actor_rollout_ref.actor.ppo_mini_batch_size": batch,
        "actor_rollout_ref.rollout.n": _RESPONSES_A_PROMPT,
        "actor_rollout_ref.rollout.max_model_len": limit + _RESPONSE_TOKENS,
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": _MICRO_BATCH,
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": _MICRO_BATCH,
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": _MICRO_BATCH,
    }
    return [setting(key, value) for key, value in sizes.items()]
