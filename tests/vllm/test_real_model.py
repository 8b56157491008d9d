"""A real model with real prompts: its texts are vanilla's, and no byte of a rejected draft stays in the cache."""

from __future__ import annotations

from typing import Any

import pytest
from engine_checks import COW, STAGE, check_transaction, check_vllm_counts
from engines import Engines

from nwor_ops.testing.real_model import PACKAGES, PROMPTS, chats, is_installed, model_folder


@pytest.mark.long
@pytest.mark.parametrize("nwor", [COW, STAGE], ids=["cow", "stage"])
@pytest.mark.skipif(not is_installed(), reason=f"the packages {PACKAGES} are not installed (`make test` installs them)")
def test_texts_of_real_model(engines: Engines, nwor: dict[str, Any]) -> None:
    prompts = chats([prompt for kind in PROMPTS.values() for prompt in kind[:2]])
    # The audit compares the whole cache at each step, so it has few blocks.
    arguments = {"model": str(model_folder()), "load_format": "auto", "max_tokens": 40, "num_gpu_blocks_override": 40}
    vanilla, ours = engines.pair(prompts, nwor, **arguments)
    assert ours["tokens"] == vanilla["tokens"]
    # In real text many a step has no draft of a request, so that its shadow page must be filled again.
    ours["session"].pop("copied_rows")
    audit = check_transaction(ours)
    check_vllm_counts(ours)
    assert 0.1 < audit["accepted"] / audit["drafted"] < 0.9
