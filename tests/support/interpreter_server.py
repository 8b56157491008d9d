"""Run scripts in Triton's interpreter, each in a fork of this process, which has imported vLLM.

:func:`processes.interpreted` starts it. The import takes longer than most scripts.

Each line of the input is a script as JSON: the path, its arguments, the files of its output and its errors, and the
seconds after which it is killed. The answer is its exit code. The process ends when the input ends.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import signal
import sys
import traceback
from typing import NoReturn

from interpreter import use_interpreter

# What most scripts import. No script changes these before it is forked.
MODULES = (
    "nwor_ops.vllm.recurrent.layer",
    "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn",
    "vllm.v1.attention.backends.gdn_attn",
    "vllm.v1.spec_decode.draft_model",
    "vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator",
    "vllm.v1.worker.mamba_utils",
)


def run(script: str, arguments: list[str], output: str, errors: str, seconds: int) -> NoReturn:
    """Run a script as ``python SCRIPT ARGUMENTS`` does, and end this process."""
    for stream, file in ((0, os.devnull), (1, output), (2, errors)):
        os.dup2(os.open(file, os.O_RDWR), stream)
    signal.alarm(seconds)
    sys.argv = [script, *arguments]
    code = 1
    try:
        runpy.run_path(script, run_name="__main__")
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM logs to the standard output
    use_interpreter()
    for name in MODULES:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        if (child := os.fork()) == 0:
            run(*json.loads(line))
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), file=answers, flush=True)


if __name__ == "__main__":
    main()
