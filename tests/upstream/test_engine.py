"""DeepSeek-V3 through MindSpeed and MindSpeed-LLM, started in a worker's way, equals transformers on the same weights.

Needs checkouts: ``bash scripts/test.sh tests/upstream --upstream FOLDER`` (see README.md here).
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import DeepseekV3Config

from tests.upstream import checkouts
from verl_patches.features.mindspeed.arguments import command_line, translate
from verl_patches.features.settings import OverlaySettings
from verl_patches.trainer.main_ppo import compose

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]  # the first test may have to wait for a compiler

ROOT = Path(__file__).resolve().parents[2]
TIME_LIMIT = 400  # seconds
TOLERANCE = 2e-5
NOTICEABLE = 1e-3
# name -> layout as in tests/megatron_patches, and whether MindSpeed's fused operators are used.
CASES = {
    "one die": ({}, True),
    "one die without fused operators": ({}, False),
    "TP2 x PP2, uneven, recomputed": ({"tensor": 2, "pipeline": 2, "stages": [2, 1], "recompute": True}, True),
    "TP2 x EP2": ({"tensor": 2, "expert": 2}, True),
}
PUBLISHED_MODEL = ROOT / "tests" / "post_training" / "plan" / "deepseek_v3_config.json"
VENDORS_SCRIPT = Path("MindSpeed-LLM", "examples", "mcore", "deepseek3", "pretrain_deepseek3_671b_4k_A3_ptd.sh")
# Pre-training has a schedule, balances experts and pads the layers to a multiple of its stages, in another layout.
PRE_TRAINING = {"num-layers", "moe-aux-loss-coeff", "lr", "train-iters"}
LAYOUT = {"tensor-model-parallel-size", "expert-model-parallel-size", "recompute-num-layers"}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    from tests.post_training.models.megatron.deepseek_v3_checkpoint import write_checkpoint_and_reference

    folder = tmp_path_factory.mktemp("deepseek_v3")
    write_checkpoint_and_reference(folder)
    return folder


@pytest.fixture(scope="module", params=CASES)
def measured(request, packages, model, tmp_path_factory) -> list[dict]:
    """Return the results of all ranks of a case."""
    layout, fused = CASES[request.param]
    asked = {"layout": {"name": request.param} | layout, "fused": fused}
    return run_ranks("engine_program", asked, packages, model, tmp_path_factory.mktemp("case") / "run")


def run_ranks(program: str, asked: dict, packages: Path, model: Path, folder: Path) -> list:
    """Run a program and return the results of its ranks."""
    layout = asked["layout"]
    ranks = layout.get("tensor", 1) * layout.get("pipeline", 1) * layout.get("expert", 1)
    shutil.copytree(model, folder)
    (folder / "request.json").write_text(json.dumps(asked))
    ended = subprocess.run(
        [sys.executable, "-m", "tests.ranks", f"tests.upstream.{program}", str(ranks), str(folder)],
        env=environment(packages), text=True, timeout=TIME_LIMIT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout[-6000:]
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]


def environment(packages: Path) -> dict[str, str]:
    return (
        os.environ
        | checkouts.environment(packages)
        | {
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
        }
    )


def options_of(words: list[str]) -> dict[str, list[str]]:
    """Return the values of each option, by its name without dashes."""
    found: dict[str, list[str]] = {}
    for word in words:
        if word.startswith("--"):
            values = found.setdefault(word.removeprefix("--"), [])
        elif found:
            values.append(word)
    return found


def as_numbers(values: list[str]) -> list[float | str]:
    return [float(value) if re.fullmatch(r"[0-9.e+-]+", value) else value for value in values]


def test_expert_biases_stay_float32(measured):
    """MindSpeed-LLM registers them in float32, and casting the whole model would round them."""
    kinds = [kind for rank in measured for kind in rank["biases"].values()]
    assert kinds and set(kinds) == {"torch.float32"}


def test_the_cluster_job_describes_the_model_as_the_vendors_script_does(upstream):
    script = upstream / VENDORS_SCRIPT
    assert script.is_file(), f"there is no {script}"
    text = script.read_text()
    variables = dict(re.findall(r"^(\w+)=(\S+)$", text, re.MULTILINE))
    arguments = " ".join(re.findall(r'_ARGS="\n(.*?)"', text, re.DOTALL)).replace("\\\n", " ")
    theirs = options_of(re.sub(r"\$\{(\w+)\}", lambda found: variables.get(found[1], "path"), arguments).split())
    node = compose("deepseek_v3_256die_true_weight", []).actor_rollout_ref
    model = DeepseekV3Config.from_dict(json.loads(PUBLISHED_MODEL.read_text()) | {"num_nextn_predict_layers": 0})
    ours = options_of(command_line(translate(node, model, OverlaySettings.from_config(node))))
    compared = ours.keys() & theirs.keys()
    different = {name for name in compared if as_numbers(ours[name]) != as_numbers(theirs[name])}
    print(f"{len(compared)} options are in both: {sorted(compared)}")
    assert len(compared) > 70 and different <= PRE_TRAINING | LAYOUT


def test_logits_and_gradients_are_those_of_transformers(measured):
    from tests.post_training.models.megatron.deepseek_v3_checkpoint import build_model

    logits = [rank["layout"]["logits"] for rank in measured if rank["layout"]["logits"] is not None]
    seen: dict[str, float] = {}
    for rank in measured:
        for name, error in rank["layout"]["gradients"].items():
            seen[name] = max(error, seen.get(name, 0.0))
    print(f"largest error of logits {max(logits):.1e}, of gradients {max(seen.values()):.1e}")
    assert logits and max(logits) < TOLERANCE
    assert set(seen) == {name for name, _ in build_model().named_parameters()}
    assert max(seen.values()) < TOLERANCE


def test_deferred_logits_give_what_mindspeed_gives(measured):
    """Log-probs, entropy and all gradients agree, although MindSpeed replaces Megatron's cross entropy and layers."""
    seen: dict[str, float] = {}
    for rank in measured:
        for name, distance in rank["deferred"]["distances"].items():
            seen[name] = max(distance, seen.get(name, 0.0))
    values = [seen.pop(name) for name in ("log_probs", "entropy")]
    whole, deferred = zip(*(rank["deferred"]["returned"] for rank in measured), strict=True)
    print(f"largest distance of values {max(values):.1e}, of gradients {max(seen.values()):.1e}")
    assert max(values) < 1e-6 and max(seen.values()) < 2e-6
    assert max(whole) > 0 == max(deferred), "the output layer returns logits without the feature alone"


