"""rank_pattern and alpha_pattern: PEFT's rule, in bounded time whatever the expressions are."""

from __future__ import annotations

import itertools
import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tiny
from moegraft.adapters import bind, make_source
from moegraft.adapters.config import AdapterConfig
from moegraft.adapters.path_rules import PathRules
from moegraft.adapters.pattern_syntax import PatternError, parse_pattern
from moegraft.errors import AdapterError

PATH = "model.layers.3.mlp.experts.17.gate_proj"


def pefts_first(values: dict[str, float], path: str) -> float | None:
    """What PEFT's own rule finds."""
    for key, value in values.items():
        if re.match(rf"(.*\.)?({key})$", path):
            return value
    return None


@pytest.mark.parametrize(
    ("key", "found"),
    [
        ("gate_proj", True),
        ("proj", False),
        ("gate.proj", True),
        (r"gate\.proj", False),
        (r"experts\.17\.gate_proj", True),
        (PATH, True),
        (f"^{PATH}", True),
        ("^gate_proj", False),
        ("^layers.3.mlp.experts.17.gate_proj", False),
        (r".*", True),
        (r"layers\.3\..*", True),
        (r"layers\.(1|2|4)\..*", False),
        (r"layers\.([0-9]|1[0-9])\.mlp\.experts\.\d+\.(gate|up)_proj", True),
        (r"model\.layers\.\d+\.mlp\.experts\.\d+\.gate_proj$", True),
        (r"\w+_proj", True),
        (r"[^.]+\.gate_proj", True),
        (r"(?:gate|up)_proj", True),
        (r"(?P<side>gate|up)_proj", True),
        (r"layers.{1,3}mlp.*", True),
        (r"layers.{4,}mlp.*", False),
        ("gate_proj|up_proj", True),
        (r"(?!.*up_proj).*experts.*", True),
        (r"(?!.*gate_proj).*experts.*", False),
        (r"(?=layers\.3).*_proj", True),
        (r".*\bexperts\b.*", True),
        (r".*\bexpert\b.*", False),
        ("", False),
    ],
)
def test_a_key_matches_as_in_peft(key: str, found: bool) -> None:
    assert (pefts_first({key: 1.0}, PATH) is not None) == found, "the table itself"
    assert (PathRules("rank_pattern", {key: 1.0}).first(PATH) is not None) == found


ATOMS = st.sampled_from(
    [
        r"\b",
        "(?=a)",
        "(?!b)",
        "a",
        "b",
        ".",
        r"\.",
        "[ab]",
        "[^a]",
        r"\w",
        r"\d",
        "^",
        "$",
        "{",
        "}",
        "1",
        "_",
        "[]a]",
        "-",
    ]
)
REPEATS = st.sampled_from(
    ["", "", "", "*", "+", "?", "*?", "{2}", "{0,1}", "{1,}", "{,2}", "{2,3}?"]
)
PATTERNS = st.recursive(
    st.builds(
        lambda atom, repeat: atom if atom in ("^", "$", r"\b") else atom + repeat, ATOMS, REPEATS
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4).map("".join),
        st.builds(lambda parts, r: f"({'|'.join(parts)}){r}", st.lists(inner, max_size=3), REPEATS),
        st.builds(lambda kind, part: f"(?{kind}{part})", st.sampled_from("=!:"), inner),
    ),
    max_leaves=6,
)
# Short, as Python's own matcher is the judge, and takes for ever on long ones.
PATHS = st.text(alphabet="ab.1_-{", max_size=6)


@settings(max_examples=500, deadline=None)
@given(st.lists(PATTERNS, min_size=1, max_size=3, unique=True), PATHS)
def test_any_expressions_find_what_pefts_rule_finds(keys: list[str], path: str) -> None:
    values = {key: float(i) for i, key in enumerate(keys)}
    try:
        rules = PathRules("rank_pattern", values)
    except AdapterError:
        for key in keys:
            try:
                parse_pattern(key)
            except PatternError:
                return
        raise
    assert rules.first(path) == pefts_first(values, path), (keys, path)


@pytest.mark.filterwarnings("ignore:Possible")  # sets that a later Python may read otherwise
@settings(max_examples=300, deadline=None)
@given(st.text(alphabet=r"ab.\(){}[]*+?|^$12,-!:<>=PsdwbZ", max_size=14), PATHS)
def test_any_text_is_an_expression_or_refused(key: str, path: str) -> None:
    try:
        rules = PathRules("rank_pattern", {key: 1.0})
    except AdapterError as error:
        assert "\n" not in str(error)
        return
    assert rules.first(path) == pefts_first({key: 1.0}, path)


HOSTILE = {
    "nested": r"(a+)+b",
    "nested stars": r"((((.*)*)*)*)*x",
    "overlapping": r"(\w|a|_)*!",
    "a choice of two": "(a|a)" * 60 + "!",
    "many stars": ".*" * 60 + "!",
    "counted": r"((a{1,100}){1,100}){1,100}!",
    "empty rounds": r"(a?){4000000000}!",
    "look-ahead": r"(?=(a+)+b)(?!(a|a)*c)((?=.*.*!)a)*!",
    "counted empty": r"(()|a){1,4000000000}!",
}


