"""verl's own command as guides write it: its configuration on NPUs, and its message if it cannot run."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import socket
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from tests.verl_patches.trainer.configuration_checks.test_fsdp import NAME, PUBLISHED
from verl_patches import prelude_patch
from verl_patches.trainer import main_ppo, verl_command
from verl_patches.trainer.configuration_checks import check_configuration
from verl_patches.trainer.configuration_checks.backends import backend_of

ROOT = Path(__file__).resolve().parents[3]
MODEL = "actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct"
# The values that the guide to verl in production exports, and its command.
EXPORTED = {"NNODES": "4", "TP": "2", "PP": "2", "DP": "2", "BATCH_SIZE": "32", "MAX_SEQ_LEN": "4096"}
PRODUCTION = shlex.split("""
--config-path="examples/grpo" --config-name='qwen2_5_7b_math' algorithm.adv_estimator=grpo
actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.model.use_remove_padding=True
actor_rollout_ref.actor.ppo_max_token_len_per_gpu=3072 actor_rollout_ref.rollout.gpu_memory_utilization=0.8
""")


@pytest.fixture(autouse=True)
def surroundings(monkeypatch, tmp_path):
    """Provide an environment without Ray, in a separate working folder."""
    for name in (*EXPORTED, "RAY_ADDRESS", "VERL_USE_MODELSCOPE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "no-ray"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(os, "environ", os.environ.copy())  # the command adds variables
    monkeypatch.chdir(tmp_path)


def composed(*words, name="ppo_trainer", path=None, further=None):
    return verl_command.compose(name, path, further, words)


def test_published_line_composes_what_its_launcher_trains():
    """The values equal those of the job in docs/first-hour.md, except where verl and that job differ on purpose."""
    config, job = composed(MODEL, *PUBLISHED), main_ppo.compose(NAME, [MODEL])
    check_configuration(config)
    different = {"custom_reward_function.path", "reward_model.overlong_buffer.len", "trainer.resume_mode"}
    different |= {"data.train_files", "data.val_files"}
    assert different == set(differing(OmegaConf.to_container(config), OmegaConf.to_container(job)))
    # verl chooses the rule by the data source, and resumes automatically.
    assert config.custom_reward_function.path is None and config.trainer.resume_mode == "auto"


def differing(left, right, place=""):
    """Return the keys at which two nested groups differ."""
    if not (isinstance(left, dict) and isinstance(right, dict)):
        return [] if left == right else [place]
    names = {**left, **right}
    return [each for name in names for each in differing(left.get(name), right.get(name), f"{place}.{name}".strip("."))]


def test_last_of_two_values_counts_as_hydra_has_it():
    assert composed(MODEL, *PUBLISHED, "trainer.n_gpus_per_node=2").trainer.n_gpus_per_node == 2


@pytest.mark.parametrize("exported", [EXPORTED, {}])
def test_production_command_composes_and_checks(monkeypatch, exported):
    for name, value in exported.items():
        monkeypatch.setenv(name, value)
    options = verl_command._parser().parse_intermixed_args(PRODUCTION)
    config = composed(*options.overrides, name=options.config_name, path=options.config_path)
    OmegaConf.update(config, "ray_init.address", "auto")  # a Ray of four nodes
    settings = check_configuration(config, json.loads((ROOT / "verl_patches" / "config.json").read_text()) | QWEN)
    assert backend_of(config) == "fsdp" and not settings.reshard.enabled
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    assert (actor.strategy, config.critic.strategy, rollout.tensor_model_parallel_size) == ("fsdp2", "fsdp2", 2)
    assert (config.trainer.nnodes, config.data.train_batch_size, rollout.max_model_len) == (4, 32, 4096)
    # The guide's own rule for a micro batch's token limit.
    assert actor.ppo_max_token_len_per_gpu == 2 * (config.data.max_prompt_length + config.data.max_response_length)


QWEN = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 3584, "num_attention_heads": 28,
    "num_key_value_heads": 4, "intermediate_size": 18944, "num_hidden_layers": 28, "vocab_size": 152064,
    "rope_scaling": None, "max_position_embeddings": 32768,
}  # fmt: skip


def test_exported_values_of_the_production_command_count(monkeypatch):
    for name, value in {"NNODES": "1", "TP": "4", "BATCH_SIZE": "64", "MAX_SEQ_LEN": "2048"}.items():
        monkeypatch.setenv(name, value)
    config = composed(name="qwen2_5_7b_math", path="examples/grpo")
    rollout = config.actor_rollout_ref.rollout
    assert (config.trainer.nnodes, rollout.tensor_model_parallel_size) == (1, 4)
    assert (config.data.train_batch_size, rollout.max_model_len) == (64, 2048)


def test_megatron_of_verl_composes_and_checks():
    sizes = [f"actor_rollout_ref.{role}.log_prob_micro_batch_size_per_gpu=4" for role in ("rollout", "ref")]
    sizes += ["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4", "actor_rollout_ref.rollout.n=2"]
    config = composed("algorithm.adv_estimator=grpo", MODEL, *sizes, name="ppo_megatron_trainer")
    settings = check_configuration(config)
    assert backend_of(config) == "megatron" and settings.mindspeed.engine == "auto"


def test_users_own_file_has_the_last_word(tmp_path):
    (tmp_path / "mine").mkdir()
    own = "defaults:\n  - ppo_trainer\n  - _self_\ntrainer:\n  resume_mode: disable\n  project_name: mine\n"
    (tmp_path / "mine" / "job.yaml").write_text(own)
    config = composed(MODEL, *PUBLISHED[:-8], name="job.yaml", path="mine")
    assert config.trainer.resume_mode == "disable" and config.trainer.project_name == "mine"
    assert config.actor_rollout_ref.overlay.precision == "bfloat16"


def test_search_path_of_a_users_file_stays(tmp_path):
    for folder, text in (("parts", "trainer:\n  project_name: of the part\n"), ("mine", "")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "part.yaml").write_text(f"# @package _global_\n{text}" if text else "")
    (tmp_path / "mine" / "part.yaml").unlink()
    search = f"hydra:\n  searchpath:\n    - file://{tmp_path}/parts\n"
    (tmp_path / "mine" / "job.yaml").write_text(f"{search}defaults:\n  - ppo_trainer\n  - part\n  - _self_\n")
    assert composed(MODEL, name="job", path="mine").trainer.project_name == "of the part"
    shutil.move(tmp_path / "mine" / "job.yaml", tmp_path / "other.yaml")
    (tmp_path / "other.yaml").write_text("defaults:\n  - ppo_trainer\n  - part\n  - _self_\n")
    config = composed(MODEL, name="other", path=str(tmp_path), further=str(tmp_path / "parts"))
    assert config.trainer.project_name == "of the part"


def test_verls_own_folder_is_as_good_as_none():
    folder = str(main_ppo.verl_config_folder())
    plain = OmegaConf.to_container(composed(MODEL), resolve=True)
    for path in (folder, "config"):
        assert OmegaConf.to_container(composed(MODEL, path=path), resolve=True) == plain


def test_whole_configuration_of_a_user_is_completed():
    """A user's own program builds verl's trainer: verl's values are kept, and missing ones are added."""
    verls = OmegaConf.load(main_ppo.verl_config_folder() / "ppo_trainer.yaml")
    given = OmegaConf.merge(verls, OmegaConf.from_dotlist([MODEL, *PUBLISHED]))
    config = verl_command.completed(given)
    settings = check_configuration(config)
    assert not settings.reshard.enabled and settings.mindspeed.engine == "off"
    added = differing(OmegaConf.to_container(config), OmegaConf.to_container(given))
    assert all(OmegaConf.select(given, name) is None for name in added) and "actor_rollout_ref.overlay" in added
    assert config.actor_rollout_ref.actor.use_torch_compile is given.actor_rollout_ref.actor.use_torch_compile


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["trainer.device=cuda"], "trainer.device=cuda is invalid: it should be 'npu'"),
        (["actor_rollout_ref.rollout.mode=async"], "mode=async is invalid"),
        (["trainer.savefreq=1"], "unknown key trainer.savefreq, .*did you mean trainer.save_freq"),
        (["--config-path=no/such"], "--config-path=no/such is invalid: no such folder beside verl's"),
        (["--config-name=none"], "no configuration none"),
        (["--multirun"], "--multirun is Hydra's and not supported here. Start one command for each job"),
        (["actor_rollout_ref.model.path=Qwen/none"], "path=Qwen/none is invalid: not a folder on this machine, .*"
         "modelscope download --model Qwen/none --local_dir Qwen/none, or hf download Qwen/none --local-dir Qwen/none"),
    ],
)  # fmt: skip
def test_line_that_cannot_run_is_one_sentence(capsys, words, says):
    model = "actor_rollout_ref.model.path=/weights"
    assert verl_command.main([model, *PUBLISHED, *words]) == 2
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1 and said.startswith("error: ")
    assert re.search(says, said), said


