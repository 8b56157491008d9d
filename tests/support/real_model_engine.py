"""Run a real model with a draft model on real prompts: ``real_model_engine.py TARGET DRAFTER``.

Prints a line of JSON: drafted and accepted tokens by kind of prompt, and the texts. The environment has the settings of
nwor_ops.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from nwor_ops.testing.real_model import PROMPTS


def main() -> None:
    from vllm import LLM, SamplingParams

    target, drafter = sys.argv[1:]
    speculation = {"method": "draft_model", "model": drafter, "num_speculative_tokens": 4}
    llm = LLM(
        model=target, speculative_config=speculation, max_model_len=1024, max_num_seqs=8, gpu_memory_utilization=0.2,
        disable_log_stats=False,
    )  # fmt: skip
    answer: dict[str, Any] = {}
    before = [0, 0]
    for kind, prompts in PROMPTS.items():
        chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
        outputs = llm.chat(chats, SamplingParams(temperature=0.0, max_tokens=250), use_tqdm=False)
        metrics = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
        after = [metrics[f"vllm:spec_decode_num_{name}_tokens"] for name in ("draft", "accepted")]
        drafted, accepted = (new - old for new, old in zip(after, before, strict=True))
        before = after
        answer[kind] = {
            "drafted": drafted, "accepted": accepted, "texts": [output.outputs[0].text for output in outputs],
        }  # fmt: skip
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
