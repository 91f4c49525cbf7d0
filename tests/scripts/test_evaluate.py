"""scripts/evaluate.py: its rejections, its results for given answers, and vLLM-Ascend's answers on the emulated NPU."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from post_training.estimates import wilson
from post_training.evaluation.judging import judge
from post_training.evaluation.problems import Question
from post_training.rewards import RULES
from rehearsal.tiny_model.checkpoint import CheckpointRequest, make_checkpoint
from rehearsal.tiny_model.tokenizer import build_tokenizer
from scripts import evaluate
from tests.html_pages import StrictPage

ROOT = Path(__file__).parents[2]
PROBLEMS = ROOT / "data" / "arithmetic" / "test.jsonl"
# Stands in for vLLM: it answers the questions with the given answers in turn.
WORKER = """
import json, sys
from pathlib import Path
asked, answers = json.loads(Path(sys.argv[1]).read_text()), {answers}
found = {{}}
for name, parameters in asked["sampling"].items():
    count = parameters.get("n", 1)
    found[name] = [[[answers[index % len(answers)], "stop"]] * count for index in range(len(asked["prompts"]))]
Path(sys.argv[2]).write_text(json.dumps(found))
"""


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    """Make a tiny Qwen2 with random weights."""
    request = CheckpointRequest(PROBLEMS, 0, "bfloat16", model_type="qwen2", warm_start=None)
    return make_checkpoint(request, tmp_path_factory.mktemp("qwen") / "model", lambda step, loss: None).path


@pytest.fixture
def answering(monkeypatch, qwen, tmp_path):
    """Return a function that replaces vLLM by a worker that answers the questions with these texts in turn."""

    def put(*texts):
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(qwen)
        tokens = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
        (tmp_path / "worker.py").write_text(WORKER.format(answers=tokens))
        monkeypatch.setattr(evaluate, "_WORKER", tmp_path / "worker.py")

    return put


def run(qwen, folder, *more):
    return evaluate.main(
        ["--emulate", "--model", f"tiny={qwen}", "--data", str(PROBLEMS), "--output", str(folder), *more]
    )


def test_answers_become_results_json_and_a_page(answering, qwen, tmp_path, capsys):
    answering(r"so it is \boxed{0}", "nothing")
    assert run(qwen, tmp_path / "out", "--n", "2", "--limit", "4", "--model", f"copy={qwen}") == 0
    said = capsys.readouterr().out
    content = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    # The answers to the first four problems are 0; every second answer is \boxed{0}.
    truths = [each["truth"] for each in content["questions"]]
    right = sum(truth == "0" for truth in truths[::2])
    assert right and [each["name"] for each in content["models"]] == ["tiny", "copy"]
    results = content["models"][0]["estimates"]
    assert results["greedy"]["value"] == results["avg@2"]["value"] == right / 4
    assert results["greedy"]["high"] == pytest.approx(wilson(right, 4).high)
    assert content["models"][0]["shares"]["boxed"] == 0.5 and "copy - tiny" in said
    assert len(StrictPage((tmp_path / "out" / "evaluation.html").read_text()).text) > 100
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["evaluation.html", "evaluation.json", "logs"]
    # A second evaluation does not overwrite the first.
    assert run(qwen, tmp_path / "out") == 2 and "contains an evaluation" in capsys.readouterr().err


def test_a_model_that_answers_nothing_gets_nothing(answering, qwen, tmp_path):
    answering("", "I cannot")
    assert run(qwen, tmp_path / "out", "--n", "3") == 0
    model = json.loads((tmp_path / "out" / "evaluation.json").read_text())["models"][0]
    assert {each["value"] for each in model["estimates"].values()} == {0.0} and model["shares"]["boxed"] == 0.0
    assert model["estimates"]["greedy"]["high"] > 0.1  # 24 wrong answers do not prove that it is never right


DEEPSEEK_END = "<\uff5cend\u2581of\u2581sentence\uff5c>"
APPLES = r"So \boxed{7}. This is the number of apples that Anna has left at the end of the day."


@pytest.mark.parametrize("end", [DEEPSEEK_END, "</s>", "<end_of_turn>", "<|im_end|>", "<|eot_id|>"])
def test_reward_gets_the_text_that_verl_gives_it(end):
    from verl import DataProto
    from verl.workers.reward_manager import NaiveRewardManager

    tokenizer, given = build_tokenizer(end), []
    tokens = [*tokenizer(APPLES, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    reward, rule = evaluate._reward(evaluate.parse_arguments(["--model", "m", "--data", "d"]))

    def score(**arguments):
        given.append(arguments["solution_str"])
        return reward(**arguments, **rule)

    ids = torch.tensor([[1, *tokens]])
    data = DataProto.from_dict(
        tensors={"prompts": ids[:, :1], "responses": ids[:, 1:], "attention_mask": torch.ones_like(ids)},
        non_tensors={
            "reward_model": np.array([{"ground_truth": "7"}], dtype=object),
            "data_source": np.array(["apples"], dtype=object),
        },
    )
    trained = NaiveRewardManager(tokenizer, num_examine=0, compute_score=score)(data).sum().item()
    question = Question(({"role": "user", "content": "How many apples?"},), "7", "apples", {})
    tokenized = evaluate.Tokenized([[1]], tokenizer, [tokenizer.eos_token_id])
    answer = evaluate._answer(question, tokens, "stop", tokenized, SimpleNamespace(reward=reward, rule=rule))
    assert given == [answer.text] == [APPLES] and answer.score == trained == 1.0 and answer.right


@pytest.mark.parametrize("rule", sorted(RULES))
@pytest.mark.parametrize("reward", [[], ["--reward", f"{evaluate.REWARD}:compute_score"]])
def test_right_answer_counts_as_right_by_every_rule(rule, reward):
    """A right answer without the thoughts that geo3k asks for scores 0.9."""
    given = evaluate.parse_arguments(["--model", "m", "--data", "d", "--rule", rule, *reward])
    question = Question(({"role": "user", "content": "How many apples?"},), "7", "apples", {})
    function, options = evaluate._reward(given)
    judged = [judge(function, question, text, options) for text in (r"\boxed{7} #### 7", r"\boxed{8} #### 8")]
    assert judged == [(0.9 if rule == "geo3k" else 1.0, True), (0.0, False)]


def test_answers_end_at_every_end_token(answering, qwen, tmp_path, monkeypatch):
    """These are the tokenizer's and those of generation_config.json, as in a training."""
    answering("nothing")
    folder = shutil.copytree(qwen, tmp_path / "copy")
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    asked, made = [], evaluate._tokenized
    monkeypatch.setattr(evaluate, "_tokenized", lambda *given: asked.append(made(*given)) or asked[-1])
    assert run(folder, tmp_path / "out", "--limit", "1", "--n", "1") == 0
    tokenizer = asked[0].tokenizer
    assert asked[0].ends == sorted({7, 9, tokenizer.eos_token_id})


