"""YaRN rotary position embedding, written from the paper.

Bowen Peng et al., "YaRN: Efficient Context Window Extension of Large Language Models", https://arxiv.org/abs/2309.00071.
Definition 2 (NTK-by-parts) gives the frequencies, equation 22 the attention temperature. DeepSeek-V3 applies the
temperature with two coefficients (arXiv:2412.19437, section 4.3 and its published configuration): the ratio
``m(mscale) / m(mscale_all_dim)`` scales cosine and sine, ``m(mscale_all_dim) ** 2`` scales the softmax.
"""

import math

import torch


def attention_temperature(factor: float, coefficient: float) -> float:
    """``0.1 * coefficient * ln(factor) + 1`` (YaRN, equation 22 with DeepSeek's coefficient); 1 without extension."""
    return 1.0 if factor <= 1 else 0.1 * coefficient * math.log(factor) + 1.0


def yarn_frequencies(
    dim: int, base: float, factor: float, original_context: int, beta_fast: float, beta_slow: float
) -> torch.Tensor:
    """Return angular frequencies of the ``dim / 2`` rotary planes, fp32 [dim / 2] on the host, in radians per token.

    A plane that turns more than ``beta_fast`` times within ``original_context`` tokens keeps its frequency, one that
    turns fewer than ``beta_slow`` times has it divided by ``factor``; between the two the mix is linear in the index of
    the plane. The two bounds are rounded outwards to whole planes, as DeepSeek-V3 was trained.
    """
    plane = torch.arange(dim // 2, dtype=torch.float32)
    frequencies = base ** (-2.0 * plane / dim)
    if factor <= 1:
        return frequencies

    def plane_with_rotations(rotations: float) -> float:
        # Solve original_context * base ** (-2 * plane / dim) = 2 * pi * rotations for the plane.
        return dim * math.log(original_context / (2 * math.pi * rotations)) / (2 * math.log(base))

    first = max(math.floor(plane_with_rotations(beta_fast)), 0)
    last = min(math.ceil(plane_with_rotations(beta_slow)), dim - 1)
    interpolated = ((plane - first) / max(last - first, 1e-3)).clamp(0, 1)
    return frequencies * (1 - interpolated) + frequencies / factor * interpolated


class YarnRotaryEmbedding:
    """Cosine and sine of the rotary angles of given positions.

    Not a module: it holds no state to save, and its fp32 frequencies must not be cast with the model.
    """

    def __init__(
        self,
        dim: int,
        base: float,
        factor: float = 1.0,
        original_context: int = 4096,
        beta_fast: float = 32.0,
        beta_slow: float = 1.0,
        mscale: float = 1.0,
        mscale_all_dim: float = 0.0,
    ) -> None:
        self._frequencies = yarn_frequencies(dim, base, factor, original_context, beta_fast, beta_slow)
        self._amplitude = attention_temperature(factor, mscale) / attention_temperature(factor, mscale_all_dim)

    def __call__(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosine and sine, each ``dtype`` [tokens, 1, dim], for integer ``positions`` [tokens].

        The angle of a plane is in both halves of the last axis, as ``npu_rotary_mul`` needs it in half mode.
        """
        if self._frequencies.device != positions.device:
            self._frequencies = self._frequencies.to(positions.device)
        angles = torch.outer(positions.float(), self._frequencies)
        angles = torch.cat((angles, angles), dim=-1).unsqueeze(1)
        return (angles.cos() * self._amplitude).to(dtype), (angles.sin() * self._amplitude).to(dtype)
