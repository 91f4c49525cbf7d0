"""Megatron-core 0.16.1 lacks a name for TransformerEngine's product in a router, where that is not installed.

`megatron.core.transformer.moe.moe_utils` imports `te_general_gemm` with TransformerEngine and has no such name
otherwise; `RouterGatingLinearFunction` then asks whether it is None, which is a NameError for every router.

No extension point: the function is called by `Router.gating` directly.
Upstream: not reported. Remove when Megatron-core defines the name as None.
"""

from megatron.core.transformer.moe import moe_utils


def apply() -> None:
    """Defines the name where it is missing: Megatron-core then multiplies with torch."""
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
