"""The requirements of a run on the driver's machine: trackers, model folder, reward function, environment."""

import inspect
import os
import re
import sys

import pytest

from overlay import ConfigurationError
from post_training.overrides import setting
from verl_patches.trainer.configuration_checks import check_machine
from verl_patches.trainer.configuration_checks.files import check_interpreter, check_shared_copy
from verl_patches.trainer.configuration_checks.trackers import TRACKERS, check_trackers
from verl_patches.trainer.main_ppo import REPOSITORY, compose

_SHARED = inspect.signature(check_shared_copy).parameters["folder"].default
OUR_RULES = REPOSITORY / "verl_patches" / "utils" / "reward" / "rule_reward.py"
VARIABLES = (
    "WANDB_API_KEY WANDB_MODE WANDB_BASE_URL SWANLAB_API_KEY SWANLAB_MODE SWANLAB_SAVE_DIR CLEARML_CONFIG_FILE NETRC "
    "CLEARML_API_ACCESS_KEY CLEARML_API_SECRET_KEY VOLC_ACCESS_KEY_ID VOLC_SECRET_ACCESS_KEY MLP_TRACKING_REGION "
    "TASK_QUEUE_ENABLE"
)


@pytest.fixture(autouse=True)
def without_logins(monkeypatch, tmp_path):
    for name in VARIABLES.split():
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.fixture
def packages(monkeypatch, tmp_path):
    """Make every tracker's package importable."""
    for tracker in TRACKERS.values():
        (tmp_path / "packages" / tracker.package).mkdir(parents=True, exist_ok=True)
        (tmp_path / "packages" / tracker.package / "__init__.py").touch()
        monkeypatch.delitem(sys.modules, tracker.package, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))


def logging_to(*names, stays_offline=False):
    node = {"overlay": {"tracking": {"enabled": stays_offline}}}
    return {"trainer": {"logger": list(names)}, "actor_rollout_ref": node}


def rejection(*overrides, model_is_there=False):
    with pytest.raises(ConfigurationError) as caught:
        check_machine(compose("rehearsal", list(overrides)), model_is_there)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_tracker_whose_package_is_absent_rejected():
    assert "swanlab is not installed in this environment" in rejection("trainer.logger=[console,swanlab]")
    check_machine(compose("rehearsal", [setting("custom_reward_function.path", OUR_RULES)]), model_is_there=False)


@pytest.mark.parametrize(
    ("name", "remedy", "logins"),
    [
        ("wandb", "set WANDB_API_KEY, or WANDB_MODE=offline", [{"WANDB_API_KEY": "x"}, {"WANDB_MODE": "offline"}]),
        ("tracking", "set WANDB_API_KEY", [{"WANDB_MODE": "disabled"}]),
        ("swanlab", "set SWANLAB_API_KEY", [{"SWANLAB_API_KEY": "x"}, {"SWANLAB_MODE": "local"}]),
        (
            "vemlp_wandb",
            "set VOLC_ACCESS_KEY_ID",
            [{"VOLC_ACCESS_KEY_ID": "x", "VOLC_SECRET_ACCESS_KEY": "y", "MLP_TRACKING_REGION": "z"}],
        ),
        ("clearml", "set CLEARML_API_ACCESS_KEY", [{"CLEARML_API_ACCESS_KEY": "x", "CLEARML_API_SECRET_KEY": "y"}]),
    ],
)
def test_a_tracker_without_a_login_rejected_and_with_one_it_is_not(name, remedy, logins, packages, monkeypatch):
    with pytest.raises(ConfigurationError, match=f"trainer.logger has {name}, which has no login here: {remedy}"):
        check_trackers(logging_to("console", name))
    for login in logins:
        with monkeypatch.context() as variables:
            for variable, value in login.items():
                variables.setenv(variable, value)
            check_trackers(logging_to("console", name))
            if len(login) > 1:  # each of them is required
                variables.delenv(next(iter(login)))
                with pytest.raises(ConfigurationError, match="no login"):
                    check_trackers(logging_to(name))