def test_mindspeeds_optimizer_takes_the_step_of_adam(measured):
    for rank in measured:
        assert rank["adam"].startswith("mindspeed.")
        assert rank["step"]["norm"] == pytest.approx(rank["step"]["expected norm"], rel=1e-5)
        assert max(rank["step"]["weights"].values()) < TOLERANCE


def test_wrong_micro_batch_detected(measured):
    for fault in {fault for rank in measured for fault in rank["faults"]}:
        worst = max(rank["faults"][fault] for rank in measured)
        print(f"{fault}: {worst:.1e}")
        assert worst < TOLERANCE if fault == "nothing" else worst > NOTICEABLE
    assert all(rank["faults"] for rank in measured)


def test_both_mindspeeds_changes_and_ours_are_in_use(measured):
    for rank in measured:
        assert "megatron.core.optimizer:Adam" in rank["rebound"] and rank["left"] == []
        assert rank["compiler is torch's"]
        report = rank["report"]
        assert report["problems"] == [] and all(report["effective"].values())
        assert "megatron.core.parallel_state:initialize_model_parallel" in report["applied"]


@pytest.mark.parametrize("forced", [True, False])
def test_experts_are_dealt_out_in_turn_where_the_key_says_so(forced, packages, model, tmp_path):
    """Each rank deals its own tokens out by the overlay's rule, so experts differ by at most one token."""
    asked = {"layout": {"name": "TP2", "tensor": 2}, "forced": forced}
    calls = [call for rank in run_ranks("balance_program", asked, packages, model, tmp_path / "run") for call in rank]
    spread = max(max(call["shares"]) - min(call["shares"]) for call in calls)
    print(f"{len(calls)} calls of routers, shares of experts differ by {spread} at most")
    assert all(call["dealt"] is forced for call in calls) and (spread <= 1) is forced and len(calls) >= 2


STARTS = {
    "MindSpeed": "import mindspeed_llm.tasks.megatron_adaptor",
    "the overlay": """
import sys
from pathlib import Path
from tests.upstream.engine_program import Layout, start_engine
start_engine(Path(sys.argv[1]), Layout("one die"), True)
assert "mindspeed_llm.tasks.megatron_adaptor" in sys.modules
""",
}


@pytest.mark.parametrize("who", STARTS)
def test_a_rank_that_starts_while_another_compiles_leaves_the_kernels(who, packages, model, tmp_path):
    """The control is MindSpeed's own start, which removes everybody's kernels."""
    (tmp_path / "matmul").mkdir()
    (tmp_path / "matmul" / "matmul.so").touch()
    with (tmp_path / "matmul" / "lock").open("x"):
        ended = subprocess.run(
            [sys.executable, "-c", STARTS[who], str(model / "checkpoint")], text=True, timeout=TIME_LIMIT, cwd=ROOT,
            env=environment(packages) | {"TORCH_EXTENSIONS_DIR": str(tmp_path)}, capture_output=True,
        )  # fmt: skip
    assert (tmp_path / "matmul" / "matmul.so").exists() == (who == "the overlay")
    assert ended.returncode == 0 or who == "MindSpeed", ended.stderr[-4000:]
