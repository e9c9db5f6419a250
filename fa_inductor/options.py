"""What a user may ask for: the backend's own options, Inductor's passed through, and the environment variables.

``torch.compile`` refuses ``mode`` together with ``options``, so ``mode`` is also an option here:
``options={"mode": "reduce-overhead", "kernel": "triton"}``.

A mistake never stops a model: the option is left out, and a message says which value was wrong and what would be right. Only
with ``strict`` is it an error. No other module reads environment variables.
"""

from __future__ import annotations

import difflib
import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_origin

from .kernel_table import CHOICES

_VARIABLES = ("FA_INDUCTOR_KERNEL", "FA_INDUCTOR_DUMP", "FA_INDUCTOR_DISABLE")
KERNEL_ALIASES = {"triton": "triton_fa2", "sdpa": "torch_sdpa"}


class OptionError(ValueError):
    """A wrong option, raised only where ``strict`` is set."""


@dataclass(frozen=True)
class Options:
    """Validated options of one ``torch.compile`` call.

    Attributes:
        kernel: the only kernel to use, or None to let measured cost choose.
        strict: raise where a softmax stays unfused, or an option is wrong, instead of compiling on.
        dump: folder that receives the numbered stages of every compiled graph.
        masked_rows: a row that may see no key gets what eager gives ("eager": NaN for -inf fills) or 0 ("zero").
        deterministic: None follows ``torch.use_deterministic_algorithms``.
        read_buffers: a mask that a module keeps in a buffer may be replaced by what it holds, as long as it is not written to.
        disabled: plain Inductor, nothing is looked for (FA_INDUCTOR_DISABLE=1).
    """

    kernel: str | None = None
    strict: bool = False
    dump: str | None = None
    masked_rows: Literal["eager", "zero"] = "eager"
    deterministic: bool | None = None
    read_buffers: bool = True
    disabled: bool = False


class Parsed(NamedTuple):
    """Our options, the Inductor settings to pass on, and one sentence per mistake."""

    options: Options
    inductor: dict[str, Any]
    messages: tuple[str, ...]


def parse(options: Mapping[str, Any] | None = None, mode: str | None = None, environ: Mapping[str, str] | None = None) -> Parsed:
    """Sort and check what was given to ``torch.compile``; explicit options win over the environment."""
    messages: list[str] = []
    ours = _from_environment(os.environ if environ is None else environ, messages)
    inductor: dict[str, Any] = {}
    given = dict(options or {})
    wanted_mode = given.pop("mode", None) if mode is None else mode
    if wanted_mode is not None:
        inductor.update(_mode_settings(wanted_mode, messages))
    for name, value in given.items():
        if name in _CHECKS:
            _accept(ours, name, value, f"option {name!r}", messages)
        elif isinstance(name, str) and name.replace("-", "_") in _inductor_names():
            _accept_inductor(inductor, name.replace("-", "_"), value, messages)
        else:
            messages.append(_unknown(str(name)))
    parsed = Parsed(Options(**ours), inductor, tuple(messages))
    if messages and parsed.options.strict:
        raise OptionError("; ".join(messages))
    return parsed


def describe(value: object) -> str:
    """A value as messages show it: short, with its type where the type is the likely mistake."""
    text = repr(value)
    text = text if len(text) <= 60 else text[:57] + "..."
    return f"{text} ({type(value).__name__})"


# -- our own options: each check returns the value to store, or raises ValueError saying what is allowed ------------------
def _kernel(value: object) -> str | None:
    if value is None or value == "auto":
        return None
    name = KERNEL_ALIASES.get(value, value) if isinstance(value, str) else value
    if name not in CHOICES:
        names = (*CHOICES, *KERNEL_ALIASES, "auto")
        raise ValueError(f"use one of {', '.join(names)}{_did_you_mean(value, names)}")
    return str(name)


