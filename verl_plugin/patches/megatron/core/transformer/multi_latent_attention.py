"""Megatron-core 0.16.1 believes that TransformerEngine is there, wherever MLA is built.

`megatron.core.transformer.multi_latent_attention` takes a successful import of Megatron-core's own extension for
TransformerEngine itself. That extension imports without it, and its `TELinear` is None then, so that building MLA ends
in `isinstance(..., None)`.

No extension point: the name is read in `MultiLatentAttention.__init__`, before anything that a spec can choose.
Upstream: not reported. Remove when Megatron-core takes HAVE_TE from the extension itself.
"""

from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.transformer import multi_latent_attention


def apply() -> None:
    """Gives the module the answer of the extension itself."""
    multi_latent_attention.HAVE_TE = HAVE_TE
