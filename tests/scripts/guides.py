"""Commands from guides to verl, verbatim, and an environment in which tests run them unedited."""

from __future__ import annotations

import json
import os
import shutil
import site
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
from omegaconf import DictConfig, OmegaConf

from rehearsal.plan import run_environment
from rehearsal.tiny_model.checkpoint import CheckpointRequest, make_checkpoint
from tests.scripts.cluster_files import ROOT

QUICK_START = r"""set -x
python3 -m verl.trainer.main_ppo \
algorithm.adv_estimator=grpo \
data.train_files=$HOME/data/gsm8k/train.parquet \
data.val_files=$HOME/data/gsm8k/test.parquet \
data.train_batch_size=128 \
data.max_prompt_length=512 \
data.max_response_length=128 \
data.filter_overlong_prompts=True \
data.truncation='error' \
actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct \
actor_rollout_ref.actor.optim.lr=5e-7 \
actor_rollout_ref.model.use_remove_padding=False \
actor_rollout_ref.actor.entropy_coeff=0.001 \
actor_rollout_ref.actor.ppo_mini_batch_size=64 \
actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=20 \
actor_rollout_ref.actor.use_kl_loss=True \
actor_rollout_ref.actor.kl_loss_coef=0.001 \
actor_rollout_ref.actor.kl_loss_type=low_var_kl \
actor_rollout_ref.model.enable_gradient_checkpointing=True \
actor_rollout_ref.actor.fsdp_config.param_offload=False \
actor_rollout_ref.actor.fsdp_config.optimizer_offload=False \
actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=40 \
actor_rollout_ref.rollout.enable_chunked_prefill=False \
actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
actor_rollout_ref.rollout.name=vllm \
actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
actor_rollout_ref.rollout.n=5 \
actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=40 \
actor_rollout_ref.ref.fsdp_config.param_offload=True \
algorithm.kl_ctrl.kl_coef=0.001 \
trainer.critic_warmup=0 \
trainer.logger=['console'] \
trainer.project_name='verl_grpo_example_gsm8k' \
trainer.experiment_name='qwen2_7b_function_rm' \
trainer.n_gpus_per_node=8 \
trainer.nnodes=1 \
trainer.save_freq=-1 \
trainer.test_freq=5 \
trainer.total_epochs=1 \
trainer.device=npu $@
"""
"""The quick start of verl on Ascend."""
QUICK_START_DATA = "python3 examples/data_preprocess/gsm8k.py --local_dir ~/data/gsm8k"
PRODUCTION = r"""python3 -m verl.trainer.main_ppo \
--config-path="examples/grpo" \
--config-name='qwen2_5_7b_math' \
algorithm.adv_estimator=grpo \
actor_rollout_ref.actor.use_dynamic_bsz=True \
actor_rollout_ref.model.use_remove_padding=True \
actor_rollout_ref.actor.ppo_max_token_len_per_gpu=3072 \
actor_rollout_ref.rollout.gpu_memory_utilization=0.8"""
"""The guide to verl in production, after its exports."""
PRODUCTION_DATA = "python3 examples/data_preprocess/math_dataset.py --local_dir ~/data/math"
# Passed by `$@` and the exports: two emulated dies, two steps of eight short prompts.
DIES, STEPS, BATCH = 2, 2, 8
SMALL = {
    "data.max_prompt_length": 64,
    "data.max_response_length": 16,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 4,
    "trainer.n_gpus_per_node": DIES,
}
MODELS = ("Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen2.5-7B-Instruct")
COMMIT = "c" * 40


class Environment:
    """A virtual environment with this one's packages, in which the patches can be enabled."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.elsewhere, self.home = folder / "env", folder / "elsewhere", folder / "home"
        for made in (self.elsewhere, self.home):
            made.mkdir()
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", self.folder], check=True)
        (self.site,) = self.folder.glob("lib/python*/site-packages")
        (shared,) = (each for each in site.getsitepackages() if each.endswith("site-packages"))
        (self.site / "shared.pth").write_text(f"import site; site.addsitedir({shared!r})\n")

    def run(
        self, *command: object, cwd: Path | None = None, timeout: int = 600, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command, by default in a folder that contains nothing of this project."""
        dropped = ("PYTHONPATH", "RAY_ADDRESS", "VIRTUAL_ENV", "PYTHONDONTWRITEBYTECODE")
        environment = {name: value for name, value in os.environ.items() if name not in dropped}
        own = {"PATH": f"{self.folder}/bin:{os.environ['PATH']}", "RAY_TMPDIR": str(self.elsewhere)}
        return subprocess.run(
            [str(word) for word in command], cwd=cwd or self.elsewhere, env=environment | own | variables,
            capture_output=True, text=True, timeout=timeout,
        )  # fmt: skip

    def fill_hub(self, folder: Path) -> None:
        """Put a tiny model and problems into the hub client's cache, under the names in the guides."""
        request = CheckpointRequest(
            ROOT / "data" / "arithmetic" / "train.jsonl", 0, "bfloat16", model_type="qwen2", warm_start=None
        )
        model = make_checkpoint(request, folder / "model", lambda step, loss: None).path
        for name in MODELS:
            shutil.copytree(model, self._snapshot("models", name))
        rows = [(f"{number}+1", number + 1) for number in range(BATCH * STEPS + 2)]
        gsm8k = [{"question": question, "answer": f"#### {answer}"} for question, answer in rows]
        of_math = [{"problem": question, "solution": f"\\boxed{{{answer}}}"} for question, answer in rows]
        for name, records in (("openai/gsm8k", gsm8k), ("DigitalLearningGmbH/MATH-lighteval", of_math)):
            data = self._snapshot("datasets", name) / "main"
            data.mkdir(parents=True)
            for split, chosen in (("train", records[2:]), ("test", records[:2])):
                pyarrow.parquet.write_table(pyarrow.Table.from_pylist(chosen), data / f"{split}-00000-of-00001.parquet")

    def _snapshot(self, kind: str, name: str) -> Path:
        repository = self.home / "hf" / "hub" / f"{kind}--{name.replace('/', '--')}"
        (repository / "refs").mkdir(parents=True)
        (repository / "refs" / "main").write_text(COMMIT)
        return repository / "snapshots" / COMMIT

    def follow(self, text: str, *more: str, cwd: Path | None = None, **variables: str) -> None:
        """Run a guide's command in bash as a user does, with `more` as `$@`, on emulated dies."""
        emulated = run_environment(()) | {"NPU_EMULATOR_DEVICES": str(DIES), "NPU_EMULATOR_CAPACITY_MB": "2048"}
        emulated |= {"HOME": str(self.home), "HF_HOME": str(self.home / "hf"), "HF_HUB_OFFLINE": "1"}
        ended = self.run("bash", "-c", text, "bash", *more, cwd=cwd, timeout=1500, **emulated, **variables)
        assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-4000:]


def run_of(folder: Path, project: str, experiment: str) -> tuple[DictConfig, list[dict[str, float]]]:
    """Return the configuration and the metrics by step of a run in `folder`; all of its patches must be effective."""
    run = folder / "checkpoints" / project / experiment
    report = json.loads((run / "overlay.json").read_text())
    assert report["applied"] and all(report["effective"].values()) and not report["problems"], report["problems"]
    entries = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    config = OmegaConf.load(run / "config.yaml")
    assert isinstance(config, DictConfig)
    return config, [entry["metrics"] for entry in entries if entry["step"]]
