"""The feature router_precision: the rollout chooses experts from float32 scores and biases, as training does."""

from overlay import Feature

ROUTER_PRECISION = Feature(
    "router_precision", "The rollout's routers score tokens in float32 and keep their bias in float32, as in training."
)
