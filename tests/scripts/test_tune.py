"""scripts/tune.py over a scripted training, and with the plan's real rejections."""

import json
import math
import os
import shlex
import signal
import subprocess
import sys
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import optuna
import pytest

from post_training.processes.command import SignalFlag
from post_training.processes.descendants import wait_until
from post_training.report.run_folder import at, read_configuration
from post_training.tuning.search import (
    FAILED,
    MEASURED,
    REFUSED,
    REPEATED,
    SENTENCE,
    SETTINGS,
    Search,
    best_of,
    opened,
    outcome_of,
)
from post_training.tuning.space import Choice, overrides
from rehearsal.tiny_model.architecture import TINY_MODELS
from scripts.tune import main
from scripts.tuning.objectives import OfRuns, tokens_a_second
from scripts.tuning.subject import describe_rehearsal
from tests.scripts.test_summarise import TRUE_WEIGHTS, metrics, write_run
from tests.scripts.tuned_training import MICRO, SHARE

ROOT = Path(__file__).resolve().parents[2]
TRAINING = ROOT / "tests" / "scripts" / "tuned_training.py"
MEGATRON = "actor_rollout_ref.actor.megatron"
KEYS = [f"{MEGATRON}.{name}_model_parallel_size" for name in ("tensor", "pipeline")]
STAGES = f"{MEGATRON}.override_transformer_config.num_layer_list"
# With 110 MiB per die, the update takes 99 with micro batches of 64 on TP2 x PP2, and more otherwise.
LAYOUTS = ((1, 1, [3]), (1, 2, [2, 1]), (2, 1, [3]), (2, 2, [2, 1]), (2, 2, [1, 1]), (4, 1, [3]), (4, 2, [2, 1]))
SEQUENCES = "++actor_rollout_ref.rollout.engine_kwargs.vllm.max_num_seqs"
SPACE = (
    Choice(MICRO, tuple({MICRO: size} for size in (16, 24, 32, 64, 128, 256))),
    Choice("layout", tuple({KEYS[0]: tp, KEYS[1]: pp, STAGES: stages} for tp, pp, stages in LAYOUTS)),
    Choice(SEQUENCES, tuple({SEQUENCES: number} for number in (8, 16, 32, 64, 128))),
)
EVERYTHING = [{**micro, **layout, **last} for micro, layout, last in product(*(each.options for each in SPACE))]


def test_saving_does_not_slow_a_setting_down(tmp_path):
    saved = metrics(
        TRUE_WEIGHTS, **{"timing_s/save_checkpoint": 60.0, "timing_s/step": TRUE_WEIGHTS.statistics.total + 60}
    )
    plain = write_run(tmp_path / "plain", *[metrics(TRUE_WEIGHTS)] * 3)
    saving = write_run(tmp_path / "saving", *[metrics(TRUE_WEIGHTS)] * 2, saved)
    assert tokens_a_second(saving) == pytest.approx(tokens_a_second(plain))


def speed(settings):
    """Larger micro batches and fewer dies per layer are faster; 32 sequences in flight are best."""
    shared = 2 * settings[KEYS[0]] + 3 * settings[KEYS[1]]
    return settings[MICRO] ** 0.5 - shared - abs(math.log2(settings[SEQUENCES] / 32))


def scripted_search(folder, refusal, trials):
    objective = SimpleNamespace(direction="maximize", unit="tokens/s", measure=lambda settings, trial: speed(settings))
    with opened(folder, objective, trials, 0, {}) as study:
        Search(SPACE, refusal, objective, trials).carry_out(study)
    best = best_of(study)
    return study, next(each for each in EVERYTHING if overrides(each) == best.user_attrs[SETTINGS])


def test_forty_trials_find_the_fastest_settings_that_the_plan_allows(tmp_path):
    """There are 210 settings. Without rejections, a search chooses one that does not fit."""
    subject = describe_rehearsal(["bash", "scripts/rehearse.sh", "--device-memory", "110"], [])
    refusals = {}

    def refusal(settings):
        key = json.dumps({**settings, SEQUENCES: 0})  # neither a check nor this job's plan depends on it
        if key not in refusals:
            refusals[key] = subject.refusal(settings)
        return refusals[key]

    study, best = scripted_search(tmp_path, refusal, 40)
    faster = [settings for settings in EVERYTHING if speed(settings) > speed(best)]
    assert refusal(best) is None and faster and all(refusal(settings) for settings in faster)
    said = " ".join(filter(None, refusals.values()))
    assert "update: " in said and "a die has 0.12" in said, "the plan"
    assert "do not divide into whole training replicas" in said and "adds up to 2 layers" in said, "the checks"
    assert all(trial.value is None for trial in study.trials if outcome_of(trial) == REFUSED)

    control = tmp_path / "control"
    control.mkdir()
    assert refusal(scripted_search(control, lambda settings: None, 20)[1]), "it ignores refusals"


