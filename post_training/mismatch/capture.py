"""Sends given tokens through a verl worker, with the calls that verl's trainer makes, and records the activations.

All ranks call these functions together. The rollout reads the prompts and receives the responses token by token, so
they are decoded as in real training; the training model computes the log-probs of the same sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch

from post_training.layouts.placements import train_placement
from post_training.mismatch.dumps import Header, Part, Side, TokenSequence
from post_training.mismatch.points import LOG_PROBS
from post_training.mismatch.recording import NO_TOKEN, Recorder, recorded_rollout, recorded_training

# A response that is given token by token must not end at an end token.
_TO_THE_LAST: dict[str, Any] = {"ignore_eos": True, "stop_token_ids": []}


def header_of(worker: Any, side: Side, temperature: float, about: str = "") -> Header:
    """Return the header of this worker's dump; `temperature` is the one configured for log-probs."""
    config, dtype = worker.hf_config, str(worker.dtype).removeprefix("torch.")
    return Header(side, dtype, config.architectures[0], config.num_hidden_layers, temperature, about=about)


def capture_training(worker: Any, sequences: Sequence[TokenSequence]) -> Part:
    """Compute the sequences' log-probs and return this rank's recorded activations.

    Every data-parallel replica computes all sequences; only the first one records.
    """
    from megatron.core import parallel_state

    recorder = Recorder(sequences)
    recording: Any = nullcontext()
    if parallel_state.get_data_parallel_rank() == 0:
        tp_rank = parallel_state.get_tensor_model_parallel_rank()
        placement = train_placement(worker.tf_config)
        slots = placement.layers(torch.distributed.get_rank())
        vocabulary = worker.hf_config.vocab_size
        recording = recorded_training(worker.actor_module, slots, tp_rank, placement.tp, vocabulary, recorder)
    with recording:
        output = worker.compute_log_prob(_batch(worker, sequences, worker.config.rollout.response_length))
    if parallel_state.get_data_parallel_rank() == 0 and parallel_state.is_pipeline_last_stage():
        _record_log_probs(recorder, output.batch["old_log_probs"], range(len(sequences)))
    return recorder.part()


def capture_rollout(worker: Any, sequences: Sequence[TokenSequence]) -> Part:
    """Generate the responses with training's weights and return this rank's recorded activations.

    The engine reads the prompts and decodes the responses. Each rank gets an equal share of the sequences, and an
    engine those of its ranks.
    """
    ranks, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    recorder, llm = Recorder(sequences), worker.rollout.inference_engine
    share = -(-len(sequences) // ranks)
    engine = llm.llm_engine.vllm_config.parallel_config.tensor_parallel_size
    first = rank // engine * engine * share
    mine = range(rank * share, (rank + 1) * share)
    prompts = [TokenSequence(sequences[index % len(sequences)].prompt, ()) for index in mine]
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    longest = max(len(each.response) for each in sequences)
    with (
        mock.patch.multiple(worker.rollout.sampling_params, n=1, max_tokens=longest, **_TO_THE_LAST),
        recorded_rollout(runner, range(first, first + engine * share), llm.request_counter.counter, recorder),
    ):
        output = worker.generate_sequences(_batch(worker, prompts, response_length=0))
    _record_log_probs(recorder, output.batch["rollout_log_probs"], mine)
    return recorder.part()


def _record_log_probs(recorder: Recorder, log_probs: torch.Tensor, indices: range) -> None:
    """Record log-probs, [sequences, longest response], of the sequences with these indices."""
    rows = torch.full(log_probs.shape, NO_TOKEN)
    for row, index in zip(rows, indices, strict=True):
        if index < len(recorder.sequences):
            wanted = recorder.response_rows(index)
            row[: len(wanted)] = torch.tensor(wanted)
    recorder.record(LOG_PROBS, log_probs.reshape(-1, 1), rows.flatten())


def _batch(worker: Any, sequences: Sequence[TokenSequence], response_length: int) -> Any:
    """Make verl's batch: prompts are padded on the left, responses on the right; only prompts if the length is 0."""
    from verl import DataProto

    prompt_length, padding = worker.config.rollout.prompt_length, worker.tokenizer.pad_token_id
    inputs, masks, responses = [], [], []
    for each in sequences:
        left, right = prompt_length - len(each.prompt), response_length - len(each.response)
        inputs.append([padding] * left + [*each.tokens] + [padding] * right)
        masks.append([0] * left + [1] * len(each.tokens) + [0] * right)
        responses.append([*each.response] + [padding] * right)
    mask = torch.tensor(masks)
    tensors = {
        "input_ids": torch.tensor(inputs),
        "attention_mask": mask,
        "position_ids": (mask.cumsum(-1) - 1).clamp(min=0),
    }
    if response_length:
        tensors["responses"] = torch.tensor(responses)
    return DataProto.from_dict(tensors)


def check_lengths(worker_config: Any, sequences: Sequence[TokenSequence], padding: int) -> None:
    """Raise ValueError for sequences that are too long for the configured batch, or begin with the padding token."""
    rollout = worker_config.rollout
    for number, each in enumerate(sequences, 1):
        if len(each.prompt) > rollout.prompt_length or len(each.response) > rollout.response_length:
            raise ValueError(
                f"sequence {number} has {len(each.prompt)} and {len(each.response)} tokens, but the batch allows "
                f"{rollout.prompt_length} and {rollout.response_length}. Use shorter ones"
            )
        if each.prompt[0] == padding:
            raise ValueError(f"the prompt of sequence {number} begins with the padding token {padding}. Remove it")
