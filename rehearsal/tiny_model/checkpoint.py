"""Writing the tiny model as a HuggingFace checkpoint, once: an existing one with the same inputs is kept."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import safetensors.torch
import tokenizers
import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel, Qwen2_5_VLProcessor

from post_training.data import INSTRUCTION, read_problems
from post_training.layouts.published_names import published_name
from rehearsal import image_task
from rehearsal.tiny_model import image_warm_start, tool_warm_start, warm_start
from rehearsal.tiny_model.architecture import DEFAULT_MODEL_TYPE, TINY_MODELS, reads_images, tiny_config
from rehearsal.tiny_model.processor import build_processor
from rehearsal.tiny_model.task import Exercise
from rehearsal.tiny_model.tokenizer import END, PUBLISHED_ENDS, build_tokenizer, build_tool_tokenizer

MARKER = "tiny_model.json"
# Scores of random weights hardly differ. With biases as close as those of trained weights, of 2,000 choices one or two
# would be ties even in float32, which rollout and training may decide differently.
_TRAINED_SPREAD, _RANDOM_SPREAD = 12, 128
_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class CheckpointRequest:
    """The inputs that determine a checkpoint: training problems, seed, dtype of the files, warm start and family.

    `warm_start` None leaves the weights at their random initial values (the norms and biases drawn as well, so that
    a path that forgets one of them shows). `model_type` is a key of `TINY_MODELS`; `changes` are other values for its
    configuration, as pairs of key and value. A model that reads images is shown those of `image_task`, not `data`.
    With `published_end` the end token has the name that published tokenizers of the family give it. `calls_tool` gives
    it that name too, and the model calls the calculator (`tool_warm_start`).
    """

    data: Path
    seed: int
    dtype: str = "bfloat16"
    warm_start: warm_start.WarmStart | None = warm_start.WarmStart()
    model_type: str = DEFAULT_MODEL_TYPE
    changes: tuple[tuple[str, int], ...] = ()
    published_end: bool = False
    calls_tool: bool = False

    def fingerprint(self) -> str:
        """Return a hash of everything the weights depend on: settings, data, this package's sources, the libraries."""
        digest = hashlib.sha256()
        settings = asdict(self.warm_start) if self.warm_start else None
        versions = [torch.__version__, transformers.__version__, tokenizers.__version__]
        drawn = [settings, self.seed, self.dtype, self.model_type, self.changes, versions, INSTRUCTION]
        drawn += [self.published_end] if self.published_end else []
        drawn += ["calls_tool"] if self.calls_tool else []
        digest.update(json.dumps(drawn).encode())
        sources = [*sorted(Path(__file__).parent.glob("*.py")), Path(image_task.__file__), self.data]
        for path in sources:
            digest.update(hashlib.sha256(path.read_bytes()).digest())
        return digest.hexdigest()


@dataclass(frozen=True)
class CheckpointResult:
    """A checkpoint's path, whether it existed already, and the expected reward of its policy (None if random)."""

    path: Path
    reused: bool
    expected_reward: float | None


def make_checkpoint(
    request: CheckpointRequest, output: Path, progress: Callable[[int, float], None]
) -> CheckpointResult:
    """Write the checkpoint to the folder `output`, or keep the one there if it has the same fingerprint.

    The files are written to a folder beside it, the marker last, and renamed into place, so that `output` never holds
    a half-written checkpoint.

    Raises:
        DataError: if the data file cannot be read as problems.
        FileExistsError: if `output` exists and is no checkpoint of this package.
        ValueError: if a problem is no exercise of `task`.
        KeyError: if the dtype is none of `DTYPES`, the family none of `TINY_MODELS`, or none that calls tools.
    """
    exercises = [Exercise.parse(problem.question) for problem in read_problems(request.data).problems]
    fingerprint = request.fingerprint()
    reused = _matching(output, fingerprint)
    if reused:
        return reused
    if output.exists() and not (output / MARKER).exists():
        raise FileExistsError(f"{output} exists but has no {MARKER}. Choose another folder or remove it")
    processor = _processor_of(request)
    tokenizer = getattr(processor, "tokenizer", processor)
    model = _initial_model(request, tokenizer)
    reward = None
    if not request.warm_start:
        _draw_constants(model, request.seed)
    elif isinstance(processor, Qwen2_5_VLProcessor):
        own = image_warm_start.IMAGE_WARM_START
        settings = own if request.warm_start == warm_start.WarmStart() else request.warm_start
        reward = image_warm_start.train(model, processor, settings, request.seed, progress)
    elif request.calls_tool:
        own = tool_warm_start.TOOL_WARM_START
        settings = own if request.warm_start == warm_start.WarmStart() else request.warm_start
        reward = tool_warm_start.train(model, tokenizer, exercises, settings, request.seed, progress)
    else:
        reward = warm_start.train(model, tokenizer, exercises, request.warm_start, request.seed, progress)
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{output.name}.", dir=output.parent) as scratch:
        written = Path(scratch) / "checkpoint"
        processor.save_pretrained(written)
        _write_model(model, DTYPES[request.dtype], written)
        (written / MARKER).write_text(json.dumps({"fingerprint": fingerprint, "expected_reward": reward}, indent=1))
        # Another run may have made it meanwhile, and may be reading it.
        return _matching(output, fingerprint) or _put_in_place(written, output, CheckpointResult(output, False, reward))