@pytest.mark.parametrize("key", HOSTILE.values(), ids=HOSTILE)
def test_an_expression_that_backtracks_for_ever_takes_no_time(key: str) -> None:
    rules = PathRules("rank_pattern", {key: 4.0})
    start = time.thread_time()
    for _ in range(20):
        assert rules.first("a" * 200 + ".b") is None
    assert time.thread_time() - start < 5


def test_expressions_for_which_even_bounded_time_is_too_long_are_refused() -> None:
    rules = PathRules("rank_pattern", {rf"({'a?' * 200}|x)*!{i}": 4 for i in range(100)})
    start = time.thread_time()
    with pytest.raises(AdapterError, match="the 100 expressions of rank_pattern take too long"):
        for i in range(1000):
            rules.first("model." + "a" * 180 + str(i))
    assert time.thread_time() - start < 60
    with pytest.raises(AdapterError, match="more than 200,000; write the modules' paths out"):
        PathRules("rank_pattern", {rf"({'a?' * 200}|x)*!{i}": 4 for i in range(1000)})


def test_a_path_that_was_looked_up_costs_nothing_more() -> None:
    rules = PathRules("rank_pattern", {rf"({'a?' * 200}|x)*!{i}": 4 for i in range(20)})
    for _ in range(1000):
        assert rules.first("model." + "a" * 180) is None


def all_modules(count: int) -> dict[str, float]:
    """One plain key per module of a large adapter."""
    sides = ("gate_proj", "up_proj", "down_proj")
    return {
        f"model.layers.{i // 768}.mlp.experts.{i // 3 % 256}.{sides[i % 3]}": float(1 + i % 7)
        for i in range(count)
    }


def test_one_key_per_module_of_a_large_adapter_is_looked_up() -> None:
    values = all_modules(36_864)
    start = time.thread_time()
    rules = PathRules("rank_pattern", values)
    assert all(rules.first(path) == value for path, value in values.items())
    assert time.thread_time() - start < 20  # one by one it would be hours


EXPERTS = r"model\.layers\.\d+\.mlp\.experts\.\d+\."
SIDES = ("gate_proj", "up_proj", "down_proj")


@pytest.mark.parametrize(
    "keys",
    [
        [*(EXPERTS + side for side in SIDES), r"model\.layers\.\d+\.self_attn\.q_proj"],
        [rf"model\.layers\.\d+\.self_attn\.{n}_proj" for n in "qkvo"]
        + [EXPERTS + side for side in SIDES],
        pytest.param(
            [EXPERTS.replace(r"\d+", str(i), 1) + side for i in range(61) for side in SIDES],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["four", "seven", "one per layer and projection"],
)
def test_the_usual_expressions_serve_the_largest_models(keys: list[str]) -> None:
    values = {key: float(i) for i, key in enumerate(keys)}
    rules = PathRules("rank_pattern", values)
    for layer, expert, side in itertools.product(range(61), range(256), SIDES):
        path = f"model.layers.{layer}.mlp.experts.{expert}.{side}"
        found = rules.first(path)
        assert found is not None
        if expert == 255:  # Python's own matcher takes long for all
            assert found == pefts_first(values, path)


@pytest.mark.parametrize(
    ("key", "why"),
    [
        (r"(?<=a)b", "look-behind"),
        (r"(?<!a)b", "look-behind"),
        (r"(?i:q)", "flags"),
        (r"(a)\1", r"uses \\1"),
        (r"\Bq", r"uses \\B"),
        (r"a*+", "possessive"),
        (r"(?>a)", "atomic"),
        ("[a", "is not a regular expression"),
        ("(" * 30 + ")" * 30, "more than 20 groups"),
    ],
)
def test_an_expression_that_is_not_served_is_refused_by_name(key: str, why: str) -> None:
    for name in ("rank_pattern", "alpha_pattern"):
        with pytest.raises(AdapterError, match=why) as caught:
            AdapterConfig.parse({name: {key: 4}})
        assert name in str(caught.value)


def test_a_bound_adapter_has_the_scale_of_an_expression() -> None:
    case = "peft/0.21.2/qwen3_moe/all_linear"
    config = tiny.config_of(case, rank_pattern={r"(.*)*\.(q|k)_proj": 6})
    bound = bind(make_source(tiny.tensors_of(case), config), tiny.spec_of("qwen3_moe"))
    scales = {site.site: site.projections for site in bound.report.sites}
    q = next(p["linear"].scale for name, p in scales.items() if name.endswith("q_proj"))
    v = next(p["linear"].scale for name, p in scales.items() if name.endswith("v_proj"))
    assert q == pytest.approx(config["lora_alpha"] / 6) and v != q
