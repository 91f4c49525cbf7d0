"""The jobs of the worker processes: functions of the process's state, called on every rank with equal roles."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch

from tests.device_bytes import bytes_of_tensors
from tests.float32_exchange import exchange_in_float32

State = dict[str, Any]


def build(state: State, overrides: list[str]) -> dict[str, Any]:
    """Build verl's actor-rollout worker and reference worker as verl's driver does. Return the overlay's report."""
    import copy

    from verl.workers.megatron_workers import ActorRolloutRefWorker

    import overlay
    from verl_patches.trainer.main_ppo import compose

    config = compose("rehearsal", overrides)
    node = config.actor_rollout_ref
    state["actor"] = ActorRolloutRefWorker(config=copy.deepcopy(node), role="actor_rollout")
    state["reference"] = ActorRolloutRefWorker(config=copy.deepcopy(node), role="ref")
    state["reference"].init_model()
    with _engine_weights_noted(state):
        state["actor"].init_model()
    state["differing_at_first"] = _resharded_differently(state, state.pop("of_engine"))
    return overlay.report().as_dict()


@contextmanager
def _engine_weights_noted(state: State) -> Iterator[None]:
    """Copy the weights that the engine itself loads to the host as `of_engine`, before they are offloaded."""
    from post_training.layouts.model_tensors import rollout_tensors
    from verl_patches.features.residency import registration

    register = registration.register_rollout

    def noting(residency: Any, runner: Any, *rest: Any) -> None:
        state["of_engine"] = {name: t.data.cpu().clone() for name, t in rollout_tensors(runner.get_model()).items()}
        register(residency, runner, *rest)

    with mock.patch.object(registration, "register_rollout", noting):
        yield


def _resharded_differently(state: State, loaded: dict[str, torch.Tensor]) -> list[str]:
    """Return the names of the rollout weights that differ from `loaded` after a reshard of the training weights."""
    from post_training.layouts.model_tensors import rollout_tensors
    from verl_patches.workers.sharding_manager.megatron_vllm import _resharder

    phase(state, "reshard")
    _resharder(state["actor"].sharding_manager).run()
    found = rollout_tensors(_rollout_model(state))
    differing = [name for name, tensor in loaded.items() if not torch.equal(found[name].data.cpu(), tensor)]
    phase(state, "idle")
    return differing


def file_of_torch_npu(state: State) -> str:
    """Return the file from which `import torch_npu` loads."""
    import torch_npu

    return torch_npu.__file__


def differing_at_first(state: State) -> list[str]:
    """Return the names of the weights that engine and training model loaded differently."""
    return state["differing_at_first"]


def switch(state: State, **sections: Any) -> None:
    """Change settings of this process; a dict changes fields of its section."""
    from verl_patches.features import settings

    current = settings.current()
    changes = {
        name: dataclasses.replace(getattr(current, name), **value) if isinstance(value, dict) else value
        for name, value in sections.items()
    }
    settings.activate(dataclasses.replace(current, **changes))


def rollout(state: State, prompts: list[list[int]], most_tokens: int | None = None) -> dict[str, list[list[Any]]]:
    """Generate for `prompts` (token ids) as verl's driver dispatches them; every rank keeps the whole batch.

    `most_tokens` ends the responses of this rank's engine early. Returns the token ids and the rollout's log-probs of
    each response, including padding.
    """
    import torch.distributed as dist
    from verl import DataProto

    rank, ranks = dist.get_rank(), dist.get_world_size()
    share = len(prompts) // ranks
    sampling = state["actor"].rollout.sampling_params
    with mock.patch.object(sampling, "max_tokens", most_tokens or sampling.max_tokens):
        output = state["actor"].generate_sequences(_prompt_batch(state, prompts[rank * share : (rank + 1) * share]))
    outputs: list[Any] = [None] * ranks
    dist.all_gather_object(outputs, output)
    state["batch"] = batch = DataProto.concat(outputs)
    batch.meta_info["global_token_num"] = batch.batch["attention_mask"].sum(-1).tolist()
    return {name: batch.batch[name].tolist() for name in ("responses", "rollout_log_probs")}


