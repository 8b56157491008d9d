"""The second node of an engine: vLLM's headless launcher with the arguments of the first, in a separate process.

python headless_node.py '{"model": ..., "nnodes": 2, "node_rank": 1, ...}'
"""

from __future__ import annotations

import argparse
import json
import sys


def main() -> None:
    from vllm.entrypoints.cli.serve import run_headless
    from vllm.plugins import load_general_plugins

    load_general_plugins()  # the command line does the same
    run_headless(
        argparse.Namespace(
            **json.loads(sys.argv[1]), api_server_count=0, reasoning_parser_plugin=None, reasoning_parser=None
        )
    )


if __name__ == "__main__":
    main()
