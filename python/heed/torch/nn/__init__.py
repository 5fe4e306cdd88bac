# The package heed.torch.nn: layers as torch modules, whose weights are those of Transformers' modules of the same kind.
"""Layers of heed as torch modules: operators of heed.torch between torch's linear maps.

Every layer takes rows x [B, T, hidden_size] and gives rows of the same shape:

    y = layer(x)                      # a whole sequence, with gradients
    y = layer(x, lengths=n)           # n [B]: tokens at or beyond it are padding, whose rows of y mean nothing

and every causal one goes on from where it was, by one state object:

    state = layer.new_state(batch)
    with torch.no_grad():
        y = layer(prompt, state)      # the next tokens, as many as there are
    y = layer.step(token, state)      # one more: [B, hidden_size] -> [B, hidden_size]
    other = state.fork(); state.reorder(indices); state.nbytes; state.lengths

A state of attention is a cache of heed.torch in the layer's dtype, that of a recurrence is a `State` in float32, or
float64 for a layer of float64. Nothing that is computed with one has a gradient. Constructors take numbers;
`from_config` takes those of a configuration of Transformers: an object of version 4 or 5, or the fields of config.json
as a dict. Parameters have the names and shapes of Transformers' module that a layer's text names, so that
load_state_dict loads its weights as they are. Transformers itself is not needed. Errors are heed.InvalidArgument, which
names the layer and the argument; a configuration of another family, or a field that would change what the layer
computes and that it does not read, is heed.Unsupported, which names the field and its value.
"""

from heed.torch.nn._gated_delta import GatedDeltaNet
from heed.torch.nn._gated_linear import GatedLinearAttention
from heed.torch.nn._grouped import GroupedQueryAttention
from heed.torch.nn._h3 import H3
from heed.torch.nn._latent import LatentAttention
from heed.torch.nn._layer import Residual, State
from heed.torch.nn._mamba import Mamba
from heed.torch.nn._mamba2 import Mamba2
from heed.torch.nn._multihead import MultiheadAttention
from heed.torch.nn._retention import MultiScaleRetention
from heed.torch.nn._rwkv import Rwkv4
from heed.torch.nn._rwkv6 import Rwkv6
from heed.torch.nn._sparse import BigBirdAttention, LongformerAttention

__all__ = [
    "BigBirdAttention",
    "GatedDeltaNet",
    "GatedLinearAttention",
    "GroupedQueryAttention",
    "H3",
    "LatentAttention",
    "LongformerAttention",
    "Mamba",
    "Mamba2",
    "MultiScaleRetention",
    "MultiheadAttention",
    "Residual",
    "Rwkv4",
    "Rwkv6",
    "State",
]

for _name in __all__:
    globals()[_name].__module__ = "heed.torch.nn"
