"""After an error of this plugin: go on and count it, or stop. docs/operate.md has a table of all cases."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

from nwor_ops.config import NworConfig

VARIABLE = "VLLM_NWOR_ON_ERROR"


class Errors:
    """Count the errors of one feature in one engine, by reason, after which the engine can go on.

    ``then`` says how, for messages: "without the transaction in this step". ``stops``: the engine stops nevertheless.
    """

    def __init__(self, logger: Any, then: str, stops: bool = False) -> None:
        self.counts: Counter[str] = Counter()
        self._logger, self._then, self._stops = logger, then, stops

    @classmethod
    def by_setting(cls, config: NworConfig, logger: Any, then: str) -> Errors:
        """Create an object that follows the setting ``on_error``."""
        return cls(logger, then, config.on_error == "stop")

    def go_on(self, reason: str, error: Exception) -> None:
        """Count an error, and log the first one of each reason (a label of ``nwor_errors_total``). Raise RuntimeError
        if the settings ask to stop."""
        if self._stops:
            raise RuntimeError(f"nwor: {reason}: {error} ({VARIABLE}=continue goes on {self._then})") from error
        if self.counts[reason] == 0:
            self._logger.error(
                "nwor: %s: %s; the engine goes on %s (further ones are counted, not logged)",
                reason,
                error,
                self._then,
                exc_info=error,
            )
        self.counts[reason] += 1

    @contextlib.contextmanager
    def survived(self, reason: str) -> Iterator[None]:
        """Pass any exception of the body to :meth:`go_on`."""
        try:
            yield
        except Exception as error:
            self.go_on(reason, error)


class CannotContinue(RuntimeError):
    """The engine cannot go on safely. It stops, whatever the settings say."""

    @classmethod
    def because(cls, what: str, unknown: str) -> CannotContinue:
        """Create the error from the failure with its reason, and from the data that are now unknown or wrong."""
        return cls(f"nwor: {what}; {unknown}, so the engine stops, whatever {VARIABLE} says")
