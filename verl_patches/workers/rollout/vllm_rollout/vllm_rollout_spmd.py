"""verl's rollout draws new samples at every step and on every engine."""

from overlay import wrap
from verl_patches.features.compatibility import ROLLOUT_SEED


@wrap(
    "verl.workers.rollout.vllm_rollout.vllm_rollout_spmd:vLLMRollout.__init__",
    feature=ROLLOUT_SEED,
    evidence="executed",
    why="verl copies rollout.seed into every request, which then samples with the same noise at every step, and gives "
    "all data-parallel engines one seed",
    upstream="not forwarded: verl leaves rollout.seed unset, and its runs cannot be repeated",
    remove_when="verl seeds the engine and not the requests",
    relies_on=["vllm.sampling_params:SamplingParams"],
)
def init(upstream, self, model_path, config, tokenizer, model_hf_config, **options):
    if config.get("seed") is None or "device_mesh" not in options:
        return upstream(self, model_path, config, tokenizer, model_hf_config, **options)
    import copy

    engines = options["device_mesh"]["dp"]
    seeded = copy.deepcopy(config)
    seeded.seed = config.seed * engines.size() + engines.get_local_rank()
    upstream(self, model_path, seeded, tokenizer, model_hf_config, **options)
    self.config = config
    self.sampling_params.seed = None