def test_a_prompt_has_the_tokens_of_its_template_alone(answering, qwen, tmp_path, monkeypatch):
    """DeepSeek's and Llama's tokenizers put a token before every text, and so do their chat templates."""
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoTokenizer

    answering("nothing")
    folder, tokenizer = shutil.copytree(qwen, tmp_path / "copy"), AutoTokenizer.from_pretrained(qwen)
    name, begins = tokenizer.eos_token, tokenizer.eos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{name}:0 $A:0", special_tokens=[(name, begins)]
    )
    tokenizer.chat_template = name + tokenizer.chat_template
    tokenizer.save_pretrained(folder)
    asked, made = [], evaluate._tokenized
    monkeypatch.setattr(evaluate, "_tokenized", lambda *given: asked.append(made(*given)) or asked[-1])
    assert run(folder, tmp_path / "out", "--limit", "3", "--n", "0") == 0
    content = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    loaded = AutoTokenizer.from_pretrained(folder)
    assert loaded("a text")["input_ids"][0] == begins
    chats = [question["messages"] for question in content["questions"]]
    assert asked[0].prompts == loaded.apply_chat_template(chats, add_generation_prompt=True)


def test_a_worker_that_fails_is_named_with_its_exception(monkeypatch, qwen, tmp_path, capsys):
    """torch_npu prints a line about an unknown error after it."""
    unknown = "[ERROR] 2026-11-30-04:07:44 (PID:1277, Device:-1, RankID:-1) ERR99999 UNKNOWN applicaiton exception"
    (tmp_path / "worker.py").write_text(f"print('out of memory')\nraise SystemExit({unknown!r})")
    monkeypatch.setattr(evaluate, "_WORKER", tmp_path / "worker.py")
    assert run(qwen, tmp_path / "out") == 1
    said = capsys.readouterr().err
    assert "tiny could not generate: out of memory" in said and not (tmp_path / "out" / "evaluation.json").exists()
    assert not list((tmp_path / "out").glob(".work.*"))