def test_logins_in_files_count(packages, tmp_path):
    (tmp_path / ".netrc").write_text("machine other.host login user password x\n")
    with pytest.raises(ConfigurationError, match="no login"):
        check_trackers(logging_to("wandb"))
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password x\n")
    check_trackers(logging_to("wandb"))
    (tmp_path / ".swanlab").mkdir()
    (tmp_path / ".swanlab" / ".netrc").touch()
    (tmp_path / "clearml.conf").touch()
    check_trackers(logging_to("swanlab", "clearml"))


def test_trackers_that_ask_nobody_need_their_package_only(packages):
    check_trackers(logging_to("mlflow", "tensorboard", "console"))
    check_trackers({**logging_to(), "trainer": {"logger": "console"}})


def test_trackers_that_stay_offline_need_no_login(packages):
    check_trackers(logging_to("wandb", "swanlab", stays_offline=True))
    with pytest.raises(ConfigurationError, match="no login"):
        check_trackers(logging_to("clearml", stays_offline=True))


def test_the_models_folder_must_be_there(tmp_path):
    reward = setting("custom_reward_function.path", OUR_RULES)
    said = rejection(reward, f"actor_rollout_ref.model.path={tmp_path}/model", model_is_there=True)
    assert f"model.path={tmp_path}/model is invalid: not a folder with a config.json" in said
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    check_machine(compose("rehearsal", [reward, f"actor_rollout_ref.model.path={tmp_path}/model"]))
    check_machine(compose("rehearsal", [reward, "actor_rollout_ref.model.path='hdfs://cluster/model'"]))


@pytest.mark.parametrize(
    ("tokenizer", "beside", "says"),
    [
        ('{"chat_template": "{{ messages }}"}', None, None),
        ("{}", "chat_template.jinja", None),
        ("{}", "additional_chat_templates", None),
        (
            "{}",
            None,
            "/模型 is invalid: its tokenizer has no chat template, .* Set it to an instruct model, or put a",
        ),
        ('{"chat_template": null}', None, "its tokenizer has no chat template"),
        ("no json", None, "tokenizer_config.json is not a readable JSON object .*. Copy the model again"),
        ("[1]", None, "tokenizer_config.json is not a readable JSON object"),
    ],
)
def test_the_models_tokenizer_must_have_a_chat_template(tmp_path, tokenizer, beside, says):
    folder = tmp_path / "模型"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "generation_config.json").write_text('{"eos_token_id": 2}')
    (folder / "tokenizer_config.json").write_text(tokenizer)
    if beside:
        (folder / beside).write_text("")
    overrides = [setting("custom_reward_function.path", OUR_RULES), setting("actor_rollout_ref.model.path", folder)]
    if says is None:
        check_machine(compose("rehearsal", overrides))
    else:
        assert re.search(says, rejection(*overrides, model_is_there=True))


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["custom_reward_function.path=/nosuch.py"], "custom_reward_function.path=/nosuch.py is not a file"),
        (["custom_reward_function.name=nosuch"], "custom_reward_function.name=nosuch is not defined in"),
        (
            ["+custom_reward_function.reward_kwargs.rule=nosuch"],
            "rule=nosuch is invalid. Set it to one of boxed, subst",
        ),
        (["+custom_reward_function.reward_kwargs.ruel=boxed"], "ruel is not an argument of compute_score .*mean rule?"),
        (["+custom_reward_function.reward_kwargs.zzz=1"], "zzz is not an argument of compute_score .*it takes data_so"),
        (
            ["+custom_reward_function.reward_kwargs.time_limit_s=0"],
            "time_limit_s=0 is invalid. Set it to a number of seconds",
        ),
        (
            ["+custom_reward_function.reward_kwargs.time_limit_s=true"],
            "time_limit_s=True is invalid. Set it to a number of seconds",
        ),
    ],
)
def test_a_reward_that_cannot_be_called_rejected(overrides, says):
    said = rejection(setting("custom_reward_function.path", OUR_RULES), *overrides)
    assert re.search(says, said), said


