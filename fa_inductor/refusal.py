"""Why something was not done, as a value.

Every "no" of the pipeline — in normalising, finding, lifting, recognising and selecting — is a Refusal. Codes are listed
in ``CODES`` with the advice that the report prints; an unknown code is a programming error.
"""

from __future__ import annotations

from dataclasses import dataclass

CODES: dict[str, str] = {}


def declare(code: str, advice: str) -> str:
    """Register a refusal code with one sentence of advice for the user; returns the code."""
    if code in CODES:
        raise ValueError(f"refusal code {code!r} is declared twice")
    CODES[code] = advice
    return code


@dataclass(frozen=True)
class Refusal:
    """One reason: a stable code, a sentence, and the graph node and source line it is about (empty when none applies)."""

    code: str
    text: str
    node: str = ""
    location: str = ""

    def __post_init__(self) -> None:
        if self.code not in CODES:
            raise ValueError(f"refusal code {self.code!r} is not declared")

    @property
    def advice(self) -> str:
        return CODES[self.code]

    def __str__(self) -> str:
        where = f" [{self.location}]" if self.location else ""
        return f"{self.code}: {self.text}{where}"


class Refused(Exception):
    """Carries a Refusal out of a recursive analysis; caught by the stage that asked."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(str(refusal))
        self.refusal = refusal


class StrictError(RuntimeError):
    """A softmax stayed unfused while the option ``strict`` is set."""
