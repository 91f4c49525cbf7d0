"""Every shipped job with the config.json of a published model is rejected everywhere with one sentence, or nowhere.

The reference is what a worker builds: `published_models_program.py` has upstream's own builders make each model. Each
job gets all 50 models with `--exhaustive`, else those of known cases and every `SHARE`th other one.
"""

import json
import os
import re
import subprocess
from copy import deepcopy
from functools import cache
from pathlib import Path
from unittest import mock

import pytest

from overlay import ConfigurationError
from post_training.plan.report import Machine
from rehearsal.plan import run_environment
from scripts import plan, preflight
from tests import forked
from tests.post_training.models.published_configs import PUBLISHED_CONFIGS
from tests.verl_patches.trainer.shipped_jobs import JOBS
from verl_patches.trainer import main_ppo
from verl_patches.trainer.configuration_checks import check_configuration

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[3]
MODEL = "actor_rollout_ref.model.path"
COMPOSE = main_ppo.compose
SECONDS_ALLOWED = 600
SHARE = 8
# Keys that the builders accept, although training or the rollout would then not compute what the files describe.
NOT_SEEN_BY_BUILDERS = (
    "num_nextn_predict_layers=",
    "quantization_config=",
    "dual_chunk_attention_config=",
    "config.json's rope_scaling=",  # training and rollout are built, as two models
)
SENTENCES = {
    # Cases from public reports: the job, the model, and what it is rejected for.
    ("deepseek_v3_256die_random_init", "deepseek-ai/DeepSeek-V3.1"): "num_nextn_predict_layers=1 of the model's config",
    (
        "deepseek_v3_256die_true_weight",
        "deepseek-ai/DeepSeek-V3, FP8 left",
    ): "Remove quantization_config and use bf16 weights",
    ("deepseek_v3_256die_true_weight", "deepseek-ai/DeepSeek-V3.2-Exp"): (
        "no sharding spec for architecture DeepseekV32ForCausalLM. Known are DeepseekV3ForCausalLM, Qwen2ForC"
    ),
    ("qwen2_5_32b_dapo", "Qwen/Qwen2.5-3B-Instruct"): "=8 does not divide the model's 2 key-value heads",
    ("qwen2_5_32b_dapo", "Qwen/Qwen2.5-Math-7B"): "sequences of this job have up to 22528 tokens",
    ("qwen2_5_0_5b_gsm8k", "Qwen/Qwen2.5-7B-Instruct, sliding"): "use_sliding_window=true of the model's config.json",
    (
        "qwen2_5_32b_dapo",
        "Qwen/Qwen2.5-VL-7B-Instruct",
    ): "strategy=megatron is invalid: verl has no Megatron model",
    ("qwen2_5_0_5b_gsm8k", "meta-llama/Llama-3.1-8B-Instruct"): "no sharding spec for architecture LlamaForCausal",
}
# One for each backend.
OF_COMMANDS = [
    ("deepseek_v3_256die_true_weight", "deepseek-ai/DeepSeek-V3, FP8 left"),
    ("qwen2_5_0_5b_gsm8k", "Qwen/Qwen2.5-7B-Instruct, sliding"),
]
ACCEPTED = {
    ("deepseek_v3_256die_true_weight", "deepseek-ai/DeepSeek-V3, edited"),
    ("qwen2_5_32b_dapo", "Qwen/Qwen2.5-32B"),
    ("qwen2_5_32b_dapo", "Qwen/Qwen3-4B"),
    ("qwen2_5_0_5b_gsm8k", "Qwen/Qwen2.5-0.5B-Instruct"),
    ("qwen2_5_1_5b_math_one_card", "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B"),
    ("qwen2_5_1_5b_math_one_card", "Qwen/Qwen2.5-Math-1.5B"),
    ("qwen2_5_vl_3b_geo3k_one_card", "Qwen/Qwen2.5-VL-3B-Instruct"),
    ("qwen2_5_vl_7b_geo3k", "Qwen/Qwen2.5-VL-7B-Instruct"),
    ("qwen2_5_vl_32b_geo3k", "Qwen/Qwen2.5-VL-32B-Instruct"),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return a folder with a subfolder per model that holds its config.json."""
    made = tmp_path_factory.mktemp("models")
    for name, values in PUBLISHED_CONFIGS.items():
        (made / folder_name(name)).mkdir()
        (made / folder_name(name) / "config.json").write_text(json.dumps(values))
    return made


@pytest.fixture(scope="module")
def models(pytestconfig) -> dict[str, list[str]]:
    """Return the models to check, by job."""
    cases = SENTENCES.keys() | ACCEPTED
    share = 1 if pytestconfig.getoption("exhaustive") else SHARE
    return {
        job: [
            model
            for number, model in enumerate(PUBLISHED_CONFIGS)
            if (job, model) in cases or number % share == place % share
        ]
        for place, job in enumerate(JOBS)
    }


@pytest.fixture(scope="module")
def workers(folders, models, tmp_path_factory):
    """Return the answers of workers and of upstream's builders, by job and folder."""
    asked_for = tmp_path_factory.mktemp("asked") / "models.json"
    asked_for.write_text(json.dumps({job: list(map(folder_name, names)) for job, names in models.items()}))
    answers = asked_for.with_name("answers.json")
    environment = os.environ | run_environment([]) | {"PYTHONPATH": str(ROOT)}
    asked = forked.start(
        forked.MEGATRON, "tests.verl_patches.trainer.published_models_program", folders, asked_for, answers,
        environment=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    said_by_it, _ = asked.communicate(timeout=SECONDS_ALLOWED)
    assert asked.returncode == 0, said_by_it[-6000:]
    return json.loads(answers.read_text())


def folder_name(model):
    return re.sub(r"[^\w.-]+", "--", model)


@cache
def composed(name, overrides):
    return COMPOSE(name, list(overrides))


def compose_once(name, overrides):
    """Return the configuration; repeated calls with another model path reuse the composed one."""
    path = [each for each in overrides if each.startswith(f"{MODEL}=")]
    config = deepcopy(composed(name, tuple(each for each in overrides if each not in path)))
    config.actor_rollout_ref.model.path = path[-1].partition("=")[2].strip("'\"")
    return config


def said(check, *arguments):
    try:
        check(*arguments)
    except ConfigurationError as error:
        return str(error)
    return None


@pytest.mark.parametrize("job", JOBS)
def test_published_models_get_one_answer_everywhere(job, folders, models, workers):
    """--check's function, plan.py's, preflight.py's and the worker's agree, and a model that passes can be built."""
    name, overrides = job.split()[0], list(JOBS[job])
    with mock.patch.object(main_ppo, "compose", compose_once):
        for model in models[job]:
            values = PUBLISHED_CONFIGS[model]
            path = f"{MODEL}={folders / folder_name(model)}"
            checked = said(check_configuration, compose_once(name, [path, *overrides]))
            planned = said(plan.configuration_of, name, [path, *overrides], values)
            worker, built = workers[job][folder_name(model)].values()
            assert checked == planned == worker, model
            if checked is None:
                assert built is None, f"{model} passes, and a worker ends with {built}"
            elif built is None:
                assert checked.startswith(NOT_SEEN_BY_BUILDERS), f"{model} could be built: {checked}"
            assert checked is None or "\n" not in checked
            if (job, model) in ACCEPTED:
                assert checked is None, model
            assert SENTENCES.get((job, model), "") in (checked or "")


@pytest.mark.parametrize(("job", "model"), OF_COMMANDS)
def test_commands_reject_a_model_with_that_sentence(job, model, folders, workers, capsys, tmp_path):
    """Call all commands as a user does; the test above covers every other model."""
    folder = folders / folder_name(model)
    sentence = workers[job][folder_name(model)]["worker"]
    assert main_ppo.main(["--config-name", job, "--check", f"{MODEL}={folder}"]) == 2
    assert capsys.readouterr().err == f"error: {sentence}\n"
    assert plan.main(["--config-name", job, "--model", str(folder / "config.json")]) == 2
    assert capsys.readouterr().err == f"error: {sentence}\n"
    look = ["--config-name", job, "--no-scaled-down-job", "--output", str(tmp_path), f"{MODEL}={folder}"]
    assert preflight.main(look) == 1
    found = {
        each["stage"]: (each["state"], each["said"]) for each in json.loads((tmp_path / "preflight.json").read_text())
    }
    assert found["checks"] == found["plan"] == ("failed", sentence)


@pytest.mark.parametrize(("job", "model"), sorted(ACCEPTED))
def test_accepted_models_are_planned(job, model, folders):
    path = f"{MODEL}={folders / folder_name(model)}"
    config, swaps = plan.configuration_of(job, [path], None)
    found = plan.make_plan(config, PUBLISHED_CONFIGS[model], swaps, Machine(61 << 30)).device_bytes()
    assert min(found["phases"].values()) > 0
