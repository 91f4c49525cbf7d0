"""The options of MindSpeed-LLM's converters that describe the layout of shards."""

import argparse

from post_training.checkpoint.megatron_form import MegatronForm
from post_training.layouts.layout import TrainPlacement
from post_training.models.deepseek_v3 import DeepseekV3Shape


def add_layout_options(parser: argparse.ArgumentParser, side: str) -> None:
    """Add the options. `side` is `target` for shards that are written and `source` for shards that are read."""
    for name, what in (("tensor", "tensor"), ("pipeline", "pipeline"), ("expert", "expert")):
        parser.add_argument(
            f"--{side}-{name}-parallel-size",
            type=int,
            default=1,
            metavar="N",
            help=f"{what} parallel size of the shards (default: 1)",
        )
    parser.add_argument("--num-layers", type=int, help="checked against config.json")
    parser.add_argument("--first-k-dense-replace", type=int, help="checked against config.json")
    parser.add_argument("--num-layer-list", metavar="N,N,...", help="layers of every pipeline stage (default: equal)")
    parser.add_argument(
        "--num-layers-per-virtual-pipeline-stage", type=int, metavar="N", help="layers of every model chunk"
    )
    parser.add_argument("--moe-grouped-gemm", action="store_true", help="all experts of a layer in two weights")
    parser.add_argument(
        "--moe-tp-extend-ep", action="store_true", help="whole experts over tensor x expert parallel ranks"
    )
    parser.add_argument("--mla-mm-split", action="store_true", help="four up-projections of MLA instead of two")
    parser.add_argument(
        "--num-nextn-predict-layers",
        type=int,
        default=0,
        metavar="N",
        help="layers for multi-token prediction in the shards, 0 or 1 (default: 0)",
    )


def layout_form(options: argparse.Namespace, side: str, shape: DeepseekV3Shape) -> MegatronForm:
    """Return the form that the options describe. Raises ValueError if they contradict the model or each other."""
    for option, value in (("num_layers", shape.layers), ("first_k_dense_replace", shape.dense_layers)):
        given = getattr(options, option)
        if given not in (None, value):
            raise ValueError(f"--{option.replace('_', '-')}={given} is invalid. Set it to {value}, as in config.json")
    if options.num_nextn_predict_layers > shape.mtp_layers:
        raise ValueError(
            f"--num-nextn-predict-layers={options.num_nextn_predict_layers} is invalid. Set it to "
            f"{shape.mtp_layers}, as in config.json"
        )
    _check_counts(options, side)
    sizes = {name: getattr(options, f"{side}_{name}_parallel_size") for name in ("tensor", "pipeline", "expert")}
    layers, chunks = _layer_list(options, sizes["pipeline"], shape.layers)
    placement = TrainPlacement(
        tp=sizes["tensor"],
        pp=sizes["pipeline"],
        ep=sizes["expert"],
        dp=sizes["expert"],
        num_layer_list=layers,
        moe_tp_extend_ep=options.moe_tp_extend_ep,
        virtual_stages=chunks,
    )
    return MegatronForm(
        placement, options.mla_mm_split, options.moe_grouped_gemm, mtp_layers=options.num_nextn_predict_layers
    )


def _check_counts(options: argparse.Namespace, side: str) -> None:
    """Raise ValueError for a size below 1, or a negative number of layers."""
    sizes = [f"{side}_{name}_parallel_size" for name in ("tensor", "pipeline", "expert")]
    lowest = dict.fromkeys([*sizes, "num_layers_per_virtual_pipeline_stage"], 1) | {"num_nextn_predict_layers": 0}
    for option, least in lowest.items():
        given = getattr(options, option)
        if given is not None and given < least:
            raise ValueError(f"--{option.replace('_', '-')}={given} is invalid. Set it to at least {least}")


def _layer_list(options: argparse.Namespace, stages: int, layers: int) -> tuple[tuple[int, ...], int]:
    """Return the layers of every model chunk of the pipeline, and the number of chunks of each stage."""
    if options.num_layer_list is not None:
        if options.num_layers_per_virtual_pipeline_stage is not None:
            raise ValueError("--num-layer-list and --num-layers-per-virtual-pipeline-stage exclude each other")
        parts = options.num_layer_list.split(",")
        if not all(part.isdecimal() for part in parts):
            raise ValueError(f"--num-layer-list={options.num_layer_list} is invalid. Set it to a list such as 7,7,8")
        return tuple(int(part) for part in parts), 1
    size = options.num_layers_per_virtual_pipeline_stage
    parts = stages if size is None else layers // size
    if parts < 1 or layers % parts or parts % stages or size not in (None, layers // parts):
        raise ValueError(
            f"{layers} layers cannot be divided equally over {stages} pipeline stages"
            + (f" in chunks of {size}" if size else ". Set --num-layer-list")
        )
    return (layers // parts,) * parts, parts // stages
