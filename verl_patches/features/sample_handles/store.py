"""A worker's side: the samples that it generated, and the part of the batch that it trains on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from post_training.process_context import process_context
from verl_patches.features.measure.step_record import current_record
from verl_patches.features.sample_handles.handles import (
    COUNTED,
    FIRST,
    ID,
    KEPT,
    LENGTHS,
    ORDER,
    REFERENCE,
    STEP,
    WIDTHS,
    unpacked,
)
from verl_patches.features.sample_handles.plan import Generation, SampleHandleError, owners, plan_exchange

if TYPE_CHECKING:
    from verl import DataProto

_NO_LOG_PROB = -1.0
"""verl's padding of the rollout's log-probs after the end of a response."""
_OF_THE_DRIVER = (FIRST, ORDER, WIDTHS, STEP)
_REBUILT_ON_WORKERS_ALONE = ("input_ids", "position_ids")


@dataclass(frozen=True)
class _Part:
    """The samples of this rank's part of the batch.

    Attributes:
        order: ids of the whole batch.
        words: those of each sample, concatenated.
        log_probs: columns that were computed from the part, by name.
    """

    order: np.ndarray
    words: torch.Tensor
    log_probs: dict[str, torch.Tensor] = field(default_factory=dict)


class SampleStore:
    """Samples of one process, from their generation to the end of the update.

    A sample is a run of 32-bit words: its tokens, prompt first, and then the rollout's log-probs of the response, if
    the rollout returned them.
    """

    def __init__(self) -> None:
        self._generations: list[Generation] = []
        self._words: list[torch.Tensor] = []
        self._sizes: list[int] = []
        self._has_log_probs = False
        self._padding = 0
        self._part: _Part | None = None
        self._replica_of_rank: list[int] | None = None

    @property
    def is_empty(self) -> bool:
        """Whether no sample is held."""
        return not self._generations and self._part is None

    def clear(self) -> None:
        """Forget all samples."""
        self._generations, self._words, self._sizes, self._part = [], [], [], None

    @contextmanager
    def forgetting_after_a_failure(self) -> Iterator[None]:
        """Forget all samples if this context raises, so that the next step does not find this one's."""
        try:
            yield
        except BaseException:
            self.clear()
            raise

    def keep(self, answers: DataProto, asked: Mapping[str, Any], device: torch.device) -> DataProto:
        """Keep the answers that this rank has generated, if they will be trained on; return the columns for the driver.

        Args:
            answers: the generated answers.
            asked: the meta information of the prompts, as verl's worker has completed it.
            device: where the samples are kept.
        """
        if FIRST not in asked:
            return answers
        batch = answers.batch
        attention, width = batch["attention_mask"].bool(), batch["responses"].size(1)
        tokens, counted = batch["input_ids"].to(torch.int32), attention[:, -width:]
        parts = [row[mask] for row, mask in zip(tokens, attention, strict=True)]
        self._padding, self._has_log_probs = asked["pad_token_id"], "rollout_log_probs" in batch.keys()
        if self._has_log_probs:
            words = batch["rollout_log_probs"].to(torch.float32).view(torch.int32)
            parts = [torch.cat((row, more[mask])) for row, more, mask in zip(parts, words, counted, strict=True)]
        self._generations.append(Generation(asked[FIRST], len(parts), dist.get_world_size()))
        self._words.append(torch.cat(parts).to(device))
        self._sizes += [len(part) for part in parts]
        answers.batch = batch.exclude(*_REBUILT_ON_WORKERS_ALONE)
        return answers

    def batch_of(self, handles: DataProto, replica: int) -> DataProto:
        """Return the padded batch of `handles` on the device; samples are exchanged once for all calls of a step.

        Args:
            handles: the driver's references.
            replica: the data-parallel rank of this rank.

        Raises:
            SampleHandleError: a sample is not held, for example because it belongs to an earlier step.
        """
        from verl import DataProto

        order = _read(handles.meta_info[ORDER])
        if self._part is None or not np.array_equal(self._part.order, order):
            self._part = self._exchange(order, handles, replica)
        batch = self._padded(self._part.words, handles)
        counted = batch["attention_mask"][:, -batch["responses"].size(1) :].bool()
        for name, values in self._part.log_probs.items():
            batch[name] = values.masked_fill(~counted, 0.0)
        for name in handles.batch.keys():
            if name not in (ID, LENGTHS, COUNTED):
                batch[name] = unpacked(handles.batch[name], counted)
        for name, column in handles.non_tensor_batch.items():
            batch[name] = unpacked(column, counted)
        meta = {name: value for name, value in handles.meta_info.items() if name not in _OF_THE_DRIVER}
        return DataProto.from_dict(batch, meta_info=meta)

    def log_probs(self, compute: Callable[[Any], Any], handles: DataProto, replica: int) -> DataProto:
        """Return what `compute` returns for the batch of `handles`, and keep its log-probs for the update.

        The reference policy's log-probs are not sent to the driver, where nothing reads them.
        """
        with self.forgetting_after_a_failure():
            answer = compute(self.batch_of(handles, replica))
            assert self._part is not None, "a batch was requested"
            for name in KEPT:
                if name in answer.batch.keys():
                    self._part.log_probs[name] = answer.batch[name].to(self._part.words.device)
        if REFERENCE in answer.batch.keys():
            # A small column takes its place: verl joins the answers of ranks by columns, and then with the batch.
            answer.batch = answer.batch.exclude(REFERENCE).update({f"{REFERENCE}_kept": torch.ones(len(answer))})
        return answer

    def update(self, train: Callable[[Any], Any], handles: DataProto, replica: int) -> DataProto:
        """Train on the batch of `handles` and return the output; forget the samples, as the weights have changed."""
        with self.forgetting_after_a_failure():
            output = train(self.batch_of(handles, replica))
        self.clear()
        return output

    def _exchange(self, order: np.ndarray, handles: DataProto, replica: int) -> _Part:
        try:  # before any collective: a missing sample is an error on every rank alike, so none is left waiting
            owners(order, self._generations)
        except SampleHandleError as error:
            raise SampleHandleError(f"in step {handles.meta_info[STEP]} {error}") from None
        plan = plan_exchange(order, self._generations, self._replicas(replica), dist.get_rank())
        words, sizes = torch.cat(self._words), np.array(self._sizes, dtype=np.int64)
        begins = np.concatenate(([0], np.cumsum(sizes)))
        index = [np.arange(begins[row], begins[row + 1]) for rows in plan.sent for row in rows]
        outgoing = words.index_select(0, _index(index, words.device))
        lengths = _sizes_of(handles.batch[LENGTHS].cpu().numpy(), self._has_log_probs)
        arriving = np.empty_like(lengths)
        arriving[plan.place] = lengths
        senders = np.split(arriving, np.cumsum(plan.received)[:-1])
        incoming = words.new_empty(int(lengths.sum()))
        dist.all_to_all_single(
            incoming,
            outgoing,
            [int(each.sum()) for each in senders],
            [int(sizes[rows].sum()) for rows in plan.sent],
        )
        record = current_record()
        record.count("samples/collectives", 1)
        record.count("samples/bytes_received", incoming.nbytes)
        begins = np.concatenate(([0], np.cumsum(arriving)))
        ordered = [np.arange(begins[place], begins[place + 1]) for place in plan.place]
        return _Part(order, incoming.index_select(0, _index(ordered, words.device)))

    def _replicas(self, replica: int) -> list[int]:
        """Return the data-parallel rank of every rank. Collective on the first call: one all-gather."""
        if self._replica_of_rank is None:
            own = torch.tensor([replica], dtype=torch.int32, device=self._words[0].device)
            found = own.new_empty(dist.get_world_size())
            dist.all_gather_into_tensor(found, own)
            self._replica_of_rank = found.tolist()
        return self._replica_of_rank

    def _padded(self, words: torch.Tensor, handles: DataProto) -> dict[str, torch.Tensor]:
        """Build verl's columns of a batch: in every row the prompt ends, and the response begins, at the same place."""
        device = words.device
        prompt_width, width = handles.meta_info[WIDTHS]
        lengths = handles.batch[LENGTHS].to(device).long()
        counted = handles.batch[COUNTED].to(device).long()
        prompt, response = lengths[:, :1], lengths[:, 1:]
        places = torch.arange(-prompt_width, width, device=device)[None]
        filled = (places >= -prompt) & (places < response)
        behind = torch.arange(width, device=device)[None]
        is_token = _tokens_of_words(lengths, self._has_log_probs)
        ids = torch.full(filled.shape, self._padding, device=device)
        ids = ids.masked_scatter(filled, words[is_token].long())
        attention = ((places >= -prompt) & (places < counted[:, None])).long()
        batch = {
            "input_ids": ids,
            "prompts": ids[:, :prompt_width],
            "responses": ids[:, prompt_width:],
            "attention_mask": attention,
            "position_ids": (places + prompt).clamp(min=0),
            "response_mask": attention[:, prompt_width:],
        }
        if self._has_log_probs:
            found = torch.full((len(lengths), width), _NO_LOG_PROB, device=device)
            batch["rollout_log_probs"] = found.masked_scatter(behind < response, words[~is_token].view(torch.float32))
        return batch


