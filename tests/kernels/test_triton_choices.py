"""The assembly of choices, carried out here: it must say what the name says, as the text for Triton's interpreter does (see also ``rendered``)."""

from __future__ import annotations

import operator
import random
import re

import pytest

from fa_inductor.kernels.triton_fa2.choices import PREFIX, function, names_in

_COMPARE = {"lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge, "eq": operator.eq, "ne": operator.ne}
_LIMIT = {"r": 1 << 31, "l": 1 << 63}


def random_name(r: random.Random) -> list[str]:
    """Words of a condition in postfix order."""
    words = []
    for i in range(r.randint(1, 4)):
        words.append("on" if r.random() < 0.2 else r.choice(list(_COMPARE)) + r.choice(["", "64"]))
        words += ["not"] * (r.random() < 0.3)
        words += [r.choice(["and", "or"])] * (i > 0)
    return words


def meaning(words: list[str], values: list[int]) -> bool:
    stack: list[bool] = []
    left = list(values)
    for word in words:
        if word in ("and", "or"):
            second, first = stack.pop(), stack.pop()
            stack.append(first and second if word == "and" else first or second)
        elif word == "not":
            stack.append(not stack.pop())
        elif word == "on":
            stack.append(left.pop(0) != 0)
        else:
            stack.append(_COMPARE[word.removesuffix("64")](left.pop(0), left.pop(0)))
    (result,) = stack
    return result


def carried_out(source: str, values: list[int]) -> str:
    """Which of x and y the assembly chooses."""
    found = re.search(r'"(\{.*\})", "([^"]*)", \[(.*)\], dtype', source)
    assert found is not None, source
    text, kinds, arguments = found[1], found[2].split(","), found[3].split(", ")
    assert arguments[:2] == ["x", "y"] and kinds[:3] == ["=f", "f", "f"] and len(kinds) == len(arguments) + 1 == len(values) + 3
    given = {f"${i + 1}": v for i, v in enumerate(["x", "y", *values])}
    predicates: dict[str, bool] = {}
    for step in text.strip("{} ").split(";"):
        words = step.replace(",", " ").split()
        if not words or words[0] == ".reg":
            continue
        name, *kind = words[0].split(".")
        if name == "setp":
            a, b = (given[w] if w in given else int(w) for w in words[2:])
            bits = int(kind[1].removeprefix("s"))
            for w in words[2:]:
                assert w not in given or kinds[int(w[1:])] == {32: "r", 64: "l"}[bits]
            predicates[words[1]] = _COMPARE[kind[0]](a, b)
        elif name in ("and", "or"):
            first, second = predicates[words[2]], predicates[words[3]]
            predicates[words[1]] = (first and second) if name == "and" else (first or second)
        elif name == "not":
            predicates[words[1]] = not predicates[words[2]]
        else:
            assert (name, kind, words[1]) == ("selp", ["f32"], "$0")
            return str(given[words[2] if predicates[words[4]] else words[3]])
    raise AssertionError(text)


@pytest.mark.parametrize("seed", range(50))
def test_assembly_says_what_the_name_says(seed: int) -> None:
    r = random.Random(seed)
    words = random_name(r)
    source = function(PREFIX + "_".join(words), on_gpu=True)
    assert names_in(f"y = {PREFIX}{'_'.join(words)}(s, 0.0)") == [PREFIX + "_".join(words)]
    plain = re.search(r"tl\.where\((.*), x, y\)", function(PREFIX + "_".join(words), on_gpu=False))
    assert plain is not None
    for _ in range(50):
        values: list[int] = []
        for word in words:
            wide = "l" if word.endswith("64") else "r"
            top = r.choice([2, _LIMIT[wide]])
            values += [r.randint(-top, top - 1) for _ in range(1 if word == "on" else 0 if word in ("and", "or", "not") else 2)]
        expected = meaning(words, values)
        assert carried_out(source, values) == ("x" if expected else "y"), (words, values)
        names = re.findall(r"\b[ab]\d+\b", re.search(r"def \w+\(x, y, (.*)\):", source)[1])  # type: ignore[index]
        assert bool(eval(plain[1], dict(zip(names, values, strict=True)))) == expected, (words, values)