def _prompt_batch(state: State, prompts: list[list[int]]) -> Any:
    """Return verl's left-padded prompt batch."""
    from verl import DataProto

    length, padding = state["actor"].config.rollout.prompt_length, state["actor"].tokenizer.pad_token_id
    ids = torch.tensor([[padding] * (length - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (length - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    return DataProto.from_dict({"input_ids": ids, "attention_mask": mask, "position_ids": positions})


def old_log_prob(state: State) -> list[list[float]]:
    """Compute the actor's log-probs of the batch's responses, add them to the batch and return them."""
    output = state["actor"].compute_log_prob(_copied(state["batch"]))
    state["batch"].batch["old_log_probs"] = output.batch["old_log_probs"]
    return output.batch["old_log_probs"].tolist()


def tokens(state: State) -> dict[str, list[list[int]]]:
    """Return the batch's token ids and mask; prompts are left-padded and responses right-padded."""
    return {name: state["batch"].batch[name].tolist() for name in ("input_ids", "attention_mask", "responses")}


def no_old_log_prob(state: State) -> None:
    """Remove old_log_prob from the batch, as if the driver had not asked for it."""
    state["batch"].batch = state["batch"].batch.exclude("old_log_probs")


def reference_log_prob(state: State) -> list[list[float]]:
    """Compute the reference policy's log-probs of the batch's responses, add them to the batch and return them."""
    output = state["reference"].compute_ref_log_prob(_copied(state["batch"]))
    state["batch"].batch["ref_log_prob"] = output.batch["ref_log_prob"]
    return output.batch["ref_log_prob"].tolist()


def update(
    state: State,
    seed: int = 0,
    bad_advantage: float | None = None,
    bad_gradient: bool = False,
    training_step: int = 1,
) -> dict[str, Any]:
    """Run the update of step `training_step` with advantages drawn from `seed`. Return verl's metrics of this rank.

    `bad_advantage` replaces one advantage, which makes the gradients of every rank non-finite. `bad_gradient` makes one
    element of this rank's gradients NaN after the backward pass.
    """
    batch = state["batch"].batch
    advantages = _advantages(batch["responses"], seed)
    if bad_advantage is not None:
        advantages[0, 0] = bad_advantage
    batch["advantages"] = advantages
    state["batch"].meta_info["training_step"] = training_step
    with _gradient_spoilt() if bad_gradient else nullcontext():
        return state["actor"].update_actor(_copied(state["batch"])).meta_info["metrics"]


def _advantages(responses: torch.Tensor, seed: int) -> torch.Tensor:
    """Draw one number per response from `seed`, as [responses, width]."""
    drawn = torch.randn(len(responses), 1, generator=torch.Generator().manual_seed(seed))
    return drawn.expand(responses.shape).contiguous()


def step_with_handles(state: State, prompts: list[list[int]], seed: int = 0) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run a step like `rollout`, `old_log_prob`, `reference_log_prob` and `update`, with references instead of a batch.

    Returns the same as `rollout`, and verl's metrics of this rank.
    """
    from verl_patches.features.sample_handles.handles import DriverOfHandles
    from verl_patches.features.sample_handles.store import process_store

    driver, actor = DriverOfHandles(lambda order: order, lambda: 1), state["actor"]
    generated = driver.generating(lambda asked: _generated_by_all(state, asked))(_prompt_batch(state, prompts))
    generated.meta_info["global_token_num"] = generated.batch["attention_mask"].sum(-1).tolist()
    assert "input_ids" not in generated.batch.keys() and not process_store().is_empty
    old = driver.asking(actor.compute_log_prob)(generated)
    generated.batch["old_log_probs"] = old.batch["old_log_probs"]
    assert "ref_log_prob" not in driver.asking(state["reference"].compute_ref_log_prob)(generated).batch.keys()
    generated.batch["advantages"] = _advantages(generated.batch["responses"], seed)
    generated.meta_info["training_step"] = 1
    metrics = driver.updating(actor.update_actor)(generated).meta_info["metrics"]
    assert process_store().is_empty
    return {name: generated.batch[name].tolist() for name in ("responses", "rollout_log_probs")}, metrics


def _generated_by_all(state: State, asked: Any) -> Any:
    """Return every rank's answers to its share of the prompts, in rank order, as verl's driver collects them."""
    import torch.distributed as dist
    from verl import DataProto

    rank, ranks = dist.get_rank(), dist.get_world_size()
    outputs: list[Any] = [None] * ranks
    dist.all_gather_object(outputs, state["actor"].generate_sequences(asked.chunk(ranks)[rank]))
    return DataProto.concat(outputs)


@contextmanager
def _gradient_spoilt() -> Iterator[None]:
    """Put one NaN into the gradients of this rank when the guard looks at them."""
    from verl_patches.features.nonfinite import updates

    gradient_tensors = updates.gradient_tensors

    def spoilt(*arguments: Any) -> list[torch.Tensor]:
        tensors = [tensor for tensor in gradient_tensors(*arguments) if tensor.numel()]
        tensors[-1].view(-1)[-1] = torch.nan
        return tensors

    with mock.patch.object(updates, "gradient_tensors", spoilt):
        yield


def finds_nonfinite(state: State, value: float) -> bool:
    """Return whether the guard, over all ranks, finds non-finite values if this rank's tensor has `value`."""
    from post_training.finite_steps.guard import any_nonfinite

    return any_nonfinite([torch.tensor([0.0, value, 1.0], device="npu")])


def _copied(batch: Any) -> Any:
    """Return a copy whose tensors a worker may move and change, as if it had come through Ray."""
    import copy

    return copy.deepcopy(batch)


def phase(state: State, name: str) -> None:
    """Enter a phase manually."""
    from verl_patches.workers.process_residency import process_residency

    process_residency().enter(name)


def bytes_copied_out(state: State, names: list[str]) -> dict[str, int]:
    """Enter the phases `names` in turn. Return the bytes that were copied to the host at the start of each."""
    from verl_patches.features.measure.step_record import current_record

    def total() -> int:
        return int(current_record().counts.get("residency/device_to_host_bytes", 0))

    copied = {}
    for name in names:
        before = total()
        phase(state, name)
        copied[name] = total() - before
    return copied


def host_bytes(state: State) -> dict[str, int]:
    """Return the bytes that the offload manager keeps in host memory, by group."""
    from verl_patches.workers.process_residency import process_residency

    def held(resident: Any) -> int:
        return sum(map(held, getattr(resident, "_parts", ()))) + sum(
            kept.numel() for kept in getattr(resident, "_host", {}).values()
        )

    return {group: sum(map(held, residents)) for group, residents in process_residency()._groups.items()}


def bytes_beside_programs(state: State) -> int:
    """Return the bytes that CANN and HCCL themselves take on the die, if it counts them."""
    from npu_emulator import counters

    return counters.memory_statistics(torch.npu.current_device())["beside_programs"]


def allocated(state: State) -> int:
    """Return the device bytes that are allocated now."""
    return torch.npu.memory_allocated()


def _training_tensors(state: State, optimizer: bool = True) -> list[torch.Tensor]:
    from post_training.live_tensors import optimizer_tensors, parameter_tensors
    from verl_patches.features.residency.storages import device_storages

    tensors = list(parameter_tensors(state["actor"].actor_module))
    if optimizer:
        tensors += list(optimizer_tensors(state["actor"].actor_optimizer))
    views = [torch.empty(0, dtype=torch.uint8, device="npu").set_(s) for s in device_storages(tensors).values()]
    return views


def digest(state: State) -> str:
    """Return a digest of weights and optimizer state."""
    phase(state, "checkpoint")
    total = hashlib.sha256()
    for view in _training_tensors(state):
        total.update(view.cpu().numpy().tobytes())
    return total.hexdigest()


def gradient_digest(state: State) -> str:
    """Return a digest of the gradient buffers; call it right after an update."""
    from post_training.live_tensors import gradient_tensors

    total = hashlib.sha256()
    for tensor in gradient_tensors(state["actor"].actor_module):
        total.update(tensor.cpu().numpy().tobytes())
    return total.hexdigest()


def remember(state: State) -> None:
    """Keep a host copy of weights, optimizer state, settings and random state."""
    phase(state, "checkpoint")
    from verl_patches.features import settings

    optimizer = state["actor"].actor_optimizer
    state["settings"] = settings.current()
    state["random"] = torch.get_rng_state(), torch.npu.get_rng_state()
    state["weights"] = [view.cpu().clone() for view in _training_tensors(state, optimizer=False)]
    state["optimizer"] = [
        (part.optimizer, [[p.cpu().clone() for p in g["params"]] for g in part.optimizer.param_groups], _moments(part))
        for part in getattr(optimizer, "chained_optimizers", [optimizer])
    ]


def _moments(part: Any) -> list[tuple[torch.Tensor, dict[str, Any]]]:
    return [
        (parameter, {name: v.cpu().clone() if isinstance(v, torch.Tensor) else v for name, v in values.items()})
        for parameter, values in part.optimizer.state.items()
    ]


def recall(state: State) -> None:
    """Restore what `remember` kept, and start an empty step record; later optimizer state is dropped."""
    from post_training.process_context import process_context
    from verl_patches.features import settings
    from verl_patches.features.measure import step_record

    settings.activate(state["settings"])
    host, device = state["random"]
    torch.set_rng_state(host)
    torch.npu.set_rng_state(device)
    phase(state, "checkpoint")
    process_context().take(step_record.StepRecord)
    with torch.no_grad():
        for view, kept in zip(_training_tensors(state, optimizer=False), state["weights"], strict=True):
            view.copy_(kept)
        for inner, groups, moments in state["optimizer"]:
            for group, kept_group in zip(inner.param_groups, groups, strict=True):
                for parameter, kept in zip(group["params"], kept_group, strict=True):
                    parameter.copy_(kept)
            inner.state.clear()
            for parameter, values in moments:
                inner.state[parameter] = {
                    name: v.to(parameter.device) if isinstance(v, torch.Tensor) and v.dim() else v
                    for name, v in values.items()
                }


def schedule(state: State, **keys: Any) -> None:
    """Change keys of verl's `actor.optim`."""
    state["actor"].config.actor.optim.update(keys)


def save(state: State, folder: str) -> None:
    """Begin to save the actor, as verl's driver does."""
    state["actor"].save_checkpoint(folder)


def finish_save(state: State) -> None:
    """Wait for a save in progress, as verl's driver does before an update."""
    state["actor"].finish_checkpoint()


def load(state: State, folder: str, fault: str | None = None) -> None:
    """Load the actor as verl's driver does, optionally with one of the faults in `_FAULTS`."""
    with _FAULTS[fault]() if fault else nullcontext():
        state["actor"].load_checkpoint(folder)
    if fault == "no steps":
        optimizer = state["actor"].actor_optimizer
        for part in getattr(optimizer, "chained_optimizers", [optimizer]):
            for kept in part.optimizer.state.values():
                kept["step"].zero_()


def _reading(change: Any) -> Any:
    """Replace the reading of a slice of a checkpoint's tensor by `change(read, source, hf_name, bounds, out)`."""
    from post_training.checkpoint.source import Source

    read = Source.read_into
    return mock.patch.object(Source, "read_into", lambda self, *bounds: change(partial(read, self), self, *bounds))


def _of_a_neighbour(read: Any, source: Any, hf_name: str, bounds: Any, out: torch.Tensor) -> None:
    read(hf_name.replace(".experts.0.", ".experts.128."), bounds, out)


def _rounded(read: Any, source: Any, hf_name: str, bounds: Any, out: torch.Tensor) -> None:
    read(hf_name, bounds, out)
    out.copy_(out.bfloat16())


def _no_random_states() -> Any:
    return mock.patch("verl_patches.features.training_checkpoint.random_states.restore_random_states")


_FAULTS: dict[str, Any] = {
    "no steps": nullcontext,
    "an expert of another rank": lambda: _reading(_of_a_neighbour),
    "weights rounded to bfloat16": lambda: _reading(_rounded),
    "no random states": _no_random_states,
}


def leave_out_absorbed_refresh(state: State) -> None:
    """Make the sharding manager skip the refresh of MLA's absorbed weights."""
    from post_training.reshard import mla_refresh

    state["refresh"] = mla_refresh.refresh_absorbed_weights
    mla_refresh.refresh_absorbed_weights = lambda model: 0


def round_router_biases(state: State) -> None:
    """Round the rollout's router biases to bfloat16 after each reshard from now on, as vLLM-Ascend builds them."""
    from post_training.reshard import mla_refresh

    state["refresh"] = refresh = mla_refresh.refresh_absorbed_weights

    def refresh_and_round(model: Any) -> int:
        for name, weight in model.named_parameters():
            if name.endswith("e_score_correction_bias"):
                weight.data.copy_(weight.data.bfloat16())
        return refresh(model)

    mla_refresh.refresh_absorbed_weights = refresh_and_round


def put_back_absorbed_refresh(state: State) -> None:
    """Undo `leave_out_absorbed_refresh` or `round_router_biases`."""
    from post_training.reshard import mla_refresh

    mla_refresh.refresh_absorbed_weights = state["refresh"]


def differing_weights(state: State, disturb: bool) -> list[str]:
    """Reshard and compare; with `disturb`, the last rank changes one bit of one rollout weight in between."""
    phase(state, "reshard")
    resharder = state["actor"].sharding_manager.overlay_resharder
    resharder.run()
    if disturb and state["rank"] == 3:
        weight = next(p for name, p in _rollout_model(state).named_parameters() if name.endswith("w2_weight"))
        with torch.no_grad():
            weight[0, 0, 0] = torch.nextafter(weight[0, 0, 0], torch.inf * torch.ones_like(weight[0, 0, 0]))
    return resharder.verify()


def _rollout_model(state: State) -> torch.nn.Module:
    return _model_runner(state).get_model()


def _model_runner(state: State) -> Any:
    return state["actor"].rollout.inference_engine.llm_engine.model_executor.driver_worker.worker.model_runner


def watch_rollout_addresses(state: State) -> None:
    """Start to record the addresses of the rollout weights: after the reshard, and before and after a generation."""
    from verl_patches.workers.process_residency import process_residency

    residency, seen = process_residency(), []
    enter = type(residency).enter

    def noting(name: str) -> None:
        enter(residency, name)
        if name in ("reshard", "rollout", "idle"):
            seen.append([tensor.data_ptr() for tensor in _served_tensors(state)])

    residency.enter = noting
    state["addresses"] = seen


def rollout_addresses_moved(state: State) -> dict[str, int]:
    """Stop recording. Return how many weights were recorded in all cycles together, and how many moved: within a cycle,
    from the reshard to the end of the generation, and from one cycle to the next."""
    from verl_patches.workers.process_residency import process_residency

    del process_residency().enter
    seen = state.pop("addresses")
    cycles = [seen[first : first + 3] for first in range(0, len(seen), 3)]
    within = sum(len(set(places)) > 1 for cycle in cycles for places in zip(*cycle, strict=True))
    pairs = zip(cycles, cycles[1:], strict=False)
    across = sum(a != b for last, first in pairs for a, b in zip(last[-1], first[0], strict=True))
    return {"watched": sum(len(cycle[0]) for cycle in cycles), "within": within, "across": across}


def _served_tensors(state: State) -> list[torch.Tensor]:
    """Return the rollout's parameters and buffers, and the weights that MLA derives from them."""
    from post_training.reshard.mla_refresh import absorbed_tensors

    model = _rollout_model(state)
    return [*model.parameters(), *model.buffers(), *absorbed_tensors(model)]


def cycle_weights(state: State, count: int) -> dict[str, int]:
    """Repeat `count` times: the phase update, which changes training weights, and a reshard without generation.

    Returns the number of rollout weights, the number that ever moved, the number of mismatches with training, the bytes
    by which tensors grew from the second update to the last, and the bytes that were allocated but unmapped: the
    minimum in the phase update, and the maximum in the rollout.
    """
    from verl_patches.features.measure.step_record import current_record

    places, held, unmapped = [], [], {"update": [], "rollout": []}
    for number in range(count):
        phase(state, "update")
        unmapped["update"].append(_unmapped_bytes())
        if number in (1, count - 1):
            held.append(bytes_of_tensors())
        for chunk in state["actor"].actor_module:
            for parameter in chunk.parameters():
                parameter.data.mul_(1 + 2**-10)
        with state["actor"].sharding_manager:
            places.append([tensor.data_ptr() for tensor in _served_tensors(state)])
            unmapped["rollout"].append(_unmapped_bytes())
    return {
        "watched": len(places[0]),
        "moved": sum(len(set(of_one)) > 1 for of_one in zip(*places, strict=True)),
        "differing": int(current_record().counts["reshard/weights_differing"]),
        "leaked": held[1] - held[0],
        "unmapped_in_update": min(unmapped["update"]),
        "unmapped_in_rollout": max(unmapped["rollout"]),
    }


def _unmapped_bytes() -> int:
    """Return the device bytes that torch has reserved without taking them from the die, which nobody else uses."""
    torch.npu.empty_cache()
    free, total = torch.npu.mem_get_info()
    return torch.npu.memory_reserved() - (total - free)


def served_bytes(state: State) -> int:
    """Return the bytes of the rollout's weights, buffers and derived weights."""
    from verl_patches.features.residency.storages import device_storages

    return sum(storage.nbytes() for storage in device_storages(_served_tensors(state)).values())


def generate_in_phases(state: State, move: bool) -> None:
    """Go through a generation's phases manually; with `move`, one rollout weight has another address during it."""
    phase(state, "reshard")
    weight = next(_rollout_model(state).parameters())
    here = weight.data
    if move:
        weight.data = here.clone()
    phase(state, "rollout")
    weight.data = here
    phase(state, "idle")


def graph_freezes_weights(state: State, cached: bool) -> bool:
    """Return whether the runner asks torchair for a graph with fixed weight addresses; nothing is captured."""
    import torchair

    runner = _model_runner(state)
    of_runner = {"use_cached_npu_graph": cached, "torchair_graph_batch_sizes": [8], "torchair_compiled_model": None}
    with (
        mock.patch.multiple(runner, **of_runner),
        mock.patch.object(torchair, "get_npu_backend") as backend,
        mock.patch.object(torchair.inference, "cache_compile") as cache_compile,
        mock.patch("torch.compile"),
    ):
        runner._get_torchair_lazy_compiled_model(8)
    runner.torchair_compiled_models.clear()
    options = cache_compile.call_args.kwargs if cached else backend.call_args.kwargs
    return options["config" if cached else "compiler_config"].experimental_config.frozen_parameter.value in (True, "1")


def spoil_weight(state: State, rank: int) -> None:
    """Set one value of a training weight to NaN on one rank."""
    phase(state, "checkpoint")
    if state["rank"] == rank:
        named = state["actor"].actor_module[0].module.named_parameters()
        next(weight for name, weight in named if "linear_proj" in name).data.view(-1)[0] = torch.nan


def weights_hold_nan(state: State) -> bool:
    """Return whether any training weight is NaN."""
    phase(state, "checkpoint")
    return any(bool(p.isnan().any()) for chunk in state["actor"].actor_module for p in chunk.module.parameters())


def kv_cache_bytes(state: State) -> int:
    """Return the bytes of the KV cache's storages; enters the rollout phase."""
    from verl_patches.features.residency.storages import device_storages

    phase(state, "reshard")
    phase(state, "rollout")
    caches = [tensor for layer in _model_runner(state).kv_caches for tensor in layer]
    return sum(storage.nbytes() for storage in device_storages(caches).values())


def training_state_bytes(state: State) -> int:
    """Return the bytes of the actor's weights, gradients and optimizer state; enters the update phase."""
    from post_training.live_tensors import gradient_tensors
    from verl_patches.features.residency.storages import device_storages

    phase(state, "update")
    gradients = device_storages(gradient_tensors(state["actor"].actor_module)).values()
    return sum(view.numel() for view in _training_tensors(state)) + sum(storage.nbytes() for storage in gradients)


def served_expert_bytes(state: State) -> int:
    """Return the bytes of the routed experts that this rank serves."""
    phase(state, "reshard")
    named = _rollout_model(state).named_parameters()
    return sum(p.numel() * p.element_size() for name, p in named if name.endswith(("w13_weight", "w2_weight")))


def rollout_collectives(state: State, prompts: list[list[int]], most_tokens: int | None = None) -> dict[str, Any]:
    """Generate like `rollout`, and count the all-reduces of host tensors and the agreements on the device. Return the
    result of `rollout`, the two counts, and the metrics of the decode loop."""
    import torch.distributed as dist

    from verl_patches.features.measure.step_record import current_record

    count, upstream = {"host": 0}, dist.all_reduce

    def counting(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        count["host"] += tensor.device.type == "cpu"
        return upstream(tensor, *arguments, **options)

    dist.all_reduce = counting
    try:
        found = rollout(state, prompts, most_tokens)
    finally:
        dist.all_reduce = upstream
    counts = {name: int(value) for name, value in current_record().counts.items() if name.startswith("rollout/")}
    agreements = current_record().counts.get("collectives/rollout_agreement/count", 0)
    return found | counts | count | {"agreements": int(agreements)}


def activate_again(state: State) -> bool:
    """Activate the overlay again, and return whether every patched function is still the same object."""
    from verl.workers.megatron_workers import ActorRolloutRefWorker

    import verl_patches.prelude_patch as prelude

    before = dict(vars(ActorRolloutRefWorker))
    prelude.activate()
    return dict(vars(ActorRolloutRefWorker)) == before


def checkpoint_finds_state(state: State) -> bool:
    """Return whether verl's checkpoint manager, called by the worker, finds weights and optimizer state in memory."""
    seen = []

    class Manager:
        def save_checkpoint(self, **options: Any) -> None:
            seen.append(all(view.numel() for view in _training_tensors(state)))

    manager, state["actor"].checkpoint_mananager = state["actor"].checkpoint_mananager, Manager()
    try:
        state["actor"].save_checkpoint("unused")
    finally:
        state["actor"].checkpoint_mananager = manager
    return seen == [True]


def forward_agreements(state: State, count: int, graphs: bool) -> list[tuple[Any, ...]]:
    """Return the forwards of this rank after `count` agreements on random forwards, by the runner's own method.

    With `graphs`, the runner believes that it has torchair graphs, which have fixed sizes.
    """
    runner = _model_runner(state)
    with mock.patch.object(runner, "torchair_graph_enabled", graphs):
        return [_forward_agreement(runner, *forward) for forward in _random_forwards(state["rank"] // 2, count)]


def decode_through_mc2(state: State) -> None:
    """Make the engine exchange tokens by MC2 when it decodes, as on 16 or more ranks."""
    import torch_npu
    from vllm_ascend import ascend_forward_context

    state_of = ascend_forward_context.get_fused_moe_state
    state["mc2"] = patches = ExitStack()
    patches.enter_context(exchange_in_float32())
    dispatch = torch_npu.npu_moe_distribute_dispatch_v2
    on_16_ranks = mock.patch.object(
        ascend_forward_context, "get_fused_moe_state", lambda ranks, with_prefill: state_of(16, with_prefill)
    )
    patches.enter_context(on_16_ranks)
    noted = mock.patch.object(torch_npu, "npu_moe_distribute_dispatch_v2", wraps=dispatch)
    state["dispatched"] = patches.enter_context(noted).call_args_list


def end_mc2(state: State) -> tuple[int, int]:
    """Undo `decode_through_mc2`. Return the number of dispatches, and how many had the mask of an A3."""
    state.pop("mc2").close()
    calls = state.pop("dispatched")
    return len(calls), sum(call.kwargs.get("x_active_mask") is not None for call in calls)


def soc_version(state: State) -> str:
    """Return the chip generation that vLLM-Ascend detects."""
    from vllm_ascend.utils import get_ascend_soc_version

    return get_ascend_soc_version().name


def _random_forwards(seed: int, count: int) -> Iterator[tuple[int, int, bool, bool]]:
    """Yield padded and actual tokens, whether there is a prompt, and whether there could be two batches."""
    import random

    draw = random.Random(seed)
    for number in range(count):
        tokens = draw.randrange(1, 50)
        # At most every third agreement has a prompt on some rank, so that all three cases occur.
        prefill, two_batches = number % 3 == 0 and draw.random() < 0.5, draw.random() < 0.7
        yield tokens + draw.randrange(8), tokens, prefill, two_batches


def _forward_agreement(runner: Any, *forward: Any) -> tuple[Any, ...]:
    padded, across, with_prefill, both = runner._get_forward_metadata_across_dp(*forward)
    return padded, across.tolist(), str(across.dtype), str(across.device), with_prefill, both


def generate_in_window(
    state: State, prompts: list[list[int]], running: int | None = None, fault: str | None = None
) -> dict[str, Any]:
    """Generate greedily like `rollout`. Return the responses and the metrics of the decode loop, or the error.

    Args:
        running: the most requests that run at once; the others wait.
        fault: a fault in the engine of ranks 2 and 3.
    """
    from verl_patches.features.dp_sync.sync_window import SyncWindowError
    from verl_patches.features.measure.step_record import current_record

    engine = state["actor"].rollout.inference_engine.llm_engine
    scheduler = engine.engine_core.engine_core.scheduler
    most = running or scheduler.max_num_running_reqs
    with (
        mock.patch.object(state["actor"].rollout.sampling_params, "top_k", 1),
        mock.patch.object(scheduler, "max_num_running_reqs", most),
        _WINDOW_FAULTS[fault]() if fault and state["rank"] >= 2 else nullcontext(),
    ):
        try:
            found: dict[str, Any] = rollout(state, prompts)
        except SyncWindowError as error:
            engine.abort_request(list(engine.output_processor.request_states))
            return {"error": str(error)}
    counts = current_record().counts
    return found | {name.removeprefix("rollout/"): int(v) for name, v in counts.items() if name.startswith("rollout/")}


def _prompts_within_a_window() -> Any:
    from verl_patches.features.dp_sync.decode_loop import DecodeLoop

    return mock.patch.object(DecodeLoop, "_holding_still", lambda self, scheduler: nullcontext())


@contextmanager
def _request_loses_its_blocks() -> Iterator[None]:
    """Make the scheduler believe, after the first forward of a window, that no block is left."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    from verl_patches.features.dp_sync import decode_loop

    allocate = KVCacheManager.allocate_slots

    def short(self: Any, *arguments: Any, **options: Any) -> Any:
        loop = decode_loop.going()
        lost = loop is not None and loop.window.left and loop.window.left < loop.window.agreement.steps
        return None if lost else allocate(self, *arguments, **options)

    with mock.patch.object(KVCacheManager, "allocate_slots", short):
        yield


_WINDOW_FAULTS: dict[str, Any] = {
    "a prompt within a window": _prompts_within_a_window,
    "a request loses its blocks": _request_loses_its_blocks,
}
