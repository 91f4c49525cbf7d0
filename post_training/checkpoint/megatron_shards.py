"""Writes and reads Megatron's folders of shards: `iter_*/mp_rank_TT_PPP_EEE/model_optim_rng.pt`.

Also reads the checkpoints that verl's Megatron workers save (`model/mp_rank_*/model.pt`, a list of state dicts).
"""

from collections import defaultdict
from pathlib import Path
from typing import Any

from post_training.checkpoint.files import CheckpointError
from post_training.checkpoint.manifest import MANIFEST_NAME, Manifest
from post_training.checkpoint.megatron_form import MegatronForm, all_shapes, local_shapes, mtp_aliases, rank_shards
from post_training.checkpoint.outputs import ArchiveFile
from post_training.checkpoint.records import Record
from post_training.checkpoint.regions import Region, StoredTensor
from post_training.checkpoint.source import Fragment, HFTensor, Source
from post_training.checkpoint.torch_archive import read_archive
from post_training.layouts.layout import PADDING, Shard, TrainPlacement
from post_training.models.deepseek_v3 import DeepseekV3Shape

TRACKER_NAME = "latest_checkpointed_iteration.txt"
ITERATION = 1
SHARD_NAME = "model_optim_rng.pt"
VERL_SHARD_NAME = "model.pt"
CHECKPOINT_VERSION = 3.0
"""Version of Megatron's state dicts since its QKV order changed; a loader would reorder weights of lower versions."""


def rank_folder(placement: TrainPlacement, rank: int) -> str:
    """Return the folder name of a rank, as in Megatron's get_checkpoint_name."""
    name = f"mp_rank_{placement.tp_rank(rank):02d}"
    if placement.pp > 1:
        name += f"_{placement.pp_rank(rank):03d}"
    if placement.ep > 1:
        name += f"_{placement.ep_rank(rank):03d}"
    return name


def shard_files(shape: DeepseekV3Shape, form: MegatronForm, source: Source) -> list[ArchiveFile]:
    """Return a file for each rank. Raises ValueError if the layout does not fit the model, or types are mixed."""
    return [_shard_file(shape, form, rank, source) for rank in range(form.placement.world_size)]


def _shard_file(shape: DeepseekV3Shape, form: MegatronForm, rank: int, source: Source) -> ArchiveFile:
    content: dict[str, Any] = {"checkpoint_version": CHECKPOINT_VERSION, "iteration": ITERATION}
    for chunk, shards in enumerate(_by_chunk(rank_shards(shape, form, rank), form.placement)):
        key = f"model{chunk}" if form.placement.virtual_stages > 1 else "model"
        content[key] = _records(shards, source)
    return ArchiveFile(f"iter_{ITERATION:07d}/{rank_folder(form.placement, rank)}/{SHARD_NAME}", content)


def _by_chunk(shards: list[Shard], placement: TrainPlacement) -> list[dict[str, list[Shard]]]:
    """Group shards by their tensor's name, for every model chunk of the rank."""
    chunks: list[dict[str, list[Shard]]] = [defaultdict(list) for _ in range(placement.virtual_stages)]
    for shard in shards:
        for chunk in range(placement.virtual_stages):
            prefix = placement.chunk_prefix(chunk)
            if shard.local.startswith(prefix):
                chunks[chunk][shard.local.removeprefix(prefix)].append(shard)
    return chunks


def _records(shards: dict[str, list[Shard]], source: Source) -> dict[str, Record]:
    records = {}
    for name, parts in shards.items():
        dtypes = {source.dtype(shard.hf_name) for shard in parts if shard.hf_name != PADDING}
        if len(dtypes) != 1:
            raise ValueError(f"{name}: its parts have the types {sorted(map(str, dtypes))}, but must have one")
        records[name] = Record(name, dtypes.pop(), local_shapes(parts)[parts[0].local], tuple(parts))
    return records


def recorded_form(root: Path) -> tuple[MegatronForm, dict[str, Any]] | None:
    """Return form and HuggingFace configuration of shards that these tools wrote, None for other shards.

    Raises:
        CheckpointError: the conversion that writes them has not finished.
    """
    manifest = Manifest.read(root)
    if manifest is None:
        return None
    if not manifest.complete or "form" not in manifest.arguments:
        raise CheckpointError(f"{root / MANIFEST_NAME}: does not describe a complete conversion to Megatron shards")
    return MegatronForm.from_arguments(manifest.arguments["form"]), manifest.arguments["config"]


