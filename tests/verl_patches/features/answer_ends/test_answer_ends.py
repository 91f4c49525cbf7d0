"""The mask of an answer ends where the engine stopped, whatever verl's own cutting of padded answers does."""

import json
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf
from verl.utils.torch_functional import get_response_mask, pad_2d_list_to_length

from post_training.end_tokens import EndTokens
from post_training.report.run_error import RunError
from verl_patches.features.answer_ends.ends import end_tokens_of, stop_at
from verl_patches.features.answer_ends.mask import masked_to_lengths
from verl_patches.features.measure.feature import MEASURE
from verl_patches.trainer.configuration_checks import ConfigurationError, check_machine
from verl_patches.trainer.main_ppo import compose
from verl_patches.trainer.ppo.middleware import MIDDLEWARE, dress
from verl_patches.trainer.ppo.trainer import OverlayTrainer
from verl_patches.workers import megatron_workers
from verl_patches.workers.rollout.vllm_rollout.vllm_rollout_spmd import (
    generate_sequences_to_their_ends,
    init_with_end_tokens,
)

PAD, END, WIDTH = 0, 2, 5
PROMPTS = torch.tensor([[0, 1, 1], [1, 1, 1]])  # attention
# Two answers per prompt. They end at the tokenizer's token, at the padding token used as an end token, by being cut,
# and at the tokenizer's token as their only token.
ANSWERS = [[[7, 8, END], [7, PAD]], [[7, 8, 9, 7, 8], [END]]]
LENGTHS = [3, 2, 5, 1]


class Engine:
    def generate(self):
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=tokens) for tokens in each]) for each in ANSWERS]


def upstream(rollout, prompts):
    """Build responses and masks from the engine's output as verl's vLLMRollout.generate_sequences does."""
    outputs = rollout.inference_engine.generate()
    tokens = [answer.token_ids for output in outputs for answer in output.outputs]
    responses = pad_2d_list_to_length(tokens, PAD, max_length=WIDTH)
    mask = get_response_mask(responses, prompts.meta_info["eos_token_id"], dtype=torch.int64)
    attention = torch.cat((PROMPTS.repeat_interleave(2, dim=0), mask), dim=-1)
    return SimpleNamespace(batch={"responses": responses, "attention_mask": attention})


@pytest.mark.parametrize("ends", [(END,), (PAD,), (PAD, END), ()], ids=str)
def test_the_mask_ends_where_the_engine_stopped(ends):
    """This holds for any end tokens that verl's worker assumes, including null."""
    rollout = SimpleNamespace(inference_engine=Engine(), end_tokens=EndTokens((("tokenizer", ends),)))
    prompts = SimpleNamespace(meta_info={"eos_token_id": None})
    attention = generate_sequences_to_their_ends(upstream, rollout, prompts).batch["attention_mask"]
    assert attention[:, -WIDTH:].sum(-1).tolist() == LENGTHS
    assert attention[:, -WIDTH:].cummin(-1).values.equal(attention[:, -WIDTH:])
    assert attention[:, :-WIDTH].equal(PROMPTS.repeat_interleave(2, dim=0)) and attention.dtype == torch.int64


def test_verl_alone_trains_on_padding():
    """The control: cut at the generation configuration's token, an answer with another end keeps one padding token."""
    found = upstream(SimpleNamespace(inference_engine=Engine()), SimpleNamespace(meta_info={"eos_token_id": PAD}))
    assert found.batch["attention_mask"][:, -WIDTH:].sum(-1).tolist() == [4, 2, 5, 2]


@pytest.mark.parametrize("lengths", [[1], [1, 9], [1, 4], [4, 0], [1, 1, 1], []])
def test_lengths_of_another_batch_rejected(lengths):
    with pytest.raises(ValueError, match="answers of up to"):
        masked_to_lengths(torch.ones(2, 5, dtype=torch.long), 3, lengths)


def llm_engine(of_tokenizer, of_generation):
    """Return the part of vLLM's LLMEngine that knows the model's end tokens."""
    preprocessor = SimpleNamespace(get_eos_token_id=lambda lora_request=None: of_tokenizer)
    fields = {} if of_generation is None else {"eos_token_id": of_generation}
    return SimpleNamespace(processor=SimpleNamespace(input_preprocessor=preprocessor, generation_config_fields=fields))


def run(tmp_path, generation, **rollout):
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    node = OmegaConf.create({"ignore_eos": False, "engine_kwargs": {"vllm": {}}} | rollout)
    return end_tokens_of(node, str(tmp_path), SimpleNamespace(eos_token_id=END))


def test_the_engine_is_told_all_end_tokens(tmp_path):
    vllm = pytest.importorskip("vllm.sampling_params")
    params = vllm.SamplingParams(stop_token_ids=[5])
    ends = run(tmp_path, {"eos_token_id": [PAD, END]}, stop_token_ids=[5])
    stop_at(params, ends, llm_engine(END, [PAD, END]))
    assert params.stop_token_ids == [PAD, END, 5] and params.all_stop_token_ids == {PAD, END, 5}