def _tokens_of_words(lengths: torch.Tensor, has_log_probs: bool) -> torch.Tensor:
    """Return which words of concatenated samples are tokens: for lengths [[2, 3]], the first 5 of 5 or 8 words."""
    kinds = torch.tensor([True, False], device=lengths.device).repeat(len(lengths))
    runs = torch.stack((lengths.sum(-1), lengths[:, 1] * has_log_probs), dim=-1).flatten()
    return kinds.repeat_interleave(runs)


def _sizes_of(lengths: np.ndarray, has_log_probs: bool) -> np.ndarray:
    """Return the number of words of each sample, int64 [samples], from its prompt and response lengths [samples, 2]."""
    return lengths.sum(-1, dtype=np.int64) + has_log_probs * lengths[:, 1].astype(np.int64)


def _index(runs: list[np.ndarray], device: torch.device) -> torch.Tensor:
    found = np.concatenate(runs) if runs else np.empty(0, dtype=np.int64)
    return torch.from_numpy(found).to(device)


def _read(order: Any) -> np.ndarray:
    """Return the ids of a batch, which the driver may have put into Ray's store."""
    if isinstance(order, np.ndarray):
        return order
    import ray

    return ray.get(order)


def process_store() -> SampleStore:
    """Return the store of this process, which verl's actor and reference worker share."""
    return process_context().of(SampleStore)