# Fails unless the model folder that it receives has the weights of the model {expected}, bit for bit.
COMPARING = """
import json, sys
from pathlib import Path
from safetensors.torch import load_file
asked = json.loads(Path(sys.argv[1]).read_text())
def weights(folder):
    return {{name: value for file in Path(folder).glob("*.safetensors") for name, value in load_file(file).items()}}
found, expected = weights(asked["engine"]["model"]), weights("{expected}")
assert found.keys() == expected.keys() and all(found[name].equal(expected[name]) for name in expected)
answers = [[[[2], "stop"]]] * len(asked["prompts"])
Path(sys.argv[2]).write_text(json.dumps(dict.fromkeys(asked["sampling"], answers)))
"""


def test_checkpoints_of_both_back_ends_are_evaluated(monkeypatch, qwen, tmp_path):
    """FSDP's checkpoint is a folder that vLLM reads; Megatron's is made from the files of eight ranks."""
    from transformers import AutoModelForCausalLM

    from tests.post_training.checkpoint.test_training_export import saved

    shutil.copytree(qwen, tmp_path / "fsdp" / "global_step_2" / "actor")
    sharded = saved(AutoModelForCausalLM.from_pretrained(qwen).float(), tmp_path / "megatron")
    (tmp_path / "megatron" / "config.yaml").write_text(f"actor_rollout_ref: {{model: {{path: {qwen}}}}}")
    (tmp_path / "worker.py").write_text(COMPARING.format(expected=qwen))
    monkeypatch.setattr(evaluate, "_WORKER", tmp_path / "worker.py")
    more = ["--model", f"fsdp={tmp_path}/fsdp/global_step_2", "--model", f"megatron={sharded}", "--n", "0"]
    assert run(qwen, tmp_path / "out", *more) == 0
    assert len(json.loads((tmp_path / "out" / "evaluation.json").read_text())["models"]) == 3
    assert not list((tmp_path / "out").glob(".work.*"))


def spoiled(qwen, folder, name, **config):
    """Copy the model without a file, or with other values in its config.json."""
    made = folder / f"without-{name or 'nothing'}"
    shutil.copytree(qwen, made)
    for file in made.glob(name) if name else ():
        file.unlink()
    values = json.loads((made / "config.json").read_text()) if config else {}
    if config:
        (made / "config.json").write_text(json.dumps(values | config))
    return made


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "absent"], "--model=absent is invalid: not a folder"),
        (["--model", "{qwen}"], "two models have the name tiny"),
        (["--model", "a={no_weights}"], "neither config.json with .safetensors nor a checkpoint"),
        (["--model", "a={no_template}"], "has no chat template"),
        (["--model", "a={no_tokenizer}"], "is invalid: no tokenizer"),
        (["--model", "a={short}"], "reads 20 tokens, but the longest question has"),
        (["--n", "-1"], "--n=-1 is invalid. Set it to a number from 0"),
        (["--max-tokens", "0"], "--max-tokens=0 is invalid"),
        (["--temperature", "0"], "--temperature=0 is invalid"),
        (["--top-p", "nan"], "--top-p=nan is invalid"),
        (["--rule", "nosuch"], "--rule=nosuch is invalid: no such rule"),
        (["--reward", "absent.py"], "the reward absent.py is not a file"),
        (["--reward", "{reward}", "--rule", "substring"], "--rule is only for the rule reward"),
        (["--data", "absent.jsonl"], "absent.jsonl does not exist"),
        (["--data", "{wrong}"], "has the columns question, target"),
    ],
)
def test_invalid_arguments_rejected_before_anything_is_made(qwen, tmp_path, capsys, arguments, said):
    (tmp_path / "wrong.jsonl").write_text('{"question": "2+2", "target": "4"}\n')
    made = {
        "qwen": f"tiny={qwen}",
        "no_weights": spoiled(qwen, tmp_path, "*.safetensors"),
        "no_template": spoiled(qwen, tmp_path, "chat_template*"),
        "no_tokenizer": spoiled(qwen, tmp_path, "tokenizer*"),
        "short": spoiled(qwen, tmp_path, "", max_position_embeddings=20),
        "reward": tmp_path / "reward.py",
        "wrong": tmp_path / "wrong.jsonl",
    }
    assert run(qwen, tmp_path / "out", *(argument.format(**made) for argument in arguments)) == 2
    ended = capsys.readouterr()
    assert said in ended.err and ended.err.count("\n") == 1 and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("option", "least", "most", "beyond"),
    [
        ("--n", 0, 1024, (-1, 1025)),
        ("--limit", 0, 1048576, (-1, 1048577)),
        ("--max-tokens", 1, 1048576, (0, 1048577)),
        ("--seed", 0, 2147483647, (-1, 2147483648)),
        ("--tensor-parallel", 1, 64, (0, 65)),
        ("--temperature", 0.01, 10, (0, 10.5)),
        ("--top-p", 0.01, 1, (0, 1.01)),
        ("--memory-share", 0.01, 1, (0, 1.01)),
    ],
)
def test_numbers_reach_from_their_least_to_their_most(option, least, most, beyond):
    def check(value):
        evaluate._check_numbers(evaluate.parse_arguments(["--model", "m", "--data", "d", option, str(value)]))

    for value in (least, most):
        check(value)
    for value in beyond:
        with pytest.raises(evaluate.EvaluationError, match=f"{option}={value} is invalid. Set it "):
            check(value)


