"""verl's vocabulary-parallel entropy runs as it is written."""

from overlay import wrap


@wrap(
    "verl.utils.megatron.tensor_parallel:_VocabParallelEntropy.forward",
    feature="megatron_on_npu",
    why="it compiles a helper at every call, and torch.compile's default backend has no code generator for an NPU",
    upstream="not forwarded: on Ascend, MindSpeed replaces torch.compile for the whole process",
    remove_when="torch.compile generates code for an NPU by default",
)
def forward(upstream, *args):
    from verl_patches.features.eager.compilation import without_compilation

    with without_compilation():
        return upstream(*args)