def test_a_reward_of_the_users_own(tmp_path):
    file = tmp_path / "own.py"
    for text, name, arguments, says in [
        ("def score(data_source, **rest): return 1.0", "score", "{x:1}", ""),
        ("def score(data_source, x=1): return 1.0", "score", "{x:1}", ""),
        ("from math import sqrt as score", "score", "{x:1}", ""),
        ("if True:\n    score = abs", "score", "{x:1}", ""),
        ("def score(data_source): return 1.0", "score", "{x:1}", "reward_kwargs.x is not an argument of score"),
        ("def other(): pass", "score", "{}", "name=score is not defined"),
        ("def score(", "score", "{}", "is not readable Python"),
    ]:
        file.write_text(text)
        overrides = [f"custom_reward_function.path={file}", f"custom_reward_function.name={name}"]
        overrides.append(f"+custom_reward_function.reward_kwargs={arguments}")
        if says:
            assert says in rejection(*overrides)
        else:
            check_machine(compose("rehearsal", overrides), model_is_there=False)
    check_machine(compose("rehearsal", ["custom_reward_function.path=null"]), model_is_there=False)


def test_acl_graphs_do_not_go_with_the_second_stage_of_the_task_queue(monkeypatch):
    reward = setting("custom_reward_function.path", OUR_RULES)
    graphs = [
        reward,
        "actor_rollout_ref.rollout.enforce_eager=false",
        "actor_rollout_ref.rollout.free_cache_engine=false",
    ]
    additional = "+actor_rollout_ref.rollout.engine_kwargs.vllm.additional_config"
    torchair = [*graphs, f"{additional}.torchair_graph_config.enabled=true"]
    for value, rejected in (("2", True), ("1", False), ("0", False)):
        monkeypatch.setenv("TASK_QUEUE_ENABLE", value)
        check_machine(compose("rehearsal", [reward]), model_is_there=False)
        check_machine(compose("rehearsal", torchair), model_is_there=False)
        if rejected:
            assert "Set TASK_QUEUE_ENABLE=1 in the file of the cluster" in rejection(*graphs)
        else:
            check_machine(compose("rehearsal", graphs), model_is_there=False)


def test_a_python_that_ray_cannot_start_workers_with_rejected(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/data/o'neil/bin/python")
    with pytest.raises(ConfigurationError, match="Ray cannot start workers from /data/o'neil/bin/python"):
        check_interpreter()
    monkeypatch.setattr(sys, "executable", "/data/of a team/bin/python")
    check_interpreter()


@pytest.mark.parametrize("group", ["actor_rollout_ref.model", "critic.model", "data"])
def test_shared_copy_in_another_users_folder_rejected(tmp_path, monkeypatch, group):
    """verl's own function shows the failure that every worker would have: it creates this folder for all users."""
    from verl.utils import fs

    assert f"'{_SHARED}/'" in inspect.getsource(fs.copy_to_shm)
    folder = tmp_path / "verl-cache"
    config = compose("rehearsal", [f"++{group}.use_shm=true"])
    check_shared_copy(config, folder)
    folder.mkdir()
    check_shared_copy(config, folder)
    monkeypatch.setattr(os, "access", lambda path, mode: path != folder)
    check_shared_copy(compose("rehearsal", []), folder)
    with pytest.raises(ConfigurationError) as caught:
        check_shared_copy(config, folder)
    assert str(caught.value) == (
        f"{group}.use_shm=true is invalid: verl copies the files of all users into {folder}, which "
        f"belongs to {folder.owner()} here. Set it to false, or let them remove that folder."
    )