def cached_model(home: Path, name: str, **values: object) -> Path:
    """Create the hub client's cache as a download of a model leaves it. Return the model's folder."""
    repository = home / "hub" / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    (snapshot / "config.json").write_text(json.dumps(values))
    return snapshot


def test_name_on_the_hub_is_the_folder_in_its_clients_cache(monkeypatch, tmp_path):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub._snapshot_download.HF_HUB_CACHE", str(tmp_path / "hub"), raising=False)
    snapshot = cached_model(tmp_path, "Qwen/Qwen2.5-0.5B-Instruct", model_type="qwen2")
    config = composed(MODEL, *PUBLISHED)
    verl_command._find_models(config)
    assert Path(config.actor_rollout_ref.model.path) == snapshot
    # A folder of that name in the working directory takes precedence, as in transformers.
    (tmp_path / "Qwen" / "Qwen2.5-0.5B-Instruct").mkdir(parents=True)
    config = composed(MODEL, *PUBLISHED)
    verl_command._find_models(config)
    assert config.actor_rollout_ref.model.path == "Qwen/Qwen2.5-0.5B-Instruct"


def test_ray_that_runs_is_joined(monkeypatch, tmp_path):
    assert composed(MODEL).ray_init.address == "local"
    (tmp_path / "no-ray" / "ray").mkdir(parents=True)
    file = tmp_path / "no-ray" / "ray" / "ray_current_cluster"
    with socket.create_server(("127.0.0.1", 0)) as server:
        file.write_text(address := f"127.0.0.1:{server.getsockname()[1]}")
        assert composed(MODEL).ray_init.address == address
    assert composed(MODEL).ray_init.address == "local", "what the file names has ended"
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert composed(MODEL).ray_init.address == "auto"


