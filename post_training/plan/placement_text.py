"""Parses placements, models and sizes from a command line."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from post_training.layouts.layout import RolloutPlacement, Table, TrainPlacement
from post_training.models.families import families, table_for
from post_training.user_files import FileError, read_object

KNOWN: Mapping[str, Callable[[], Table]] = {
    name: partial(family.table, values) for family in families() for name, values in family.published.items()
}

UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def parse_model(text: str) -> Table:
    """Read a name in KNOWN, or the path of a config.json. Raises ValueError for anything else."""
    if text in KNOWN:
        return KNOWN[text]()
    path = Path(text)
    if not path.is_file():
        raise ValueError(f"--model={text} is invalid: neither {' nor '.join(KNOWN)} nor a file")
    try:
        return table_for(read_object(path))
    except FileError as error:
        raise ValueError(f"--model={text} is invalid: not a config.json ({error})") from error


def parse_bytes(text: str) -> int:
    """Read a number of bytes: `1GiB`, `512MiB`, `4096`. Raises ValueError for anything else."""
    unit = next((unit for unit in UNITS if text.endswith(unit)), "")
    number = text.removesuffix(unit) if unit else text
    if not number.isdecimal() or int(number) == 0:
        raise ValueError(f"{text}: not a size such as 1GiB, 512MiB or 4096")
    return int(number) * UNITS.get(unit, 1)


def parse_placements(train: str, rollout: str, layers: int) -> tuple[TrainPlacement, RolloutPlacement]:
    """Read `tp4,pp8,ep8,tp_extend,layers=7/7/8` and `tp2,ep256[,dpN][,instancesN][,shared_tp]`.

    Without `dp`, the rollout has as many data parallel ranks as its experts need, and training fills the same world.
    Without `layers`, stages are equal. `shared_tp`: the shared expert is cut over tp instead of replicated.
    Raises ValueError for an unknown word or sizes that do not fit.
    """
    served, flags = _words(rollout, ("tp", "dp", "ep", "instances"), ("shared_tp",), "--rollout")
    tp, ep = served.get("tp", 1), served.get("ep", 1)
    placement = RolloutPlacement(
        tp=tp,
        dp=served.get("dp", max(ep // tp, 1)),
        ep=ep,
        instances=served.get("instances", 1),
        shared_expert_replicated="shared_tp" not in flags,
    )
    parallel, _, listed = train.partition(",layers=")
    sizes, flags = _words(parallel, ("tp", "pp", "ep", "dp"), ("tp_extend",), "--train")
    tp, pp = sizes.get("tp", 1), sizes.get("pp", 1)
    if listed and not all(part.isdecimal() for part in listed.split("/")):
        raise ValueError(f"--train layers={listed}: not a list such as 7/7/8 at the end")
    if not listed and layers % pp:
        raise ValueError(f"--train: {layers} layers do not divide over pp{pp}; add layers=A/B/...")
    trained = TrainPlacement(
        tp=tp,
        pp=pp,
        ep=sizes.get("ep", 1),
        dp=sizes.get("dp", max(placement.world_size // (tp * pp), 1)),
        num_layer_list=tuple(int(part) for part in listed.split("/")) if listed else (layers // pp,) * pp,
        moe_tp_extend_ep="tp_extend" in flags,
    )
    if trained.world_size != placement.world_size:
        raise ValueError(f"training has {trained.world_size} ranks, but the rollout {placement.world_size}")
    return trained, placement


def _words(
    text: str, numbered: tuple[str, ...], flags: tuple[str, ...], option: str
) -> tuple[dict[str, int], set[str]]:
    sizes, found = {}, set()
    for word in text.split(","):
        name = word.rstrip("0123456789")
        if word in flags:
            found.add(word)
        elif name in numbered and word != name and int(word[len(name) :]) > 0:
            sizes[name] = int(word[len(name) :])
        else:
            raise ValueError(f"{option} {text}: unknown word {word!r}. Known are {', '.join((*numbered, *flags))}")
    return sizes, found
