"""MindSpeed-LLM trains a tiny DeepSeek-V3 on emulated dies with the same loss in every layout and in transformers.

Needs checkouts: ``bash scripts/test.sh tests/upstream --upstream FOLDER`` (see README.md here). The weights of every
layout come from one HuggingFace folder through MindSpeed-LLM's own converter.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.upstream import checkouts, tiny_deepseek
from tests.upstream.mindspeed_llm import Layout, Workplace, convert

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]  # the first test may have to wait for a compiler

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = Layout()
CLUSTER_ARGUMENTS = (
    "--gemm-gradient-accumulation-fusion", "--mla-fa-without-pad",
    "--recompute-granularity", "full", "--recompute-method", "block", "--recompute-num-layers", "1",
)  # fmt: skip
LAYOUTS = {
    "TP2 with sequence parallelism": Layout(tensor=2),
    "PP2": Layout(pipeline=2),
    "EP2": Layout(expert=2),
    "TP2 x EP2 with moe_tp_extend_ep": Layout(tensor=2, expert=2, experts_over_tensor_ranks=True),
    "TP2 x PP2 x EP2 as on the cluster": Layout(
        tensor=2, pipeline=2, expert=2, experts_over_tensor_ranks=True, extra=CLUSTER_ARGUMENTS
    ),
}
# Losses are logged with six decimals; another order of sums changes the last one.
SMALL = 5e-6
# Operators by CANN's names, without version numbers.
REACHED = {
    "GroupedMatmulInplaceAddOperation", "LinearOperation", "aclnnApplyAdamW", "aclnnFlashAttentionScore",
    "aclnnFlashAttentionScoreGrad", "aclnnGroupedMatmul", "aclnnMoeTokenPermute", "aclnnMoeTokenPermuteGrad",
    "aclnnMoeTokenUnpermute", "aclnnMoeTokenUnpermuteGrad", "aclnnRmsNorm", "aclnnRmsNormGrad",
    "aclnnRotaryPositionEmbedding", "aclnnRotaryPositionEmbeddingGrad", "aclnnSwiGlu", "aclnnSwiGluGrad",
}  # fmt: skip

# Kernels that a run uses only on request, with arguments that do not change the result.
RING = ("--context-parallel-algo", "megatron_cp_algo")
SWITCHED_ON = {
    "ring attention": (Layout(context=2, extra=RING), {"aclnnFlashAttentionScore", "aclnnFlashAttentionScoreGrad"}),
    "ring attention merged by a kernel": (
        Layout(context=2, extra=(*RING, "--use-fused-ring-attention-update")), {"aclnnRingAttentionUpdate"},
    ),
    "attention with heads exchanged for positions": (
        Layout(context=2, extra=("--context-parallel-algo", "ulysses_cp_algo")), {"aclnnFlashAttentionScore"},
    ),
}  # fmt: skip

Train = Callable[..., list[float]]


def state_of(folder: Path) -> dict[Path, tuple[int, int]]:
    """Return size and time of every file of the checkouts' packages."""
    roots = [folder / checkout for checkout in checkouts.PACKAGES]
    files = (path for root in roots for path in root.rglob("*") if path.is_file())
    return {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in files}


@pytest.fixture(scope="module")
def workplace(upstream, packages, tmp_path_factory) -> Workplace:
    own = tmp_path_factory.mktemp("mindspeed_llm")
    tiny_deepseek.write_model(own / "model")
    tiny_deepseek.write_tokens(own / "tokens")
    return Workplace(upstream, packages, own / "model", own / "tokens")


@pytest.fixture(scope="module")
def weights(workplace, tmp_path_factory) -> Callable[[Layout], Path]:
    """Return a function that gives a layout's converted weights, converting each layout once."""
    made = {}

    def converted(layout: Layout) -> Path:
        if layout not in made:
            made[layout] = tmp_path_factory.mktemp("weights")
            convert(workplace.checkouts, workplace.model, made[layout], layout)
        return made[layout]

    return converted


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def train(workplace, weights, runs) -> Train:
    """Return a function that gives a layout's losses in a dtype, computing each once."""
    done = {}

    def losses(layout: Layout, dtype: str) -> list[float]:
        if (layout, dtype) not in done:
            run = runs / f"{len(done)} in {dtype}"
            done[layout, dtype] = workplace.train(run, layout, weights(layout), dtype)
            print(f"{dtype} {layout}: {done[layout, dtype]}")
        return done[layout, dtype]

    return losses


