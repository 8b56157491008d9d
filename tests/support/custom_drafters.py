"""Drafters that a user could have written. vLLM creates the class that `speculative_config.model` names."""

from __future__ import annotations

from typing import Any

from nwor_ops.testing.tiny_llama import successor

DRAFTS = 3


class Successors:
    """A drafter without a model that knows the rule of the tiny language. See
    vllm/v1/spec_decode/custom_class_proposer.py."""

    def __init__(self, vllm_config: Any) -> None:
        self.vllm_config = vllm_config

    def load_model(self, target_model: Any) -> None:
        """Do nothing; vLLM's CPU runner calls this method."""

    def propose(self, sampled_token_ids: list[list[int]], *_: Any, **__: Any) -> list[list[int]]:
        drafts = []
        for sampled in sampled_token_ids:
            chain = sampled[-1:]
            while chain and len(chain) <= DRAFTS:
                chain.append(successor(chain[-1]))
            drafts.append(chain[1:])
        return drafts


class SilentOwner(Successors):
    """A drafter that has a layer with a KV cache, and does not name it."""

    layer = "drafter.layers.9.attention"

    def load_model(self, target_model: Any) -> None:
        from vllm.model_executor.layers.attention import Attention

        self.attention = Attention(
            num_heads=4,
            head_size=64,
            scale=0.125,
            num_kv_heads=2,
            cache_config=self.vllm_config.cache_config,
            prefix=self.layer,
        )


class NamingOwner(SilentOwner):
    """A drafter that names its layer."""

    draft_attn_layer_names = (SilentOwner.layer,)
