"""vLLM's ExampleConnector, which loads all tokens of a prompt but the last one if they end with a block.

ExampleConnector leaves at least two tokens. If one is left, vLLM pads the request with drafts. So the step that loads
its rows also has its drafts.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector, align_to_block_size


class LoadingConnector(ExampleConnector):
    """Load whole prompts. See the module docstring."""

    reads_kv_cache_in_order = True

    def _found_match_for_prompt(self, prompt_token_ids: list[int], mm_hashes: list[str]) -> bool:
        return super()._found_match_for_prompt([*prompt_token_ids, 0], mm_hashes)  # of one token more, it finds all

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        tokens = request.prompt_token_ids
        if not self._found_match_for_prompt(tokens, []):
            return 0, False
        return align_to_block_size(len(tokens), self._block_size) - num_computed_tokens, False
