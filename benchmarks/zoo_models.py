"""The models of a zoo, made ready for a variant, and one step of such a model.

A zoo is a folder of unmodified models: ``zoo.py`` (``REG``, ``build``, ``zero_dropout``), ``baseline.py`` (``call``, ``tensors``, ``loss_of``),
``sites.py`` (``softmaxes``), and two result files: ``sites.jsonl``, attention sites by an independent counter, and ``baseline.jsonl``, Inductor's own count.
"""

from __future__ import annotations

import collections
import importlib
import json
import pathlib
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from zoo_errors import Outcome

_PROJECTIONS = """
q_proj v_proj query_proj value_proj q v q_lin v_lin q_linear v_linear linear_q linear_v linear_query linear_values query value
project_q project_v w_q w_v wq wv q_head v_head
to_q to_v to_qkv to_kv qkv qkv_proj c_attn wqkv in_proj in_proj_weight query_key_value
"""
LORA_NAMES = frozenset(_PROJECTIONS.split())
"""What code calls its projections to queries and values, alone or joined with others."""


class Skipped(Exception):
    """The model has nothing to measure in this variant."""


@dataclass(frozen=True)
class Trial:
    """A model in a variant: infer, train, dynamic, autocast or lora; with gradients if ``train``."""

    name: str
    variant: str
    train: bool
    codegen: bool = False

    @property
    def about(self) -> dict[str, Any]:
        return {"name": self.name, "variant": self.variant, "mode": "train" if self.train else "infer", "codegen": self.codegen}


@dataclass
class Zoo:
    """The modules of a zoo folder and what its result files know of each model."""

    folder: pathlib.Path
    device: str = "cpu"
    modules: dict[str, Any] = field(default_factory=dict)
    sites: dict[str, Any] = field(default_factory=dict)
    inductor: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def open(cls, folder: str, device: str = "cpu") -> Zoo:
        path = pathlib.Path(folder).resolve()
        sys.path.insert(0, str(path))
        found = cls(path, device, {name: importlib.import_module(name) for name in ("zoo", "baseline", "sites")})
        found.sites, found.inductor = ({r["name"]: r for r in map(json.loads, (path / f"{n}.jsonl").open())} for n in ("sites", "baseline"))
        return found

    def known(self, name: str) -> dict[str, Any]:
        """What a record says of a model beforehand. A training match of Inductor counts twice in its counter."""
        sites = self.sites.get(name, {}).get("sites", [])
        forms = collections.Counter(form_of(site) for site in sites)
        counts = {mode: self.inductor.get(name, {}).get(mode, {}).get("count") for mode in ("infer", "train")}
        own = {"infer": counts["infer"], "train": None if counts["train"] is None else counts["train"] / 2}
        return {"package": self.modules["zoo"].REG[name].package, "sites": len(sites), "forms": dict(forms), "inductor": own}

    def build(self, trial: Trial) -> tuple[nn.Module, tuple[Any, Any]]:
        """The model and its inputs: the same weights and numbers each time."""
        model, inputs, trains = self.modules["zoo"].build(trial.name)
        if trial.train and not trains:
            raise Skipped("the zoo runs it for inference only")
        model.train(trial.train)
        if trial.train:
            self.modules["zoo"].zero_dropout(model)
        if trial.variant == "lora":
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(is_lora_target(name))
            if not any(p.requires_grad for p in model.parameters()):
                raise Skipped("no parameter is named like a projection to queries or values")
        return model.to(self.device), inputs

    def step(self, trial: Trial, call: Callable[..., Any], model: nn.Module, inputs: tuple[Any, Any], autocast: bool) -> Outcome:
        """Outputs, and the gradients of a random projection of them."""
        base = self.modules["baseline"]
        model.zero_grad(set_to_none=True)
        with torch.autocast(self.device, torch.bfloat16) if autocast else nullcontext(), torch.set_grad_enabled(trial.train):
            outputs = base.tensors(base.call(call, inputs, self.device))
        if trial.train and any(o.requires_grad for o in outputs):
            base.loss_of(outputs).backward()
        return Outcome(outputs, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})


def form_of(site: dict[str, Any]) -> str:
    """Words for what happens between the products: before, and after, the softmax."""
    post = site["post"].strip("+")
    return str(site["form"]) + (f" → {post}" if post and post != "cast" else "")


def sample(sites: dict[str, Any], packages: dict[str, str], size: int) -> list[str]:
    """``size`` models with sites: each next one brings most forms that are not covered yet, then the package that has fewest."""
    forms = {name: {form_of(s) for s in record["sites"]} for name, record in sites.items() if record.get("sites") and name in packages}
    chosen: list[str] = []
    covered: set[str] = set()
    used: collections.Counter[str] = collections.Counter()
    while len(chosen) < min(size, len(forms)):
        name = min(forms.keys() - set(chosen), key=lambda n: (-len(forms[n] - covered), used[packages[n]], n))
        chosen.append(name)
        covered |= forms[name]
        used[packages[name]] += 1
    return chosen


def is_lora_target(parameter: str) -> bool:
    """Whether a parameter belongs to a projection to queries or values, by the last parts of its name."""
    return any(part.lower().strip("_") in LORA_NAMES for part in parameter.split(".")[-3:])


def cast(inputs: Any, dtype: torch.dtype) -> Any:
    return mapped(inputs, lambda x: x.to(dtype) if x.is_floating_point() else x)


def doubled(inputs: Any) -> Any:
    """Inputs of twice the batch, if the batch is what the first tensor's first dimension is."""
    sizes: list[int] = []

    def see(x: Tensor) -> Tensor:
        sizes.extend(x.shape[:1])
        return x

    mapped(inputs, see)
    return mapped(inputs, lambda x: torch.cat([x, x]) if x.dim() and x.shape[0] == sizes[0] else x)


def mapped(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """``value`` with its tensors mapped, in nested dictionaries, lists and tuples."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        return {k: mapped(v, function) for k, v in value.items()}
    return type(value)(mapped(v, function) for v in value) if isinstance(value, (list, tuple)) else value
