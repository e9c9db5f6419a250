"""The tiled kernel against the fp64 reference, at the default tiles and at tiles far smaller than the problems."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import CASES, check

from fa_inductor.kernels.tiled import KERNEL


@pytest.mark.parametrize("name", list(CASES))
def test_two_reference_rule(name: str) -> None:
    check(KERNEL, name)
