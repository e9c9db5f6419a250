"""What every test starts from: a fixed seed, no environment variables of ours, no compiled state from the test before."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest
import torch

import fa_inductor
from fa_inductor import log


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def fresh_state(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in [n for n in os.environ if n.startswith("FA_INDUCTOR_")]:
        monkeypatch.delenv(name)
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    fa_inductor.reset()
    log.forget_warnings()
    torch.manual_seed(0)
    yield