@pytest.fixture(scope="module")
def noise(workplace, weights, train, runs, tmp_path_factory) -> float:
    """Return how far bfloat16 takes the losses of one die from those in float32.

    A single different rounding can send a token to another expert, so one run is not enough. This is the largest
    difference of three runs, two of them with weights that differ by at most one unit of bfloat16.
    """
    found = [train(REFERENCE, "bfloat16")]
    for seed in range(2):
        moved = shutil.copytree(weights(REFERENCE), tmp_path_factory.mktemp("moved") / "weights")
        (file,) = moved.rglob("model_optim_rng.pt")
        move_by_a_rounding(file, seed)
        found.append(workplace.train(runs / f"moved {seed}", REFERENCE, moved, "bfloat16"))
    differences = [largest_difference(losses, train(REFERENCE, "float32")) for losses in found]
    print(f"noise of bfloat16: {differences}")
    return max(differences)


def move_by_a_rounding(file: Path, seed: int) -> None:
    """Change every weight of a checkpoint by up to one unit of bfloat16."""
    saved = torch.load(file, weights_only=False)  # MindSpeed-LLM's converter writes a defaultdict
    generator = torch.Generator().manual_seed(seed)
    for weight in saved["model"].values():
        weight.mul_(1 + (2 * torch.rand(weight.shape, generator=generator) - 1) / 256)
    torch.save(saved, file)


def largest_difference(losses: list[float], others: list[float]) -> float:
    return max(abs(one - other) for one, other in zip(losses, others, strict=True))


def test_the_reference_has_the_loss_of_transformers(workplace, train, runs):
    from transformers import AutoModelForCausalLM

    first = train(REFERENCE, "float32")[0]
    (recorded,) = runs.glob("* in float32/batches.pt")
    batches = torch.load(recorded, weights_only=True)[: tiny_deepseek.GLOBAL_BATCH]
    tokens, labels = (torch.cat([batch[name] for batch in batches]) for name in ("tokens", "labels"))
    model = AutoModelForCausalLM.from_pretrained(workplace.model, torch_dtype=torch.float32).eval()
    assert abs(first - tiny_deepseek.loss_of_transformers(model, tokens, labels)) < SMALL
    assert abs(first - tiny_deepseek.loss_of_transformers(model, tokens, labels.roll(1))) > 1000 * SMALL


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_has_the_losses_of_the_reference(train, name):
    assert largest_difference(train(LAYOUTS[name], "float32"), train(REFERENCE, "float32")) < SMALL


@pytest.mark.parametrize("name", LAYOUTS)
def test_in_bfloat16_every_layout_is_as_near_to_float32_as_the_reference(train, noise, name):
    assert largest_difference(train(LAYOUTS[name], "bfloat16"), train(REFERENCE, "float32")) < 2 * noise


@pytest.mark.parametrize("name", SWITCHED_ON)
def test_kernels_that_are_switched_on_have_the_losses_of_the_reference(workplace, weights, train, runs, name):
    layout, kernels = SWITCHED_ON[name]
    run = runs / name
    losses = workplace.train(run, layout, weights(Layout(tensor=layout.tensor)), "float32")
    assert largest_difference(losses, train(REFERENCE, "float32")) < SMALL
    assert kernels <= operators_called(run)


def operators_called(run: Path) -> set[str]:
    """Return the operators that any process of a run called, without the version number at the end of some names."""
    found = [json.loads(file.read_text())["operators"] for file in (run / "meters").glob("*.json")]
    assert found, f"no process has left meters in {run}"
    names = {operator for operators in found for operator, numbers in operators.items() if numbers["calls"]}
    return {re.sub(r"V\d+$", "", name) for name in names}


def test_the_optimizer_that_lives_on_the_host_makes_the_same_steps(workplace, weights, train, runs):
    layout = LAYOUTS["TP2 x EP2 with moe_tp_extend_ep"]
    swapped = Layout(tensor=2, expert=2, experts_over_tensor_ranks=True, extra=("--swap-optimizer",))
    losses = workplace.train(runs / "swapped", swapped, weights(layout), "bfloat16")
    # Another kernel, whose sums differ in the last float32 bit, so that a few weights are rounded differently.
    assert largest_difference(losses, train(layout, "bfloat16")) < 20 * SMALL


