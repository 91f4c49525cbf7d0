"""Runs whose update cannot supply old log-probs are rejected by one function, in `--check` and in the trainer."""

import importlib
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from post_training.report.run_error import RunError
from rehearsal.stack_2026.plan import BACKENDS, Options, make_plan
from tests.stack_2026.verl.test_jobs import ACTOR, CLUSTER, MODELS, ONE_CARD, ONE_NODE
from verl_plugin.jobs import JobError, check_job, compose_job
from verl_plugin.rollout.sync_window import EXECUTOR_KEY
from verl_plugin.trainer_modes import MODE_KEY, MODULES, MODULES_KEY, ONE_FORWARD, REGISTRATION

ONE_UPDATE = f"{ACTOR}.ppo_mini_batch_size=${{data.train_batch_size}}"
# The overrides that enable the mode. A later override of the same key wins.
ON = [f"{MODE_KEY}={ONE_FORWARD}", ONE_UPDATE]
REJECTED = [
    (f"{ACTOR}.ppo_mini_batch_size=8", "splits the 16 prompts of a rollout batch into 2 updates; set the two equal"),
    (f"{ACTOR}.ppo_epochs=2", "ppo_epochs=2; set it to 1"),
    ("algorithm.use_kl_in_reward=true", "needs it before the update"),
    ("algorithm.rollout_correction.bypass_mode=true", "old log-probs are then the rollout's"),
    ("algorithm.rollout_correction.rollout_is=token", "rollout_is=token is invalid"),
    ("algorithm.adv_estimator=optimal_token_baseline", "adv_estimator=optimal_token_baseline is invalid"),
    (f"{ACTOR}.policy_loss.loss_mode=bypass_mode", "loss_mode=bypass_mode is invalid"),
    (f"{ACTOR}.calculate_sum_pi_squared=true", "the skipped forward computes it. Set it to false"),
    ("actor_rollout_ref.model.use_fused_kernels=true", "fused kernels keep no logits"),
    ("distillation.enabled=true", "distillation.enabled=True is invalid"),
    ("trainer.critic_warmup=2", "critic_warmup=2 is invalid"),
    ("+actor_rollout_ref.model.override_config.attention_dropout=0.1", "override_config.attention_dropout=0.1 is"),
    (
        "+actor_rollout_ref.model.override_config.model_config.attention_dropout=0.1",
        "override_config.model_config.attention_dropout=0.1 is",
    ),
]


@pytest.fixture(scope="module")
def trainer() -> Any:
    """The registered trainer class; verl is imported inside tests, not by test modules."""
    importlib.import_module(REGISTRATION)
    from verl.trainer.ppo.v1 import get_trainer_cls

    from verl_plugin.onpolicy.trainer import OnPolicyTrainer

    assert get_trainer_cls(ONE_FORWARD) is OnPolicyTrainer
    return OnPolicyTrainer


def test_trainer_is_imported_behind_those_of_verl(tmp_path, monkeypatch):
    """Check that it is not imported earlier: other processes do not need its dependencies."""
    registration = importlib.import_module(REGISTRATION)
    (tmp_path / "their_trainers.py").write_text("there = 1\n")
    (tmp_path / "our_trainer.py").write_text("import their_trainers\nfound = their_trainers.there\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registration, "_TRAINERS", "their_trainers")
    monkeypatch.setattr(registration, "_OWN", "our_trainer")
    finder = registration._BehindTrainers()
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    assert finder.find_spec("another", None) is None and "our_trainer" not in sys.modules
    importlib.import_module("their_trainers")
    assert sys.modules["our_trainer"].found == 1 and finder not in sys.meta_path


@pytest.mark.parametrize("job", MODELS)
def test_jobs_take_the_updates_own_log_probs(job):
    assert check_job(compose_job(job, ON), MODELS[job])["trainer"]["v1"]["trainer_mode"] == ONE_FORWARD


@pytest.mark.parametrize("job", MODELS)
def test_jobs_that_make_one_update_take_them_by_default(job):
    mode = check_job(compose_job(job), MODELS[job])["trainer"]["v1"]["trainer_mode"]
    assert mode == (ONE_FORWARD if job in CLUSTER else "sync")
    # Sync windows over several nodes need one of this project's modes.
    without_windows = [f"{EXECUTOR_KEY}=mp"] if job in CLUSTER else []
    off = check_job(compose_job(job, [f"{MODE_KEY}=sync", *without_windows]), MODELS[job])
    assert off["trainer"]["v1"]["trainer_mode"] == "sync"


@pytest.mark.parametrize("backend", BACKENDS)
def test_rehearsal_takes_them_beside_modules_of_the_user(tmp_path, monkeypatch, backend):
    for given, modules in (("", REGISTRATION), ("mine,yours", f"mine,yours,{REGISTRATION}")):
        monkeypatch.setenv(MODULES, given)
        keys = list(make_plan(Options(backend=backend, output=tmp_path), "now").overrides())
        assert f"{MODE_KEY}={ONE_FORWARD}" in keys and f"++{MODULES_KEY}='{modules}'" in keys


@pytest.mark.parametrize(("override", "says"), REJECTED)
def test_reader_of_old_log_probs_rejected_in_check_and_trainer(trainer, override, says):
    config = compose_job(ONE_CARD, [*ON, override])
    with pytest.raises(JobError) as caught:
        check_job(config, MODELS[ONE_CARD])
    assert says in str(caught.value) and MODE_KEY in str(caught.value)
    with pytest.raises(ValueError) as again:
        trainer(config)
    assert str(again.value) == str(caught.value)


@pytest.mark.parametrize("override", [override for override, _ in REJECTED[:2]])
def test_verls_own_mode_takes_several_updates(override):
    check_job(compose_job(ONE_CARD, [override]), MODELS[ONE_CARD])


def test_model_and_megatron_that_do_not_fit_rejected():
    with pytest.raises(JobError, match="config.json: resid_pdrop=0.1 is invalid"):
        check_job(compose_job(ONE_CARD, ON), MODELS[ONE_CARD] | {"resid_pdrop": 0.1})
    given = [*ON, f"{ACTOR}.megatron.router_replay.mode=R2"]
    with pytest.raises(JobError, match="experts are recorded in the skipped forward"):
        check_job(compose_job(ONE_NODE, given), MODELS[ONE_NODE])


def test_trainer_that_nobody_registers_rejected():
    with pytest.raises(JobError, match="VERL_USE_EXTERNAL_MODULES=None is invalid"):
        check_job(compose_job(ONE_CARD, [*ON, f"{MODULES_KEY}=null"]), MODELS[ONE_CARD])


def test_batch_of_several_updates_ends_the_run(trainer):
    made = object.__new__(trainer)
    ours = SimpleNamespace(actor=SimpleNamespace(ppo_mini_batch_size=4), rollout=SimpleNamespace(n=2))
    made.config = SimpleNamespace(actor_rollout_ref=ours)
    with pytest.raises(RunError, match="a batch has 9 samples, but one update 8"):
        made._update_actor([None] * 9, {})
