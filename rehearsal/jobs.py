"""The overlay's configurations on a machine without NPUs: jobs to rehearse, and scales for larger jobs."""

from dataclasses import dataclass

from rehearsal.tiny_model.architecture import DEFAULT_MODEL_TYPE


@dataclass(frozen=True)
class Job:
    """A job to rehearse.

    Attributes:
        configuration: name of a file of `verl_patches/trainer/config`.
        model_type: the tiny model's family, a key of `TINY_MODELS`.
        dies: default number of emulated dies.
        settings: Hydra overrides that scale the configuration down; they lose against the user's.
    """

    configuration: str
    model_type: str = DEFAULT_MODEL_TYPE
    dies: int = 4
    settings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Scale:
    """Scales a job of many nodes down to 8 emulated dies.

    Attributes:
        setting: the Hydra override.
        model_type: the tiny model's family, a key of `TINY_MODELS`.
    """

    setting: str
    model_type: str


_SCALED_DEEPSEEK = Scale("+scale=emulated_8_dies", "deepseek_v3")
_TINY_VISION = "+scale=emulated_qwen2_5_vl"
_ROLLOUT_TP = "actor_rollout_ref.rollout.tensor_model_parallel_size"
_SCALES = {
    "qwen2_5_32b_dapo": Scale("+scale=emulated_qwen2_5_32b", "qwen2"),
    "qwen2_5_vl_32b_geo3k": Scale(_TINY_VISION, "qwen2_5_vl"),
}


def scale_of(configuration: str) -> Scale:
    """Return the scale for a configuration of `verl_patches/trainer/config` with many nodes."""
    return _SCALES.get(configuration, _SCALED_DEEPSEEK)


DEFAULT_JOB = "rehearsal"
# The job of a model whose prompts may hold images.
IMAGE_JOB = "rehearsal_images"
_TINY_QWEN = "+scale=emulated_qwen2_5"
JOBS = {
    job.configuration: job
    for job in (
        Job(DEFAULT_JOB),
        Job(IMAGE_JOB, "qwen2_5_vl", dies=2),
        Job("qwen2_5_0_5b_gsm8k", "qwen2", dies=2, settings=(_TINY_QWEN,)),
        Job("qwen2_5_1_5b_math_one_card", "qwen2", dies=1, settings=(_TINY_QWEN,)),
        Job("qwen2_5_vl_3b_geo3k_one_card", "qwen2_5_vl", dies=2, settings=(_TINY_VISION, f"{_ROLLOUT_TP}=1")),
        Job("qwen2_5_vl_7b_geo3k", "qwen2_5_vl", dies=2, settings=(_TINY_VISION,)),
    )
}
