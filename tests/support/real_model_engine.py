"""Run a real model with a draft model on real prompts: ``real_model_engine.py TARGET DRAFTER``.

Prints a line of JSON: drafted and accepted tokens by kind of prompt, and the texts. The answers of the last kind follow
a schema. The environment has the settings of nwor_ops.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from nwor_ops.testing.real_model import PROMPTS

WORDS = {"type": "string", "maxLength": 40}
SCHEMA = {
    "type": "object",
    "properties": {
        "topic": WORDS,
        "level": {"enum": ["easy", "hard"]},
        "steps": {"type": "array", "items": WORDS, "minItems": 1, "maxItems": 3},
    },
    "required": ["topic", "level", "steps"],
    "additionalProperties": False,
}


def main() -> None:
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    target, drafter = sys.argv[1:]
    speculation = {"method": "draft_model", "model": drafter, "num_speculative_tokens": 4}
    llm = LLM(
        model=target, speculative_config=speculation, max_model_len=1024, max_num_seqs=12, gpu_memory_utilization=0.1,
        kv_cache_memory_bytes=2 << 30, disable_log_stats=False,
        structured_outputs_config={"backend": "xgrammar", "disable_any_whitespace": True},
    )  # fmt: skip
    answer: dict[str, Any] = {}
    before = [0, 0]
    for kind, prompts in {**PROMPTS, "JSON": PROMPTS["English"]}.items():
        schema = StructuredOutputsParams(json=SCHEMA) if kind == "JSON" else None
        params = SamplingParams(temperature=0.0, max_tokens=250, structured_outputs=schema)
        chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
        outputs = llm.chat(chats, params, use_tqdm=False)
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
