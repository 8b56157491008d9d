"""Simulate how many generated tokens are in a draft vocabulary that follows the traffic, with the op itself.

    pip install mistral_common tiktoken
    python benchmarks/draft_vocabulary_coverage.py [--folder FOLDER]

It runs on the CPU. Real text is "generated" by 64 requests at once, in windows of 1 to 4 tokens. Each text starts with
a prompt of 50 to 1,000 tokens. The set is updated after each window. The texts are those of this machine: Python's
sources, C headers, documentation, and message catalogues in four languages. The tokenizer is Mistral's Tekken (131,072
tokens), which mistral_common contains.

A row `coverage/TEXTS/ROWS` is the share of generated tokens that were in the set when they had to be drafted.
`first_ids/TEXTS/ROWS` is that of a fixed list of the first ids, `copied/TEXTS/ROWS` the number of copied rows for 1,000
generated tokens.
"""

from __future__ import annotations

import base64
import contextlib
import gettext
import json
import pathlib
import random
import sysconfig
from collections.abc import Iterator
from importlib.util import find_spec

import tiktoken
import torch
from results import Row, new_parser, row, save

from nwor_ops import DraftVocabulary

REQUESTS, SIZES, TOKENS, MOST_CHARACTERS, DOCUMENT = 64, (8192, 16_384, 32_768), 200_000, 4_000_000, 2500
LANGUAGES = ("zh_CN", "de", "ja", "ru")


def main() -> None:
    folder, encoding = new_parser(__doc__).parse_args().folder, tekken()
    documents = {name: split(encoding, texts) for name, texts in texts_of_this_machine().items()}
    cases = {"code": ["python", "c"], "prose": ["prose"], "chinese": ["zh_CN"], "mixed": list(documents)}
    rows: list[Row] = []
    for case, names in cases.items():
        pools = [documents[name] for name in names if documents[name]]
        for size in SIZES if pools else ():
            rows += simulate(pools, size, encoding.n_vocab, f"{case}/{size}")
    save("cpu", "draft_vocabulary_coverage", rows, folder)


def tekken() -> tiktoken.Encoding:
    spec = find_spec("mistral_common")
    assert spec is not None
    assert spec.origin is not None
    model = json.loads((pathlib.Path(spec.origin).parent / "data" / "tekken_240911.json").read_text())
    special, size = model["config"]["default_num_special_tokens"], model["config"]["default_vocab_size"]
    ranks = {base64.b64decode(word["token_bytes"]): word["rank"] + special for word in model["vocab"][: size - special]}
    return tiktoken.Encoding("tekken", pat_str=model["config"]["pattern"], mergeable_ranks=ranks, special_tokens={})


def texts_of_this_machine() -> dict[str, list[str]]:
    library = pathlib.Path(sysconfig.get_path("stdlib"))
    texts = {"python": read(library, "*.py"), "c": read(pathlib.Path("/usr/include"), "*.h")}
    texts["prose"] = read(pathlib.Path("/usr/share/doc"), "*")
    return texts | {name: catalogues(name) for name in LANGUAGES}


def read(folder: pathlib.Path, pattern: str) -> list[str]:
    texts: list[str] = []
    for path in sorted(folder.rglob(pattern)):
        if sum(map(len, texts)) > MOST_CHARACTERS:
            break
        with contextlib.suppress(OSError, UnicodeDecodeError):  # folders, and files that are no text
            if path.stat().st_size < 400_000:
                texts.append(path.read_text(encoding="utf-8"))
    return texts


def catalogues(language: str) -> list[str]:
    messages: list[str] = []
    for path in sorted(pathlib.Path(f"/usr/share/locale/{language}/LC_MESSAGES").glob("*.mo")):
        with contextlib.suppress(OSError, UnicodeDecodeError), path.open("rb") as file:
            translations = vars(gettext.GNUTranslations(file))["_catalog"].values()
            messages += [text for text in translations if isinstance(text, str)]
    return ["\n".join(messages)]


def split(encoding: tiktoken.Encoding, texts: list[str]) -> list[list[int]]:
    tokens = [encoding.encode_ordinary(text) for text in texts]
    return [t[start : start + DOCUMENT] for t in tokens for start in range(0, len(t) - 400, DOCUMENT)]


def windows(pools: list[list[list[int]]]) -> Iterator[tuple[bool, list[int]]]:
    """Yield prompts (False) and generated windows (True) of requests that run at once."""
    dice, made = random.Random(0), 0

    def request() -> Iterator[tuple[bool, list[int]]]:
        while True:
            document = dice.choice(dice.choice(pools))
            place = min(dice.choice([50, 200, 500, 1000]), len(document) // 2)
            yield False, document[:place]
            while place < len(document):
                length = dice.randint(1, 4)
                yield True, document[place : place + length]
                place += length

    running = [request() for _ in range(REQUESTS)]
    while made < TOKENS:
        for generated, tokens in map(next, running):
            made += len(tokens) if generated else 0
            yield generated, tokens


def simulate(pools: list[list[list[int]]], size: int, vocabulary_size: int, case: str) -> list[Row]:
    vocabulary = DraftVocabulary(torch.zeros(vocabulary_size, 1), size)
    none, copied, first_ids = torch.zeros(0, dtype=torch.int64), 0, 0
    for generated, tokens in windows(pools):
        new = torch.tensor(tokens)
        copied += len(new[vocabulary.row_of_token[new] < 0].unique())
        first_ids += int((new < size).sum()) if generated else 0
        vocabulary.update(new if generated else none, none if generated else new)
    seen, missed = vocabulary.counters.tolist()
    return [
        row(f"coverage/{case}", [1 - missed / seen], "share", "higher"),
        row(f"first_ids/{case}", [first_ids / seen], "share", "higher"),
        row(f"copied/{case}", [1000 * copied / seen], "rows", "lower"),
    ]


if __name__ == "__main__":
    main()
