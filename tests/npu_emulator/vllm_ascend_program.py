"""Generates with vLLM and unmodified vllm-ascend on one die, and with transformers, and prints how they compare.

``python -m tests.npu_emulator.vllm_ascend_program FOLDER`` makes tiny random checkpoints in FOLDER.
"""

import gc
import json
import os
import sys
from pathlib import Path

PROMPTS = [[1, 3, 10 + number, 40 + 3 * number, 17, *range(4, 4 + 5 * number)] for number in range(8)]
TOKENS = 32
SHARED_START = list(range(20, 40))


def deepseek(groups: int, experts: int):
    """A DeepSeek-V3 that vllm-ascend routes with npu_moe_gating_top_k (256 experts) or in torch (others)."""
    from transformers import DeepseekV3Config

    scaling = {
        "type": "yarn", "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32.0,
        "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
    }  # fmt: skip
    return DeepseekV3Config(
        vocab_size=256, hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, n_shared_experts=1, n_routed_experts=experts,
        routed_scaling_factor=2.5, kv_lora_rank=32, q_lora_rank=48, qk_rope_head_dim=16, qk_nope_head_dim=16,
        v_head_dim=16, n_group=groups, topk_group=max(groups // 2, 1), num_experts_per_tok=4, first_k_dense_replace=1,
        max_position_embeddings=256, rope_scaling=scaling, eos_token_id=2, bos_token_id=1, initializer_range=0.1,
        moe_layer_freq=1, scoring_func="sigmoid", topk_method="noaux_tc", norm_topk_prob=True, rms_norm_eps=1e-6,
    )  # fmt: skip


def qwen2():
    from transformers import Qwen2Config

    return Qwen2Config(
        vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=False, initializer_range=0.1,
    )  # fmt: skip


CASES = {
    "deepseek 256 experts in 8 groups": (lambda: deepseek(8, 256), {}),
    "deepseek 8 experts in 1 group": (lambda: deepseek(1, 8), {"enable_prefix_caching": True}),
    "qwen2": (qwen2, {"enable_sleep_mode": True}),
    "qwen2 in chunks with a prefix cache": (
        qwen2, {"enable_prefix_caching": True, "enable_chunked_prefill": True, "max_num_batched_tokens": 24},
    ),
}  # fmt: skip


def write_checkpoint(config, folder: Path):
    """A random model in a folder, with the tokenizer that vLLM wants to see."""
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({str(number): number for number in range(256)}, unk_token="0"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="2", bos_token="1").save_pretrained(folder)

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, torch_dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter, 1.0, 0.1)
    for name, buffer in model.named_buffers():
        if "correction_bias" in name:
            torch.nn.init.normal_(buffer, 0.0, 0.05)
    model.save_pretrained(folder)
    return model


def compare(model, outputs, prompts) -> dict:
    """Tokens that transformers would have chosen too, and the largest difference of log-probabilities."""
    import torch

    equal, worst = 0, 0.0
    for prompt, output in zip(prompts, outputs, strict=True):
        tokens = list(output.outputs[0].token_ids)
        with torch.no_grad():
            expected = model(torch.tensor([[*prompt, *tokens]])).logits[0].log_softmax(-1)[len(prompt) - 1 : -1]
        equal += sum(best == token for best, token in zip(expected.argmax(-1).tolist(), tokens, strict=True))
        for row, token, found in zip(expected, tokens, output.outputs[0].logprobs, strict=True):
            worst = max(worst, abs(row[token].item() - found[token].logprob))
    return {"equal": equal, "of": len(prompts) * TOKENS, "worst": worst}


def sleep_and_wake(llm) -> int:
    """Put the engine to sleep, its weights kept on the host, and wake it. The bytes that were free meanwhile."""
    import torch

    before = torch.npu.mem_get_info()[0]
    llm.sleep(level=1)
    asleep = torch.npu.mem_get_info()[0]
    llm.wake_up()
    return asleep - before


def run(folder: Path) -> dict:
    from vllm.engine.arg_utils import EngineArgs

    EngineArgs._is_v1_supported_oracle = lambda self, model_config: True  # float32 is for tests, says vLLM
    from vllm import LLM, SamplingParams

    greedy = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, logprobs=1)
    found = {}
    for name, (config, options) in CASES.items():
        model = write_checkpoint(config(), folder / name.replace(" ", "_"))
        llm = LLM(
            model=str(folder / name.replace(" ", "_")), skip_tokenizer_init=True, enforce_eager=True, dtype="float32",
            max_model_len=128, max_num_seqs=8, num_gpu_blocks_override=64, gpu_memory_utilization=0.5, seed=0,
            **({"enable_prefix_caching": False} | options),
        )  # fmt: skip
        prompts = [SHARED_START + prompt for prompt in PROMPTS]
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], greedy, use_tqdm=False)
        found[name] = compare(model, outputs, prompts)
        if options.get("enable_sleep_mode"):
            found[name]["freed in sleep"] = sleep_and_wake(llm)
        again = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], greedy, use_tqdm=False)
        found[name]["again"] = compare(model, again, prompts)["equal"]
        found[name]["wrong prompt"] = compare(model, outputs, [prompt[:-1] + [9] for prompt in prompts])["equal"]
        del llm
        gc.collect()
    return found


if __name__ == "__main__":
    os.environ |= {"VLLM_USE_V1": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_ASCEND_MLA_PA": "1"}
    (Path(sys.argv[1]) / "found.json").write_text(json.dumps(run(Path(sys.argv[1]))))