def test_verl_starts_an_engine_with_further_stop_tokens(tmp_path):
    """verl copies the keys of its node into vLLM's SamplingParams, which does not accept an OmegaConf list."""
    vllm = pytest.importorskip("vllm.sampling_params")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": PAD}))
    config = OmegaConf.create({"stop_token_ids": [5], "ignore_eos": False, "temperature": 0.9})
    OmegaConf.set_struct(config, True)

    def upstream(self, model_path, config, tokenizer, hf_config, **options):
        self.config = config
        self.sampling_params = vllm.SamplingParams(**{name: config.get(name) for name in config})
        self.inference_engine = SimpleNamespace(llm_engine=llm_engine(END, PAD))

    rollout = SimpleNamespace()
    init_with_end_tokens(upstream, rollout, str(tmp_path), config, SimpleNamespace(eos_token_id=END), None)
    assert rollout.sampling_params.stop_token_ids == [PAD, END, 5] and rollout.config is config
    assert str(rollout.end_tokens) == "Answers end at 0 (generation_config.json), 2 (tokenizer), 5 (stop_token_ids)"


def test_answers_go_on_behind_end_tokens_that_are_ignored(tmp_path):
    vllm = pytest.importorskip("vllm.sampling_params")
    params = vllm.SamplingParams(ignore_eos=True)
    stop_at(params, run(tmp_path, {"eos_token_id": PAD}, ignore_eos=True), llm_engine(END, PAD))
    assert params.stop_token_ids == []


@pytest.mark.parametrize(("of_tokenizer", "of_generation"), [(6, None), (END, [PAD, 6]), (END, 6)])
def test_an_engine_with_end_tokens_of_its_own_rejected(tmp_path, of_tokenizer, of_generation):
    ends = run(tmp_path, {"eos_token_id": PAD})
    with pytest.raises(RunError, match=r"also ends answers at the tokens \[6\], .*Use the tokenizer"):
        stop_at(SimpleNamespace(), ends, llm_engine(of_tokenizer, of_generation))


def test_the_driver_prints_and_uses_the_same_tokens(tmp_path, capsys):
    """One answer is cut; two end at the tokens of the generation configuration and of the tokenizer."""
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [8, 9]}))
    node = {"model": {"path": str(tmp_path)}, "rollout": {"ignore_eos": False, "top_k": 50, "top_p": 1.0}}
    workers = SimpleNamespace(update_actor=lambda batch: SimpleNamespace(meta_info={"metrics": {}}))
    trainer = SimpleNamespace(
        config=OmegaConf.create({"actor_rollout_ref": node}),
        tokenizer=SimpleNamespace(eos_token_id=END),
        actor_rollout_wg=workers,
        reward_fn=None,
        val_reward_fn=None,
        use_critic=False,
        use_reference_policy=False,
        log=None,
        source=SimpleNamespace(metrics={}),
    )
    trainer.end_tokens = partial(OverlayTrainer.end_tokens, trainer)
    dress(trainer, [each for each in MIDDLEWARE if each.feature is MEASURE])
    assert capsys.readouterr().out == (
        "Answers end at 2 (tokenizer), 8 (generation_config.json), 9 (generation_config.json).\n"
        "Answers are drawn by top_k=50, but trained and compared as samples of the whole distribution.\n"
    )
    answers = torch.tensor([[5, 9], [5, END], [5, 6]])
    tensors = {"responses": answers, "attention_mask": torch.ones(3, 4), "token_level_scores": torch.zeros(3, 2)}

    class Batch:
        batch, non_tensor_batch = tensors, {"uid": ["a", "b", "c"]}

        def __len__(self):
            return 3

    metrics = workers.update_actor(Batch()).meta_info["metrics"]
    assert metrics["sampling/truncated_share"] == pytest.approx(1 / 3)


def test_samples_are_padded_with_the_tokenizers_token(monkeypatch):
    """DeepSeek-V3's generation_config.json has no padding token, so verl's worker passes on None."""
    kept = []
    store = SimpleNamespace(
        forgetting_after_a_failure=nullcontext, keep=lambda answers, asked, device: kept.append(asked)
    )
    monkeypatch.setattr("verl_patches.features.sample_handles.store.process_store", lambda: store)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    worker = SimpleNamespace(tokenizer=SimpleNamespace(pad_token_id=1))
    prompts = SimpleNamespace(meta_info={"pad_token_id": None, "eos_token_id": 1})
    megatron_workers.generate_and_keep(lambda self, prompts: "answers", worker, prompts)
    assert kept == [{"pad_token_id": 1, "eos_token_id": 1}]


@pytest.mark.parametrize(
    ("generation", "tokenizer", "says"),
    [
        ({"eos_token_id": "</s>"}, {"eos_token": "</s>"}, 'eos_token_id="</s>" of .* is invalid: not a token'),
        (
            {"pad_token_id": 0},
            {"eos_token": None},
            "neither its tokenizer nor a configuration defines a token that ends",
        ),
    ],
)
def test_a_model_without_an_end_rejected_by_the_check(tmp_path, generation, tokenizer, says):
    for name, values in (("config", {}), ("generation_config", generation), ("tokenizer_config", tokenizer)):
        (tmp_path / f"{name}.json").write_text(json.dumps({"chat_template": "x", **values}))
    config = compose("rehearsal", [f"actor_rollout_ref.model.path={tmp_path}"])
    with pytest.raises(ConfigurationError, match=says):
        check_machine(config)
    given = compose(
        "rehearsal", [f"actor_rollout_ref.model.path={tmp_path}", "+actor_rollout_ref.rollout.stop_token_ids=[5]"]
    )
    if "pad_token_id" in generation:
        check_machine(given)
