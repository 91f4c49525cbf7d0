"""Names for the points of a forward pass at which rollout and training are compared, independent of model and engine.

In the order of computation: `embedding`; for every layer N `layers.N.attention_norm`, `.attention` (its output, before
the residual is added), `.after_attention` (with the residual), `.mlp_norm`, `.router_logits`, `.experts` (int64, the
chosen ones), `.mlp` (output of the MLP or of all experts) and `.output` (with the residual); `final_norm`; `logits`
(before the temperature); `log_probs` (of the next token, as the trainer gets them).
"""

from __future__ import annotations

from dataclasses import dataclass

EMBEDDING, FINAL_NORM, LOGITS, LOG_PROBS = "embedding", "final_norm", "logits", "log_probs"
ATTENTION_NORM, ATTENTION, AFTER_ATTENTION = "attention_norm", "attention", "after_attention"
MLP_NORM, ROUTER_LOGITS, EXPERTS, MLP, OUTPUT = "mlp_norm", "router_logits", "experts", "mlp", "output"
OF_A_LAYER = (ATTENTION_NORM, ATTENTION, AFTER_ATTENTION, MLP_NORM, ROUTER_LOGITS, EXPERTS, MLP, OUTPUT)
_BEHIND_THE_LAYERS = (FINAL_NORM, LOGITS, LOG_PROBS)


@dataclass(frozen=True, order=True)
class _Place:
    block: int
    layer: int
    within: int


def of_layer(layer: int, part: str) -> str:
    """Return the name of a point of a layer; layers are counted from 0."""
    return f"layers.{layer}.{part}"


def split(point: str) -> tuple[int | None, str]:
    """Split a point into (layer, part); the layer is None outside of layers.

    Raises:
        ValueError: the name is no point.
    """
    if point == EMBEDDING or point in _BEHIND_THE_LAYERS:
        return None, point
    word, _, rest = point.partition(".")
    layer, _, part = rest.partition(".")
    if word != "layers" or not layer.isdecimal() or part not in OF_A_LAYER:
        raise ValueError(f"{point!r} is not a point of a forward pass")
    return int(layer), part


def in_order(points: set[str]) -> list[str]:
    """Sort points in the order of a forward pass."""

    def place(point: str) -> _Place:
        layer, part = split(point)
        if layer is not None:
            return _Place(1, layer, OF_A_LAYER.index(part))
        return _Place(0, 0, 0) if part == EMBEDDING else _Place(2, 0, _BEHIND_THE_LAYERS.index(part))

    return sorted(points, key=place)


def in_words(point: str) -> str:
    """Format a point for a sentence: `layers.3.mlp` is `layer 3, mlp`."""
    layer, part = split(point)
    text = part.replace("_", " ")
    return text if layer is None else f"layer {layer}, {text}"
