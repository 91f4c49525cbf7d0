r"""The supervised phase of the model that reads images: it sees them right and misreads most questions.

Every label is the right answer to a question about the image, but only a share of the labels answers the question that
was asked (`Which colour?` as `\boxed{red}`); the others answer one of the other two (`\boxed{3}`, `\boxed{left}`). From
correct/incorrect rewards alone, GRPO then learns to answer the question that was asked, as in `warm_start`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel, Qwen2_5_VLProcessor

from post_training.data import INSTRUCTION
from rehearsal.image_task import QUESTIONS, ImageExercise, draw_exercises
from rehearsal.tiny_model.warm_start import WarmStart

IMAGE_WARM_START = WarmStart(steps=400, batch_size=32, learning_rate=1e-3, ramp_steps=40)
PICTURES = 1536


@dataclass(frozen=True)
class ImageReadings:
    """Every exercise with its answer, and the answers to the other questions.

    `inputs` are [exercises, length] token ids, right padded, with 1 in `mask` for each token. `answered` [exercises,
    tokens] are the places whose next token belongs to the response, and `labels` [exercises, tokens, readings] these
    next tokens in the response to each of `QUESTIONS`. `pixels` are [exercises, patches, values] with `grid` [1, 3] of
    every image. `asked` [exercises] is the index of the question that was asked.
    """

    inputs: Tensor
    mask: Tensor
    answered: Tensor
    labels: Tensor
    pixels: Tensor
    grid: Tensor
    asked: Tensor

    def log_probs(self, model: PreTrainedModel, chosen: Tensor) -> Tensor:
        """Return the log-probs in float32 of the labels of these exercises, [rows, tokens, readings]."""
        hidden = model.model(
            input_ids=self.inputs[chosen],
            attention_mask=self.mask[chosen],
            pixel_values=self.pixels[chosen].flatten(0, 1),
            image_grid_thw=self.grid.expand(len(chosen), -1),
            use_cache=False,
        ).last_hidden_state
        places = self.answered[chosen].unsqueeze(-1).expand(-1, -1, hidden.shape[-1])
        return model.lm_head(hidden.gather(1, places)).float().log_softmax(-1).gather(2, self.labels[chosen])


def encode_image_readings(processor: Qwen2_5_VLProcessor, exercises: Sequence[ImageExercise]) -> ImageReadings:
    """Encode one chat an exercise, as verl asks it, with the answer's tokens and the end token as labels.

    Raises:
        ValueError: answers to different questions have different numbers of tokens.
    """
    tokenizer, rows, starts, labels, pictures = processor.tokenizer, [], [], [], []
    for exercise in exercises:
        text = exercise.problem.removeprefix("<image>")
        parts = [{"type": "image"}, {"type": "text", "text": f"{text} {INSTRUCTION}"}]
        question = processor.apply_chat_template([{"role": "user", "content": parts}], add_generation_prompt=True)
        encoded = processor(text=[question], images=[exercise.picture.draw()], return_tensors="pt")
        pictures.append(encoded["pixel_values"])
        answers = [tokenizer.encode(exercise.solution(each), add_special_tokens=False) for each in QUESTIONS]
        labels.append(torch.tensor([[*answer, tokenizer.eos_token_id] for answer in answers]).t())
        prompt = encoded["input_ids"][0].tolist()
        rows.append([*prompt, *answers[list(QUESTIONS).index(exercise.question)]])
        starts.append(len(prompt) - 1)
    inputs = torch.full((len(rows), max(map(len, rows))), tokenizer.pad_token_id)
    mask = torch.zeros_like(inputs)
    for index, row in enumerate(rows):
        inputs[index, : len(row)], mask[index, : len(row)] = torch.tensor(row), 1
    answered = torch.tensor(starts).unsqueeze(1) + torch.arange(len(labels[0]))
    asked = torch.tensor([list(QUESTIONS).index(exercise.question) for exercise in exercises])
    grid = encoded["image_grid_thw"]
    return ImageReadings(inputs, mask, answered, torch.stack(labels), torch.stack(pictures), grid, asked)


@torch.no_grad()
def expected_reward(model: PreTrainedModel, readings: ImageReadings) -> float:
    """Return the mean probability of the right answers: the mean reward of samples at temperature 1."""
    rows = torch.arange(len(readings.asked))
    return readings.log_probs(model, rows)[rows, :, readings.asked].sum(dim=1).exp().mean().item()


def train(
    model: PreTrainedModel,
    processor: Qwen2_5_VLProcessor,
    settings: WarmStart,
    seed: int,
    progress: Callable[[int, float], None],
) -> float:
    """Train `model` (float32) in place, with Adam on the cross entropy of the readings, each with its share.

    Args:
        settings: its `right_sign_share` is the share of labels that answer the question that was asked.
        seed: draws the pictures and the batches.
        progress: called after every step with the number of steps done and the loss.

    Returns:
        The expected reward on pictures that were not shown, after the last step.
    """
    generator = torch.Generator().manual_seed(seed)
    shown, unseen = draw_exercises(seed, PICTURES)
    readings = encode_image_readings(processor, shown)
    right, parameters = settings.right_sign_share, list(model.parameters())
    others = torch.full((len(shown), len(QUESTIONS)), (1 - right) / (len(QUESTIONS) - 1))
    shares = others.scatter(1, readings.asked.unsqueeze(1), right)
    optimizer = torch.optim.Adam(parameters, lr=settings.learning_rate, betas=(0.9, 0.98), fused=True)
    for step in range(settings.steps):
        optimizer.param_groups[0]["lr"] = settings.learning_rate_at(step)
        chosen = torch.randint(len(shown), (settings.batch_size,), generator=generator)
        loss = -(readings.log_probs(model, chosen) * shares[chosen].unsqueeze(1)).sum(dim=(1, 2)).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        progress(step + 1, loss.item())
    return expected_reward(model, encode_image_readings(processor, unseen))