def _bool(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError("use True or False")
    return value


def _optional_bool(value: object) -> bool | None:
    if value is not None and not isinstance(value, bool):
        raise ValueError("use True, False or None (None follows torch.use_deterministic_algorithms)")
    return value


def _dump(value: object) -> str | None:
    if value is None:
        return None
    path = os.fsdecode(value) if isinstance(value, (str, bytes, os.PathLike)) else ""
    if not path or "\0" in path:
        raise ValueError("use the path of a folder")
    return path


def _masked_rows(value: object) -> str:
    if not isinstance(value, str) or value not in ("eager", "zero"):
        raise ValueError(f"use 'eager' or 'zero'{_did_you_mean(value, ('eager', 'zero'))}")
    return value


_CHECKS: dict[str, Callable[[object], object]] = {
    "kernel": _kernel,
    "strict": _bool,
    "dump": _dump,
    "masked_rows": _masked_rows,
    "deterministic": _optional_bool,
    "read_buffers": _bool,
}


def _accept(ours: dict[str, Any], name: str, value: object, source: str, messages: list[str]) -> None:
    try:
        ours[name] = _CHECKS[name](value)
    except ValueError as error:
        messages.append(f"{source} cannot be {describe(value)}: {error}")


def _from_environment(environ: Mapping[str, str], messages: list[str]) -> dict[str, Any]:
    """FA_INDUCTOR_KERNEL, FA_INDUCTOR_DUMP and FA_INDUCTOR_DISABLE; empty means unset."""
    ours: dict[str, Any] = {}
    for variable in environ:
        if variable.startswith("FA_INDUCTOR_") and variable not in _VARIABLES:
            messages.append(f"environment variable {variable} is not one of {', '.join(_VARIABLES)}{_did_you_mean(variable, _VARIABLES)}")
    for variable, name in (("FA_INDUCTOR_KERNEL", "kernel"), ("FA_INDUCTOR_DUMP", "dump")):
        if environ.get(variable):
            _accept(ours, name, environ[variable], f"environment variable {variable}", messages)
    disable = environ.get("FA_INDUCTOR_DISABLE", "")
    if disable not in ("", "0", "1"):
        messages.append(f"environment variable FA_INDUCTOR_DISABLE cannot be {describe(disable)}: use 1 or 0")
    ours["disabled"] = disable == "1"
    return ours


# -- Inductor's settings -------------------------------------------------------------------------------------------------
@functools.cache
def _inductor_names() -> frozenset[str]:
    from torch._inductor import config

    return frozenset(config.get_config_copy())


def _accept_inductor(inductor: dict[str, Any], name: str, value: object, messages: list[str]) -> None:
    """The same type check as ``torch.compile(backend="inductor")`` makes: generic types are not checked."""
    from torch._inductor import config

    expected = config.get_type(name)  # type: ignore[attr-defined]
    if get_origin(expected) is None and isinstance(expected, type) and not isinstance(value, expected):
        messages.append(f"Inductor option {name!r} cannot be {describe(value)}: it takes a value of type {expected.__name__}")
    else:
        inductor[name] = value


def _mode_settings(mode: object, messages: list[str]) -> dict[str, Any]:
    from torch._inductor import list_mode_options

    known = list_mode_options()
    if isinstance(mode, str) and mode in known:
        return dict(known[mode])
    messages.append(f"mode cannot be {describe(mode)}: use one of {', '.join(known)}{_did_you_mean(mode, known)}")
    return {}


def _unknown(name: str) -> str:
    hint = _did_you_mean(name, (*_CHECKS, "mode", *sorted(_inductor_names())))
    ours = ", ".join((*_CHECKS, "mode"))
    return f"option {name!r} is neither one of flashattn's ({ours}) nor one of Inductor's (torch._inductor.list_options()){hint}"


def _did_you_mean(value: object, names: Mapping[str, Any] | tuple[str, ...]) -> str:
    close = difflib.get_close_matches(str(value), list(names), n=1)
    return f": did you mean {close[0]!r}?" if close else ""