def test_without_emulate_the_emulated_npu_is_no_npu(qwen, tmp_path, capsys):
    assert evaluate.main(["--model", str(qwen), "--data", str(PROBLEMS), "--output", str(tmp_path / "out")]) == 2
    assert "has only the emulated NPU. Add --emulate" in capsys.readouterr().err


def greedy_of_transformers(folder, prompts, tokens):
    """Return transformers' greedy answers in bfloat16: token ids for each prompt, including the end."""
    program = (
        "import json, sys, torch; from transformers import AutoModelForCausalLM as M\n"
        "asked = json.loads(sys.stdin.read()); model = M.from_pretrained(asked['folder'], torch_dtype=torch.bfloat16)\n"
        "new = {'max_new_tokens': asked['tokens'], 'do_sample': False}\n"
        "print(json.dumps([model.generate(torch.tensor([p]), **new)[0, len(p):].tolist() for p in asked['prompts']]))"
    )
    asked = json.dumps({"folder": str(folder), "prompts": prompts, "tokens": tokens})
    environment = {"PATH": "/usr/bin:/bin", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "HF_HUB_OFFLINE": "1"}
    ended = subprocess.run(
        [sys.executable, "-c", program], input=asked, env=environment, capture_output=True, text=True, check=True
    )
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("dies", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_vllm_ascend_answers_as_transformers_does(qwen, tmp_path, dies):
    check_answers(qwen, tmp_path / "out", "--tensor-parallel", str(dies))


def check_answers(qwen, output, *options):
    """Evaluate a model. In bfloat16 a near tie may be decided either way, after which all tokens differ."""
    command = [sys.executable, "scripts/evaluate.py", "--emulate", "--model", qwen, "--data", PROBLEMS]
    command += ["--n", "3", "--max-tokens", "6", "--output", output, *options]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    content = json.loads((output / "evaluation.json").read_text())
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(qwen)
    answers = [each["answers"]["model"] for each in content["questions"]]
    prompts = [
        tokenizer.apply_chat_template(each["messages"], add_generation_prompt=True, return_dict=False)
        for each in content["questions"]
    ]
    found = greedy_of_transformers(qwen, prompts, 6)
    expected = [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in found]
    equal = [each["greedy"]["text"] == text for each, text in zip(answers, expected, strict=True)]
    assert len(equal) == 24 and sum(equal) >= 18, equal
    # Control: sampled answers differ from greedy ones and from each other.
    sampled = [[one["text"] for one in each["sampled"]] for each in answers]
    assert sum(texts[0] == text for texts, text in zip(sampled, expected, strict=True)) <= 6
    assert all(len(set(texts)) > 1 for texts in sampled)
    assert all(each["greedy"]["tokens"] <= 6 for each in answers)