@pytest.fixture
def bench(tmp_path):
    """Return the arguments of a search over the scripted training."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "deepseek_v3", **TINY_MODELS["deepseek_v3"]}))
    space = tmp_path / "space.yaml"
    space.write_text(f"{MICRO}: [1, 2, 3, 4, 8]\n{SHARE}: {{low: 0.5, high: 0.7, step: 0.1}}\n")
    where = ["--config-name", "rehearsal", "--model", str(tmp_path / "config.json"), "--output", str(tmp_path / "out")]
    options = [*where, "--space", str(space), "--trials", "10", "--steps", "3"]
    return tmp_path, [*options, "--", sys.executable, str(TRAINING), str(tmp_path)]


def starts(folder):
    file = folder / "starts.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def trials(folder):
    return optuna.load_study(study_name="tune", storage=f"sqlite:///{folder}/out/study.db").trials


def test_killed_search_continues(bench, capsys):
    folder, arguments = bench
    (folder / "hold").write_text("2")
    tuner = subprocess.Popen(
        [sys.executable, "scripts/tune.py", *arguments], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    assert wait_until(lambda: len(list(folder.glob("out/trials/*/metrics.jsonl"))) == 2, 120)
    assert main(arguments) == 2 and f"is in use by process {tuner.pid}" in capsys.readouterr().err
    tuner.send_signal(signal.SIGKILL)
    tuner.wait(timeout=600)
    (folder / "hold").unlink()
    assert main(arguments) == 0
    killed, again = starts(folder)[1:3]
    assert [word for word in again if "trials/" not in word] == [word for word in killed if "trials/" not in word]
    started = [trial for trial in trials(folder) if outcome_of(trial) in (MEASURED, FAILED)]
    assert len({tuple(trial.user_attrs[SETTINGS]) for trial in started}) == len(started) == len(starts(folder)) - 1
    printed = capsys.readouterr().out
    assert printed.splitlines()[-1] == f"{MICRO}=8 {SHARE}=0.6"
    assert "a die ran out of device memory; use smaller micro batches" in printed and "refused" in printed
    assert (folder / "out" / "best.yaml").read_text().splitlines()[1:] == [f"- {MICRO}=8", f"- {SHARE}=0.6"]
    assert "trainer.save_freq=-1" in again and "trainer.total_training_steps=3" in again


def test_a_run_that_is_behind_is_ended(bench):
    folder, arguments = bench
    (folder / "hold").write_text("1")
    command = tuple(arguments[arguments.index("--") + 1 :])
    subject = SimpleNamespace(run=lambda *given: [*command, *_run(*given)])
    reported = []
    trial = SimpleNamespace(number=0, report=lambda *given: reported.append(given), should_prune=lambda: True)
    with SignalFlag() as signals:
        objective = OfRuns(subject, folder / "runs", 3, signals, "tokens/s", tokens_a_second)
        with pytest.raises(optuna.TrialPruned, match="ended after 1 of 3 steps"):
            objective.measure({MICRO: 8, SHARE: 0.6}, trial)
    assert reported == [(pytest.approx(4 * 2 * 30 / 0.5), 1)]


def _run(folder, steps, settings):
    own = [f"actor_rollout_ref.overlay.measure.output_dir={folder}", f"trainer.total_training_steps={steps}"]
    return [*own, *(f"{key}={value}" for key, value in settings.items())]


def test_a_dry_run_prints_the_space_and_the_first_command_and_makes_nothing(bench, capsys):
    folder, arguments = bench
    place = arguments.index("--")
    assert main([*arguments[:place], "--dry-run", *arguments[place:]]) == 0
    printed = capsys.readouterr().out
    assert (
        f"{MICRO}: [1, 2, 3, 4, 8]" in printed
        and shlex.quote(str(TRAINING)) in printed
        and not (folder / "out").exists()
    )


def test_a_rehearsal_gets_its_folder_and_settings_where_it_takes_them():
    subject = describe_rehearsal(["bash", "scripts/rehearse.sh", "--dies", "8"], ["data.train_batch_size=16"])
    assert subject.run(Path("/out/0003"), 4, {MICRO: 8}) == [
        "bash", "scripts/rehearse.sh", "--output", "/out/0003", "--dies", "8", "--", "data.train_batch_size=16",
        "trainer.total_training_steps=4", f"{MICRO}=8",
    ]  # fmt: skip
    assert "trainer.n_gpus_per_node=8" in subject.given and "data.train_batch_size=16" in subject.given


def test_seconds_on_paper_need_no_run(tmp_path, capsys):
    space = tmp_path / "space.yaml"
    recomputed = "actor_rollout_ref.model.gradient_checkpointing_kwargs.activations_checkpoint_num_layers"
    space.write_text(f"{recomputed}: [4, 8]\n")
    model = ROOT / "tests" / "post_training" / "plan" / "deepseek_v3_config.json"
    arguments = ["--config-name", "deepseek_v3_256die_true_weight", "--model", str(model), "--swap-optimizer"]
    assert main([*arguments, "--space", str(space), "--output", str(tmp_path / "out"), "--trials", "2"]) == 0
    assert f"- {recomputed}=4" in (tmp_path / "out" / "best.yaml").read_text()
    assert "modelled s" in capsys.readouterr().out


REHEARSAL = ["--", "bash", "scripts/rehearse.sh"]


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        ([], "--objective=seconds needs --model"),
        (["--config-name", "rehearsal", "--objective", "tokens"], "Pass a command after --"),
        (["--objective", "seconds", *REHEARSAL], "starts nothing. Remove the command"),
        (["--algorithm", *REHEARSAL], "Add --objective reward"),
        (["--objective", "reward", *REHEARSAL], "--objective reward needs --algorithm or --space"),
        (["--config-name", "rehearsal", *REHEARSAL], "a rehearsal has its own configuration"),
        (["--", "bash", "launcher.sh"], "--config-name is missing"),
        (["--config-name", "rehearsal", "--", "no-such-command"], "Command not found: no-such-command"),
        ([*REHEARSAL, "--output", "x"], "--output is in the command, but every trial gets its own"),
        (["--space", "absent.yaml", *REHEARSAL], "--space absent.yaml cannot be read"),
        (
            ["--config-name", "qwen2_5_0_5b_gsm8k", "--", "bash", "launcher.sh", "--emulate"],
            "--emulate is in the command",
        ),
        ([*REHEARSAL, "--", "data.no_such_key=1"], "data.no_such_key"),
        (["data.train_batch_size=7", *REHEARSAL], "7"),
        (["--trials", "0", *REHEARSAL], "--trials"),
    ],
)
def test_invalid_search_rejected_before_it_starts(arguments, sentence, capsys, tmp_path):
    given = arguments if "--output" in arguments else ["--output", str(tmp_path / "out"), *arguments]
    try:
        code = main(given)
    except SystemExit as ended:
        code = ended.code
    said = capsys.readouterr().err
    assert code == 2 and sentence in said and "Traceback" not in said
    assert not (tmp_path / "out").exists()


def test_a_key_of_the_space_that_does_not_exist_rejected(tmp_path, capsys):
    space = tmp_path / "space.yaml"
    space.write_text("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpus: [1, 2]\n")
    assert main(["--space", str(space), "--output", str(tmp_path / "out"), *REHEARSAL]) == 2
    assert "did you mean actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu?" in capsys.readouterr().err


@pytest.mark.exhaustive("rehearses twice, four dies and two steps each")
def test_a_rehearsal_is_searched_on_emulated_dies(tmp_path, capfd):
    """The checks reject two of the four settings, which never start; the others are measured once each."""
    space = tmp_path / "space.yaml"
    space.write_text(f"{MICRO}: [32, 64]\n{KEYS[0]}: [2, 3]\n")
    command = ["bash", str(ROOT / "scripts" / "rehearse.sh"), "--", "trainer.val_before_train=false"]
    options = ["--steps", "2", "--trials", "4", "--space", str(space), "--output", str(tmp_path / "out")]
    assert main([*options, "--", *command]) == 0, capfd.readouterr()
    found = {tuple(trial.user_attrs[SETTINGS]): trial for trial in trials(tmp_path) if outcome_of(trial) != REPEATED}
    measured = {settings for settings, trial in found.items() if outcome_of(trial) == MEASURED}
    assert measured == {(f"{MICRO}={size}", f"{KEYS[0]}=2") for size in (32, 64)}, capfd.readouterr()
    refused = [trial for trial in found.values() if outcome_of(trial) == REFUSED]
    assert len(refused) == 2 and all("4 dies do not divide" in trial.user_attrs[SENTENCE] for trial in refused)
    ran = sorted((tmp_path / "out" / "trials").glob("*/metrics.jsonl"))
    assert len(ran) == 2 and all(len(file.read_text().splitlines()) == 2 for file in ran)
    for settings in measured:
        folder = tmp_path / "out" / "trials" / f"{found[settings].number:04}"
        assert found[settings].value == tokens_a_second(folder) > 0
        assert settings[0] == f"{MICRO}={at(read_configuration(folder), MICRO)}"
    best = max(measured, key=lambda settings: found[settings].value)
    assert (tmp_path / "out" / "best.yaml").read_text().splitlines()[1:] == [f"- {each}" for each in best]
    assert "tokens/s" in capfd.readouterr().out
    assert main([*options, "--", *command]) == 0
    assert sorted((tmp_path / "out" / "trials").glob("*/metrics.jsonl")) == ran
