"""The feature commands of README.md, run as servers with tiny models, and what the tests ask of them over HTTP."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import pathlib
import re
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from processes import ROOT

from nwor_ops.config import is_ours
from nwor_ops.testing import engine_process as serving
from nwor_ops.vllm.metrics.publisher import PERIOD

# What the README's words stand for.
PLACEHOLDERS = ("MODEL", "DRAFT")
MAX_TOKENS = 40
# Longer than two blocks of any engine of these tests, and short enough that an answer fits.
PREFIX_TOKENS = 400
VOCABULARY = 64
AT_ONCE = 8
QUIET_SECONDS = 2.0
HUNG_UP = 4  # clients of `at_once` that do not wait for their answer


@dataclass(frozen=True)
class Command:
    """A command as README.md has it.

    Attributes:
        feature: the switch that it sets, in lower case and without ``VLLM_NWOR_``.
        environment: the variables in front of it.
        words: all after ``vllm serve``, with the placeholders.
    """

    feature: str
    environment: dict[str, str]
    words: tuple[str, ...]

    def with_models(self, **folders: str) -> list[str]:
        """The words, with a folder in place of each placeholder."""
        pattern = re.compile(rf"\b({'|'.join(PLACEHOLDERS)})\b")
        return [pattern.sub(lambda found: folders[found[0]], word) for word in self.words]

    @property
    def drafts(self) -> int:
        """K."""
        return int(json.loads(self.words[self.words.index("--speculative-config") + 1])["num_speculative_tokens"])


def readme_commands() -> dict[str, Command]:
    """Parse the code blocks of README.md; return the commands that start a server with a model, by feature."""
    found, text = {}, (ROOT / "README.md").read_text()
    for block in re.findall(r"^```bash\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            variables = [word for word in words if re.match(r"VLLM_NWOR_\w+=", word)]
            rest = words[len(variables) :]
            if not variables or rest[:3] != ["vllm", "serve", "MODEL"]:
                continue
            environment = dict(word.split("=", 1) for word in variables)
            feature = "_".join(name.removeprefix("VLLM_NWOR_").lower() for name in environment)
            found[feature] = Command(feature, environment, tuple(rest[2:]))
    return found


# ---------------------------------------------------------------- a server


class Server(serving.Server):
    """Start one server for a test.

    Args:
        program: what runs ``vllm serve``.
        words: its arguments, to which only host and port are added.
        environment: on top of this process's.
        log: a file for its output.
    """

    def __init__(
        self, program: Sequence[str], words: Sequence[str], environment: Mapping[str, str], log: pathlib.Path
    ) -> None:
        self._model = words[0]
        variables = {name: value for name, value in os.environ.items() if not is_ours(name)}
        super().__init__(words, variables | environment, log, program)

    def wait(self, seconds: float) -> Server:
        """Wait until it answers.

        Raises:
            AssertionError: it ended, or the time is up; with the end of its log.
        """
        try:
            self.wait_until_ready(seconds)
        except serving.EngineFailed as error:
            raise AssertionError(f"{error}; the end of {self.log_file}:\n{self.log[-4000:]}") from None
        return self

    def complete(self, prompt: list[int], max_tokens: int = MAX_TOKENS) -> list[int]:
        """The tokens of one answer, at temperature 0."""
        answer = json.loads(self.get("/v1/completions", self._body(prompt, max_tokens)))
        tokens: list[int] = answer["choices"][0]["token_ids"]
        assert len(tokens) == max_tokens, answer
        return tokens

    def hang_up(self, prompt: list[int]) -> None:
        """Ask for a stream, take its first line, and go: vLLM aborts the request."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        body = json.dumps(self._body(prompt, 100) | {"stream": True})
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        connection.getresponse().readline()
        connection.close()

    def metrics_at_rest(self) -> dict[str, float]:
        """Return the metrics after no request runs and the counters have not changed for two seconds.

        One more request brings the counts of the last step.
        """
        time.sleep(2 * PERIOD)
        self.complete([3, 4, 5], max_tokens=1)
        last, since = dict[str, float](), time.monotonic()
        while time.monotonic() - since < QUIET_SECONDS:
            now = self.metrics()
            counted = {name: value for name, value in now.items() if name.startswith(("nwor_", "vllm:spec_decode"))}
            if counted != last or now["vllm:num_requests_running"] or now["vllm:num_requests_waiting"]:
                last, since = counted, time.monotonic()
            time.sleep(0.2)
        return now

    def block_tokens(self) -> int:
        """Tokens of a block, as the server reports it."""
        [size] = set(re.findall(r'cache_config_info\{[^}]*\bblock_size="(\d+)"', self.get("/metrics")))
        return int(size)

    def _body(self, prompt: list[int], max_tokens: int) -> dict[str, Any]:
        body = {"model": self._model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        return body | {"ignore_eos": True, "return_token_ids": True}


@contextlib.contextmanager
def running(*servers: Server, seconds: float = 300) -> Iterator[None]:
    """Wait for all of them; stop them at the end."""
    try:
        for server in servers:
            server.wait(seconds)
        yield
    finally:
        for server in servers:
            server.stop()


# ---------------------------------------------------------------- what is asked


def prompts(block_tokens: int) -> list[list[int]]:
    """Prompts that share a prefix, a repeated one, some that leave one token after a hit, and some whose answers need
    another block: those make a small cache preempt.

    The words follow the tiny models' language, in which drafts are sometimes right.
    """

    def text(first: int, step: int, count: int) -> list[int]:
        return [1 + (first + step * place + place * place // 7) % (VOCABULARY - 2) for place in range(count)]

    shared = text(3, 5, PREFIX_TOKENS)
    made = [shared + text(number, 3 + number, 10 + 7 * number) for number in range(5)]
    made.append(list(made[1]))
    made += [text(11, 7, 30), text(12, 9, 75)]
    for blocks in (1, 2):
        if (length := blocks * block_tokens) < PREFIX_TOKENS:
            made += [shared[: length + 1], [*shared[:length], VOCABULARY - 2]]
    growing = max(1, 96 // block_tokens) * block_tokens - 12
    made += [text(20 + number, 11 + number, growing) for number in range(AT_ONCE)]
    made.append(list(made[0]))
    return made


def one_by_one(server: Server, asked: list[list[int]]) -> list[list[int]]:
    return [server.complete(prompt) for prompt in asked]


def at_once(server: Server, asked: list[list[int]]) -> list[list[int]]:
    """The same, from several clients; others hang up meanwhile."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = [pool.submit(server.complete, prompt) for prompt in asked]
        for prompt in asked[:HUNG_UP]:
            pool.submit(server.hang_up, [*prompt[:-1], 7]).result()
        return [answer.result() for answer in answers]


def differing(some: list[list[int]], others: list[list[int]]) -> list[int]:
    """Which answers differ."""
    assert len(some) == len(others)
    return [number for number, pair in enumerate(zip(some, others, strict=True)) if pair[0] != pair[1]]
