"""The features of the plugin, and what each supports: vLLM versions, devices, methods, back ends, models, sizes."""

from __future__ import annotations

# The features: the transaction (modes cow and stage), draft graphs, and one recurrent state per request.
TRANSACTION, DRAFT_GRAPHS, RECURRENT = "transaction", "draft graphs", "recurrent"
DRAFT_VOCABULARY = "draft vocabulary"
NO_SPECULATION = "the engine does not speculate"
SUPPORTED_VERSIONS = {TRANSACTION: ("0.32", "0.33")} | dict.fromkeys(
    (DRAFT_GRAPHS, RECURRENT, DRAFT_VOCABULARY), ("0.33",)
)
DEVICES = {TRANSACTION: ("cpu", "cuda"), DRAFT_GRAPHS: ("cuda",), RECURRENT: ("cuda",), DRAFT_VOCABULARY: ("cuda",)}
# Draft graphs: supported methods by model runner. For the transaction, see runners/base.py (drafters) and
# layers/back_ends.py (attention).
DRAFT_METHODS = {"V2": ("draft_model",), "V1": ("draft_model", "eagle", "eagle3", "mtp")}
DRAFT_BACK_ENDS = ("FLASH_ATTN", "TRITON_ATTN")
DRAFT_CACHE_SPECS = ("FullAttentionSpec", "SlidingWindowSpec")
CACHE_SPECS = (*DRAFT_CACHE_SPECS, "MLAAttentionSpec")
KEY_WIDTHS, VALUE_WIDTHS = (64, 96, 128, 256), (64, 128, 192, 256)  # elements per head of a recurrent state
# This compiler pass in vLLM replaces the cache writer of MLA layers with a kernel that also rotates the key. The
# passes for other layers exist only for ROCm.
FUSED_MLA_WRITER = "fuse_rope_kvcache_cat_mla"