def open_megatron(root: Path, shape: DeepseekV3Shape, form: MegatronForm) -> Source:
    """Open the shards as a source of HF tensors.

    Raises:
        CheckpointError: a shard or a tensor is missing, unexpected, damaged, or not of the form's shape.
    """
    fragments: dict[str, list[Fragment]] = defaultdict(list)
    for rank in range(form.placement.world_size):
        file = shard_path(root, form.placement, rank)
        models = read_models(file, form.placement.virtual_stages)
        for chunk, shards in enumerate(_by_chunk(rank_shards(shape, form, rank), form.placement)):
            for name, parts in shards.items():
                _add_fragments(fragments, file, name, _expected(file, name, models[chunk], parts), parts)
            _reject_unexpected(file, models[chunk], shards)
    shapes = all_shapes(shape, form.mtp_layers)
    aliases = mtp_aliases(shape) if form.mtp_layers else {}
    stored = {name: dims for name, dims in shapes.items() if name not in aliases or name in fragments}
    return Source(
        str(root),
        [HFTensor(name, dims, fragments[name]) for name, dims in stored.items()],
        {alias: name for alias, name in aliases.items() if alias not in stored},
    )


def shard_path(root: Path, placement: TrainPlacement, rank: int) -> Path:
    """Return the file of a rank in Megatron's or in verl's folder. Raises CheckpointError if it is missing."""
    folder = rank_folder(placement, rank)
    tracker = root / TRACKER_NAME
    if tracker.is_file():
        text = tracker.read_text().strip()
        iteration = text if text == "release" else f"iter_{int(text):07d}" if text.isdecimal() else None
        if iteration is None:
            raise CheckpointError(f"{tracker}: {text!r} is not an iteration")
        candidates = [root / iteration / folder / SHARD_NAME]
    else:
        candidates = [root / "model" / folder / VERL_SHARD_NAME, root / folder / VERL_SHARD_NAME]
        candidates.append(root / folder / SHARD_NAME)
    for path in candidates:
        if path.is_file():
            return path
    raise CheckpointError(
        f"{candidates[0]}: missing. Is {root} a complete checkpoint of this layout? ({TRACKER_NAME} is written when a "
        "conversion ends)"
        if not tracker.is_file()
        else f"{candidates[0]}: missing. Is the layout another one, or was a rank not saved?"
    )


def read_models(file: Path, chunks: int) -> list[dict[str, Any]]:
    """Read the state dicts of a shard, one for each model chunk, from Megatron's or verl's file."""
    content = read_archive(file)
    if isinstance(content, list):
        models = content
    elif isinstance(content, dict) and chunks == 1:
        # MindSpeed-LLM's converter writes model0 for a virtual pipeline of one chunk per stage.
        models = [content.get("model", content.get("model0"))]
    elif isinstance(content, dict):
        models = [content.get(f"model{chunk}") for chunk in range(chunks)]
    else:
        models = []
    if len(models) != chunks or not all(isinstance(model, dict) for model in models):
        raise CheckpointError(
            f"{file}: does not contain {chunks} state dict(s) of a model. Is it a shard, and does the pipeline have as "
            "many model chunks (--num-layers-per-virtual-pipeline-stage)?"
        )
    return models


def _expected(file: Path, name: str, model: dict[str, Any], parts: list[Shard]) -> StoredTensor:
    tensor = model.get(name)
    if not isinstance(tensor, StoredTensor):
        raise CheckpointError(f"{file}: tensor {name} is missing. Is the layout another one?")
    shape = local_shapes(parts)[parts[0].local]
    if tensor.shape != shape:
        raise CheckpointError(f"{file}: tensor {name} has shape {tensor.shape}, but the layout implies {shape}")
    return tensor


def _add_fragments(
    fragments: dict[str, list[Fragment]], file: Path, name: str, tensor: StoredTensor, parts: list[Shard]
) -> None:
    for shard in parts:
        if shard.hf_name != PADDING:
            region = Region.of(tensor, shard.view)
            fragments[shard.hf_name].append(Fragment(shard.bounds, region, f"{file}:{name}"))


def _reject_unexpected(file: Path, model: dict[str, Any], shards: dict[str, list[Shard]]) -> None:
    for name, tensor in model.items():
        if isinstance(tensor, StoredTensor) and name not in shards and not name.endswith("_extra_state"):
            raise CheckpointError(f"{file}: tensor {name} is not part of the layout. Is the layout another one?")


def source_files(source: Source) -> list[Path]:
    """Return the files that hold any part of the source."""
    return sorted({fragment.region.tensor.file for tensor in source.tensors.values() for fragment in tensor.fragments})
