"""verl finds layers on pipeline stages of different lengths."""

from overlay import wrap


@wrap(
    "verl.utils.megatron_utils:get_transformer_layer_offset",
    feature="deepseek_v3",
    why="verl knows only stages of equal length with a shorter first or last one; num_layer_list names every stage",
    upstream="not forwarded: num_layer_list is MindSpeed-LLM's option",
    remove_when="verl reads the layer offset from the model itself",
)
def get_transformer_layer_offset(upstream, pipeline_rank, vp_rank, config):
    if hasattr(config, "first_layer_of_stage"):
        return config.first_layer_of_stage(pipeline_rank)
    return upstream(pipeline_rank, vp_rank, config)