def converted_here(workplace: Workplace, target: Path, layout: Layout, *options: str) -> Path:
    """Write the weights for a layout with scripts/convert_ckpt_deepseek3.py, and return their folder."""
    sizes = {"tensor": layout.tensor, "pipeline": layout.pipeline, "expert": layout.expert}
    given = [part for name, size in sizes.items() for part in (f"--target-{name}-parallel-size", str(size))]
    given += ["--moe-tp-extend-ep"] if layout.experts_over_tensor_ranks else []
    command = [sys.executable, "scripts/convert_ckpt_deepseek3.py", "--moe-grouped-gemm", *given, *options]
    command += ["--load-dir", str(workplace.model), "--save-dir", str(target)]
    subprocess.run(command, cwd=ROOT, check=True, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True)
    return target


def shards(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Return the tensors of every shard, by shard and tensor name."""
    files = folder.glob("iter_0000001/*/model_optim_rng.pt")
    saved = {file.parent.name: torch.load(file, weights_only=False)["model"] for file in files}
    return {
        shard: {name: value for name, value in model.items() if isinstance(value, torch.Tensor)}
        for shard, model in saved.items()
    }


def differing(found: dict[str, dict[str, torch.Tensor]], expected: dict[str, dict[str, torch.Tensor]]) -> list[str]:
    """Return the shards and tensors that only one side has, or whose shapes, dtypes or bits differ."""
    names = {(shard, name) for each in (found, expected) for shard, model in each.items() for name in model}
    pairs = {(at, name): (found.get(at, {}).get(name), expected.get(at, {}).get(name)) for at, name in names}
    return [
        f"{shard} {name}"
        for (shard, name), (one, other) in sorted(pairs.items())
        if one is None or other is None or one.dtype != other.dtype or not torch.equal(one, other)
    ]


def test_our_converter_writes_the_bits_of_theirs(workplace, weights, tmp_path):
    layout = LAYOUTS["TP2 x PP2 x EP2 as on the cluster"]
    expected = shards(weights(layout))
    assert len(expected) == 8 and not differing(shards(converted_here(workplace, tmp_path / "ours", layout)), expected)
    unextended = converted_here(workplace, tmp_path / "other", replace(layout, experts_over_tensor_ranks=False))
    assert differing(shards(unextended), expected)


def test_mindspeed_llm_loads_our_shards_for_uneven_stages(workplace, train, runs, tmp_path):
    """Its own loader is strict: a different name or shape ends the run, and a wrong bit changes the loss."""
    layout = LAYOUTS["TP2 x PP2 x EP2 as on the cluster"]
    uneven = ("--num-layer-list", "3,1")
    ours = converted_here(workplace, tmp_path / "uneven", layout, *uneven)
    run = runs / "our shards"
    losses = workplace.train(run, replace(layout, extra=(*layout.extra, *uneven)), ours, "float32")
    print(f"losses from our shards for stages of 3 and 1 layers: {losses}")
    assert largest_difference(losses, train(REFERENCE, "float32")) < SMALL


def test_experts_on_the_wrong_ranks_show(workplace, weights, train, noise, runs, tmp_path):
    layout = LAYOUTS["EP2"]
    wrong = shutil.copytree(weights(layout), tmp_path / "wrong")
    first, second = sorted((wrong / "iter_0000001").iterdir())
    first.rename(wrong / "first")
    second.rename(first)
    (wrong / "first").rename(second)
    losses = workplace.train(runs / "wrong experts", layout, wrong, "float32")
    print(f"experts on the wrong ranks: {losses}")
    expected = train(layout, "float32")
    assert abs(losses[0] - expected[0]) > 1000 * SMALL
    assert largest_difference(losses, expected) > 2 * noise


def test_gradients_that_are_not_synchronised_show_after_the_first_step(workplace, weights, train, runs):
    layout = LAYOUTS["EP2"]
    losses = workplace.train(
        runs / "without synchronisation", layout, weights(layout), "float32", "gradient synchronisation"
    )
    expected = train(layout, "float32")
    print(f"without synchronisation of gradients: {losses}")
    assert abs(losses[0] - expected[0]) < SMALL
    assert largest_difference(losses[1:], expected[1:]) > 1000 * SMALL


def test_the_runs_reach_the_operators_of_training(runs):
    """This test comes last, because it reads the meters of all runs."""
    called = set().union(*map(operators_called, runs.iterdir()))
    print("\n".join(sorted(called)))
    assert called >= REACHED


def test_the_checkouts_are_as_they_were(upstream, train, state_before):
    train(REFERENCE, "float32")
    assert state_of(upstream) == state_before


@pytest.fixture(scope="module", autouse=True)
def state_before(upstream) -> dict[Path, tuple[int, int]]:
    return state_of(upstream)
