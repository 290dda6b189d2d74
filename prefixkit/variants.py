"""The gallery: variants under their usual names, and masks that compose with torch's."""

from torch.nn.attention.flex_attention import and_masks as and_masks
from torch.nn.attention.flex_attention import or_masks as or_masks

from prefixkit.attention.variants.block_tables import block_mask as block_mask
from prefixkit.attention.variants.block_tables import from_block_mask as from_block_mask
from prefixkit.attention.variants.builtin import alibi as alibi
from prefixkit.attention.variants.builtin import attention_sinks as attention_sinks
from prefixkit.attention.variants.builtin import chunked as chunked
from prefixkit.attention.variants.builtin import sigmoid as sigmoid
from prefixkit.attention.variants.builtin import sliding_window as sliding_window
from prefixkit.attention.variants.builtin import soft_cap as soft_cap
from prefixkit.attention.variants.gallery import as_mask_mod as as_mask_mod
from prefixkit.attention.variants.gallery import causal as causal
from prefixkit.attention.variants.gallery import dilated_window as dilated_window
from prefixkit.attention.variants.gallery import document as document
from prefixkit.attention.variants.gallery import draft_tree as draft_tree
from prefixkit.attention.variants.gallery import full as full
from prefixkit.attention.variants.gallery import not_mask as not_mask
from prefixkit.attention.variants.gallery import prefix_lm as prefix_lm
from prefixkit.attention.variants.gallery import streaming as streaming
from prefixkit.attention.variants.gallery import streaming_llm as streaming_llm
from prefixkit.attention.variants.neighborhoods import natten_1d as natten_1d
from prefixkit.attention.variants.neighborhoods import natten_2d as natten_2d
from prefixkit.attention.variants.neighborhoods import tile_order as tile_order