def _processor_of(request: CheckpointRequest) -> transformers.PreTrainedTokenizerFast | Qwen2_5_VLProcessor:
    if request.calls_tool:
        return build_tool_tokenizer(request.model_type)
    end = PUBLISHED_ENDS[request.model_type] if request.published_end else END
    if reads_images(request.model_type):
        return build_processor(end)
    return build_tokenizer(end)


def _put_in_place(written: Path, output: Path, result: CheckpointResult) -> CheckpointResult:
    """Rename a folder to `output`; what is there goes into the scratch folder of `written`, which is removed."""
    if output.exists():
        output.rename(written.with_name("replaced"))
    written.rename(output)
    return result


def _matching(output: Path, fingerprint: str) -> CheckpointResult | None:
    """Return the checkpoint at `output` if its marker has this fingerprint."""
    marker = output / MARKER
    if not marker.is_file():
        return None
    content = json.loads(marker.read_text())
    if content["fingerprint"] != fingerprint:
        return None
    return CheckpointResult(output, reused=True, expected_reward=content["expected_reward"])


def _initial_model(request: CheckpointRequest, tokenizer: transformers.PreTrainedTokenizerFast) -> PreTrainedModel:
    """Return the model in float32 with seeded weights. Biases of routers stay as drawn."""
    torch.manual_seed(request.seed)
    tokens = (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id)
    config = tiny_config(*tokens, request.model_type, **dict(request.changes))
    kind = AutoModelForImageTextToText if reads_images(request.model_type) else AutoModelForCausalLM
    model = kind.from_config(config)
    for name, bias in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            bias.copy_(_router_bias(bias.shape, _TRAINED_SPREAD if request.warm_start else _RANDOM_SPREAD))
    for name, weight in model.named_parameters():
        # Adam moves every weight by the same amount, so a layer's outputs move in proportion to the number of its
        # inputs: a latent of published width is scaled down until updates move keys and values as in the tiny model.
        if name.endswith("kv_a_layernorm.weight"):
            torch.nn.init.constant_(weight, TINY_MODELS[request.model_type]["kv_lora_rank"] / weight.numel())
        # A patch has 1,176 values, and a tower as shallow as this one learns nothing from outputs near zero.
        if ".visual." in name and weight.dim() > 1:
            torch.nn.init.normal_(weight, std=weight[0].numel() ** -0.5)
    return model


def _router_bias(shape: torch.Size, spread: int) -> torch.Tensor:
    """Draw a router's correction bias near 5, as DeepSeek-V3 publishes it: few values are ones that bfloat16 holds.

    Only differences between biases decide which experts are chosen, and bfloat16 rounds these away: its neighbouring
    numbers near 5 are 1/32 apart. The biases lie within `spread` / 256 of 5.
    """
    return 5 + torch.randint(-spread, spread + 1, shape) / 256 + torch.rand(shape) / 1024


def _draw_constants(model: PreTrainedModel, seed: int) -> None:
    """Draw the parameters that are initialised with ones and zeros."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if name.endswith(("norm.weight", "norm1.weight", "norm2.weight", "ln_q.weight")):
            parameter.data.uniform_(0.5, 1.5, generator=generator)
        elif name.endswith("bias"):
            parameter.data.uniform_(-0.5, 0.5, generator=generator)


def _write_model(model: PreTrainedModel, dtype: torch.dtype, folder: Path) -> None:
    """Write configuration and weights.

    Biases of routers stay float32, as in DeepSeek's own checkpoints. Tied weights are stored once. Names and
    config.json are those of published files, which transformers converts as it reads.
    """
    tied = model._tied_weights_keys if model.config.tie_word_embeddings else ()
    state = {
        published_name(name): tensor.detach()
        .to(torch.float32 if name.endswith("e_score_correction_bias") else dtype)
        .contiguous()
        for stored, stacked in model.state_dict().items()
        for name, tensor in _single_experts(stored, stacked)
        if stored not in tied
    }
    model.config.torch_dtype = dtype
    model.config.save_pretrained(folder)
    _publish_config(folder / "config.json", model.config.model_type)
    model.generation_config.save_pretrained(folder)
    weights = folder / "model.safetensors"
    safetensors.torch.save_file(state, weights, metadata={"format": "pt"})
    weights.chmod(0o644)  # safetensors keeps it from other users, who may share this checkout


def _single_experts(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of single experts, where transformers 5 holds a layer's in one tensor; others as given."""
    layer, found, kind = name.partition(".experts.")
    if not found or kind not in ("gate_up_proj", "down_proj"):
        yield name, tensor
        return
    for index, expert in enumerate(tensor):
        parts = (
            zip(("gate_proj", "up_proj"), expert.chunk(2), strict=True) if kind == "gate_up_proj" else [(kind, expert)]
        )
        for projection, weight in parts:
            yield f"{layer}.experts.{index}.{projection}.weight", weight


def _publish_config(path: Path, model_type: str) -> None:
    """Give a config.json the keys of published files, where the library that wrote it has others."""
    described = json.loads(path.read_text())
    values = TINY_MODELS[model_type]
    if "vision_config" in values:
        # transformers 5 has the decoder's values there alone.
        nested = described.pop("text_config")
        described |= {name: nested[name] for name in (*values, *_TOKENS) if name in nested and name not in described}
        described |= {name: values[name] for name in ("rope_theta", "rope_scaling")}
    elif "rope_parameters" in described:  # of transformers 5
        del described["rope_parameters"]
        described |= {name: values[name] for name in ("rope_theta", "rope_scaling") if name in values}
    else:
        return
    path.write_text(json.dumps(described, indent=2, sort_keys=True) + "\n")
