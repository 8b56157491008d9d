"""vLLM's server with a tiny random Llama, and the samples of its ``/metrics`` with their labels."""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import readme_serve
from engines import ENVIRONMENT, NGRAM, model_folder
from prometheus_client.parser import text_string_to_metric_families

from nwor_ops.testing.engine_process import PROGRAM


class Server(readme_serve.Server):
    """vLLM's server with a tiny model. Its log and its temporary files are in its own folder."""

    def __init__(self, environment: dict[str, str], *arguments: str) -> None:
        self.folder = tempfile.mkdtemp(prefix="nwor-serve-")
        settings = {
            "--model": model_folder(),
            "--load-format": "dummy",
            "--max-model-len": "256",
            "--max-num-seqs": "8",
            "--num-gpu-blocks-override": "96",
            "--block-size": "32",
            "--served-model-name": "tiny",
            "--speculative-config": json.dumps(NGRAM),
        }
        words = ["--enforce-eager", "--skip-tokenizer-init", *itertools.chain(*settings.items()), *arguments]
        program = (sys.executable, "-m", "vllm.entrypoints.openai.api_server")
        if "--api-server-count" in arguments:
            program = PROGRAM
        variables = ENVIRONMENT | {"TMPDIR": self.folder} | environment
        super().__init__(program, words, variables, Path(self.folder, "log"))

    def scrape(self) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
        """Return the samples by name and labels."""
        found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
        for family in text_string_to_metric_families(self.get("/metrics")):
            for sample in family.samples:
                found.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
        return found

    def _body(self, prompt: list[int], max_tokens: int) -> dict[str, Any]:
        return super()._body(prompt, max_tokens) | {"model": "tiny", "detokenize": False}


@contextlib.contextmanager
def running(server: Server) -> Iterator[None]:
    """Wait until a server answers, and stop it at the end. Its output is shown if a test fails."""
    try:
        with readme_serve.running(server, seconds=900):  # the machine may be busy
            yield
    finally:
        print(server.log)
        shutil.rmtree(server.folder)