def test_ray_of_another_user_is_not_joined(monkeypatch, tmp_path, capsys):
    (tmp_path / "no-ray" / "ray").mkdir(parents=True)
    file, other = tmp_path / "no-ray" / "ray" / "ray_current_cluster", os.getuid() + 1
    with socket.create_server(("127.0.0.1", 0)) as server:
        file.write_text(address := f"127.0.0.1:{server.getsockname()[1]}\n")
        monkeypatch.setattr(os, "getuid", lambda: other)
        assert composed(MODEL).ray_init.address == "local"
    said = capsys.readouterr().err
    assert f"the Ray at {address.strip()} belongs to another user" in said
    assert f"set RAY_ADDRESS={address.strip()} to join it" in said
    assert composed(MODEL).ray_init.address == "local" and not capsys.readouterr().err, "what the file names has ended"


@pytest.mark.parametrize(
    ("started", "ours"),
    [
        ("python3 -m verl.trainer.main_ppo a=1", "python3 -m OURS a=1"),
        ("python3 -mverl.trainer.main_ppo", "python3 -m OURS"),
        ("python -X dev -m pdb -m verl.trainer.main_ppo a=1 b=2", "python -X dev -m pdb -m OURS a=1 b=2"),
        ("python /fork/verl/trainer/main_ppo.py a=1", "python -m OURS a=1"),
        ("python -m recipe.dapo.main_dapo trainer=verl.trainer.main_ppo", None),
        ("python -m verl_patches.trainer.main_ppo --config-name rehearsal", None),
        ("python -m verl.trainer.main_eval", None),
        ("python -c verl/trainer/main_ppo.py", None),
        ("", None),
    ],
)
def test_only_verls_command_becomes_ours(started, ours):
    expected = ours and ours.replace("OURS", "verl_patches.trainer.verl_command").split()
    assert prelude_patch.command_of_ours(started.split()) == expected


def test_variables_of_the_job_are_set_unless_the_user_has(monkeypatch):
    variables = {"VLLM_USE_V1": "0"}
    monkeypatch.setattr(os, "environ", variables)
    verl_command._set_variables()
    assert variables["VLLM_USE_V1"] == "0" and variables["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert not variables.keys() & {"HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "CANN_ENV"}
