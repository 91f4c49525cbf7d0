"""The jobs that can be rehearsed: a configuration of the overlay, and what a machine without NPUs makes of it."""

from dataclasses import dataclass

from rehearsal.tiny_model.architecture import DEFAULT_MODEL_TYPE


@dataclass(frozen=True)
class Job:
    """A job to rehearse.

    Attributes:
        configuration: name of a file of `verl_patches/trainer/config`.
        model_type: the tiny model's family, a key of `TINY_MODELS`.
        dies: emulated dies, where the user asks for no other number.
        settings: Hydra overrides that scale the configuration down; they lose against the user's.
    """

    configuration: str
    model_type: str = DEFAULT_MODEL_TYPE
    dies: int = 4
    settings: tuple[str, ...] = ()


DEFAULT_JOB = "rehearsal"
_TINY_QWEN = "+scale=emulated_qwen2_5"
JOBS = {
    job.configuration: job
    for job in (
        Job(DEFAULT_JOB),
        Job("qwen2_5_0_5b_gsm8k", "qwen2", dies=2, settings=(_TINY_QWEN,)),
        Job("qwen2_5_1_5b_math_one_card", "qwen2", dies=1, settings=(_TINY_QWEN,)),
    )
}
