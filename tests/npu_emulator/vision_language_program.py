"""Generates from images with vLLM-Ascend's Qwen2.5-VL in float32, gives it new weights, and compares with transformers.

`python -m tests.npu_emulator.vision_language_program FOLDER SIZE...` runs a tensor-parallel engine of each size.
`FOLDER/0` and `FOLDER/1` are checkpoints; results go to `FOLDER/SIZE.RANK.json`.
"""

import json
import os
import sys
from pathlib import Path

from tests.ranks import fork_ranks
from tests.vllm_cases import import_once

TOKENS = 12
WINDOW = 56  # four vision tokens, so that images have whole windows and cut ones
# Sizes of the images of each prompt; the last one has two images.
PROMPTS = (((56, 56),), ((112, 112),), ((84, 112),), ((140, 56),), ((56, 84), (84, 84)))


def write_checkpoint(folder: Path, seed: int = 0) -> None:
    """Write a random model of the tiny family with its processor, in float32."""
    from rehearsal.plan import DEFAULT_TRAIN_DATA
    from rehearsal.tiny_model.checkpoint import CheckpointRequest, make_checkpoint

    request = CheckpointRequest(DEFAULT_TRAIN_DATA, seed, "float32", None, "qwen2_5_vl")
    make_checkpoint(request, folder, lambda step, loss: None)
    described = json.loads((folder / "config.json").read_text())
    described["vision_config"]["window_size"] = WINDOW
    (folder / "config.json").write_text(json.dumps(described))


def draw_images(seed: int = 0) -> list:
    """Draw the images of each prompt: no two patches are alike."""
    import numpy
    from PIL import Image

    random = numpy.random.default_rng(seed)
    return [
        [Image.fromarray(random.integers(0, 256, (height, width, 3), numpy.uint8)) for height, width in sizes]
        for sizes in PROMPTS
    ]


def ask(processor, number: int, images: list) -> str:
    """Return the text of a prompt with these images."""
    parts = [{"type": "image"} for _ in images] + [{"type": "text", "text": f"How many shapes? {number}"}]
    return processor.apply_chat_template([{"role": "user", "content": parts}], add_generation_prompt=True)


def compare(model, encoded: list, outputs: list, **also) -> dict:
    """Count the tokens that transformers chooses too; the largest difference of log-probs, and equal prompts.

    `also` maps arguments of the model to functions of all tokens.
    """
    import torch
    from torch.nn.functional import pad

    equal, worst, prompts = 0, 0.0, 0
    for prompt, output in zip(encoded, outputs, strict=True):
        tokens, length = list(output.outputs[0].token_ids), prompt["input_ids"].shape[1]
        prompts += list(output.prompt_token_ids) == prompt["input_ids"][0].tolist()
        whole = torch.cat([prompt["input_ids"], torch.tensor([tokens])], 1)
        given = {**prompt, "input_ids": whole, "attention_mask": torch.ones_like(whole)}
        if "mm_token_type_ids" in prompt:  # of transformers 5
            given["mm_token_type_ids"] = pad(prompt["mm_token_type_ids"], (0, len(tokens)))
        given |= {name: make(whole) for name, make in also.items()}
        with torch.no_grad():
            logits = model(**given).logits[0]
        expected = logits.log_softmax(-1)[length - 1 : -1]
        equal += sum(best == token for best, token in zip(expected.argmax(-1).tolist(), tokens, strict=True))
        for row, token, found in zip(expected, tokens, output.outputs[0].logprobs, strict=True):
            worst = max(worst, abs(row[token].item() - found[token].logprob))
    return {"equal": equal, "of": len(encoded) * TOKENS, "worst": worst, "prompts": prompts}


def differing(table, placement, rank: int, served, trained: dict) -> list[str]:
    """Name the weights of this rank whose bytes are not those of the trained model."""
    import torch

    tensors = dict(served.named_parameters())
    return [
        shard.hf_name
        for shard in table.vllm_ascend(placement, rank)
        if shard.hf_name
        and not torch.equal(
            shard.locate(tensors).cpu(), trained[shard.hf_name][tuple(slice(*edge) for edge in shard.bounds)]
        )
    ]


def main(folder: Path) -> None:
    """Serve the first checkpoint as one rank of an engine, then the weights of the second."""
    from transformers import AutoModelForVision2Seq, AutoProcessor
    from vllm import LLM, SamplingParams
    from vllm.engine.arg_utils import EngineArgs

    from post_training.layouts.layout import RolloutPlacement
    from post_training.models.families import table_for

    EngineArgs._is_v1_supported_oracle = lambda self, model_config: True  # float32 is for tests, says vLLM
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    spread = {"tensor_parallel_size": ranks, "distributed_executor_backend": "external_launcher"} if ranks > 1 else {}
    llm = LLM(
        model=str(folder / "0"), dtype="float32", max_num_seqs=8, seed=0, num_gpu_blocks_override=64, swap_space=0,
        gpu_memory_utilization=0.4, enforce_eager=True, max_model_len=128, limit_mm_per_prompt={"image": 2},
        disable_mm_preprocessor_cache=True, **spread,
    )  # fmt: skip
    processor, images = AutoProcessor.from_pretrained(folder / "0", use_fast=False), draw_images()
    texts = [ask(processor, *each) for each in enumerate(images)]
    encoded = [processor(text=[each], images=own, return_tensors="pt") for each, own in zip(texts, images, strict=True)]
    requests = [
        {"prompt_token_ids": processor.tokenizer.encode(each), "multi_modal_data": {"image": own}}
        for each, own in zip(texts, images, strict=True)
    ]
    greedy = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, logprobs=1)
    served = llm.llm_engine.model_executor.driver_worker.worker.model_runner.model
    found = {}
    for seed in ("0", "1"):
        model = AutoModelForVision2Seq.from_pretrained(folder / seed).eval()
        table = table_for(model.config)
        if seed == "1":
            served.load_weights(model.state_dict().items())  # names as verl's FSDP workers send them
            llm.reset_prefix_cache()
        names = {name.replace("language_model.", "").replace("model.visual.", "visual."): tensor
                 for name, tensor in model.state_dict().items()}  # fmt: skip
        outputs = llm.generate(requests, greedy, use_tqdm=False)
        found[seed] = compare(model, encoded, outputs) if rank == 0 else {}
        found[seed]["differing"] = differing(table, RolloutPlacement(ranks), rank, served, names)
        found[seed]["weights"] = len(table.shapes)
    (folder / f"{ranks}.{rank}.json").write_text(json.dumps(found))
    os._exit(0)


if __name__ == "__main__":
    place, sizes = Path(sys.argv[1]), [*map(int, sys.argv[2:])]
    os.environ |= {"VLLM_USE_V1": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "USE_OPTIMIZED_MODEL": "0"}
    for seed in (0, 1):
        write_checkpoint(place / str(seed), seed)
    import_once(("vllm_ascend.worker.worker_v1",))
    for size in sizes:
        os.environ["NPU_EMULATOR_DEVICES"] = str(size)
        if fork_ranks(__spec__.name, size, place):
            sys.exit(1)
