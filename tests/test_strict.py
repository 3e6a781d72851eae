"""Tables and dataclasses: there and back, and an error with a hint for everything else."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cofire.errors import ConfigError
from cofire.files.strict import check, differences, override, same_run, structure, unstructure


@dataclass(frozen=True, kw_only=True)
class Inner:
    depth: int = 1


@dataclass(frozen=True, kw_only=True)
class Outer:
    name: str
    rate: float = 0.5
    count: int | None = None
    flag: bool = False
    kind: Literal["a", "b"] = "a"
    size: tuple[int, ...] = (1, 2)
    pair: tuple[int, str] = (1, "x")
    table: Mapping[str, int] = field(default_factory=dict)
    numbered: dict[int, str] = field(default_factory=dict)
    free: dict[str, Any] = field(default_factory=dict)
    either: int | Literal["test"] = 0
    inner: Inner = Inner()


any_outer = st.builds(
    Outer,
    name=st.text(),
    rate=st.floats(allow_nan=False),
    count=st.none() | st.integers(),
    flag=st.booleans(),
    kind=st.sampled_from(["a", "b"]),
    size=st.lists(st.integers()).map(tuple),
    pair=st.tuples(st.integers(), st.text()),
    table=st.dictionaries(st.text(), st.integers()),
    numbered=st.dictionaries(st.integers(), st.text()),
    either=st.integers() | st.just("test"),
    inner=st.builds(Inner, depth=st.integers()),
)


@given(any_outer)
def test_a_dataclass_survives_the_way_through_a_table(outer: Outer) -> None:
    assert structure(Outer, unstructure(outer), "here") == outer


def test_numbers_as_keys_survive_json_which_has_none() -> None:
    outer = Outer(name="x", numbered={3: "c"})
    assert structure(Outer, json.loads(json.dumps(unstructure(outer))), "here") == outer


def test_none_is_left_out_of_tables() -> None:
    assert "count" not in unstructure(Outer(name="x"))
    assert unstructure({"a": None, "b": (1, None)}) == {"b": [1, None]}


def test_an_integer_serves_as_a_float_but_not_the_other_way_round() -> None:
    assert structure(Outer, {"name": "x", "rate": 1}, "here").rate == 1.0
    with pytest.raises(ConfigError, match=r"here count must be of type int, got 1\.5"):
        structure(Outer, {"name": "x", "count": 1.5}, "here")


@pytest.mark.parametrize(
    ("table", "error"),
    [
        ({}, r"\[x\] must have the key 'name'"),
        ({"name": "x", "rat": 1}, r"unknown key in \[x\]: 'rat'; did you mean 'rate'\? known: count, "),
        ({"name": "x", "zzz": 1}, r"unknown key in \[x\]: 'zzz'; known: count, "),
        ({"name": 3}, r"\[x\] name must be of type str, got 3"),
        ({"name": "x", "rate": "fast"}, r"\[x\] rate must be of type float, got 'fast'"),
        ({"name": "x", "rate": True}, r"\[x\] rate must be of type float, got True"),
        ({"name": "x", "flag": 1}, r"\[x\] flag must be of type bool, got 1"),
        ({"name": "x", "count": True}, r"\[x\] count must be of type int, got True"),
        ({"name": "x", "kind": "c"}, r"\[x\] kind must be one of 'a', 'b', got 'c'"),
        ({"name": "x", "kind": []}, r"\[x\] kind must be one of 'a', 'b', got \[\]"),
        ({"name": "x", "size": 3}, r"\[x\] size must be a list, got 3"),
        ({"name": "x", "size": "12"}, r"\[x\] size must be a list, got '12'"),
        ({"name": "x", "size": ["1"]}, r"\[x\] size must be of type int, got '1'"),
        ({"name": "x", "pair": [1]}, r"\[x\] pair must have 2 values, got \[1\]"),
        ({"name": "x", "table": [1]}, r"\[x\] table must be a table, got \[1\]"),
        ({"name": "x", "table": {"k": "v"}}, r"\[x\] table.k must be of type int, got 'v'"),
        ({"name": "x", "numbered": {"one": "v"}}, r"\[x\] numbered must have whole numbers as keys, got 'one'"),
        ({"name": "x", "either": "tset"}, r"\[x\] either must be of type int, got 'tset'"),
        ({"name": "x", "inner": 1}, r"\[x\] inner must be a table, got 1"),
        ({"name": "x", "inner": {"dept": 1}}, r"unknown key in \[x\] inner: 'dept'; did you mean 'depth'"),
        ([], r"\[x\] must be a table, got \[\]"),
    ],
)
def test_what_does_not_fit_is_an_error_with_a_hint(table: Any, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        structure(Outer, table, "[x]")


def test_check_holds_a_dataclass_to_its_types() -> None:
    check(Outer(name="x", rate=1))
    with pytest.raises(ConfigError, match=r"Outer.kind must be one of 'a', 'b', got 'c'"):
        check(Outer(name="x", kind="c"))  # type: ignore[arg-type]


def test_differences_are_named_by_their_path() -> None:
    one = {"a": 1, "b": {"c": 2, "d": 3}, "e": [1, 2]}
    assert differences(one, one) == []
    assert differences(one, {"a": 1, "b": {"c": 2, "d": 4}, "e": [2], "f": 0}) == ["b.d", "e", "f"]
    assert differences(one, {"a": 1, "e": [1, 2]}) == ["b"]
    assert differences(one, [1]) == ["everything"]


@pytest.mark.parametrize(
    ("assignment", "value"),
    [
        ("a.b=1", 1),
        ("a.b=0.5", 0.5),
        ("a.b=true", True),
        ("a.b=[1, 2]", [1, 2]),
        ('a.b="1"', "1"),
        ("a.b=cosine", "cosine"),
        ("a.b = ../x/y=z.safetensors", "../x/y=z.safetensors"),
        ("a.b=", ""),
    ],
)
def test_an_assignment_is_read_as_toml_or_else_as_text(assignment: str, value: Any) -> None:
    table = tomllib.loads("[a]\nb = 7\nc = 8\n")
    override(table, assignment)
    assert table == {"a": {"b": value, "c": 8}}


def test_an_assignment_may_name_a_new_section() -> None:
    table: dict[str, Any] = {}
    override(table, "a.b.c=1")
    assert table == {"a": {"b": {"c": 1}}}


@pytest.mark.parametrize("assignment", ["a.b", "=1", "a..b=1", ".a=1", ""])
def test_what_is_no_assignment_is_an_error(assignment: str) -> None:
    with pytest.raises(ConfigError, match=r"--set takes section\.key=value, got"):
        override({}, assignment)


def test_a_value_is_not_a_section() -> None:
    with pytest.raises(ConfigError, match="'b' is a value, not a section"):
        override({"a": {"b": 1}}, "a.b.c=1")


# The same run


@given(any_outer)
def test_a_stored_description_is_the_run_that_wrote_it(outer: Outer) -> None:
    mine = {"recipe": outer, "data": {"n": 3, "shape": (1, 2)}, "model": {"gate": {"type": "x", "fields": outer}}}
    assert same_run(mine, json.loads(json.dumps(unstructure(mine)))) == []
    assert same_run(outer, json.loads(json.dumps(unstructure(outer)))) == []


def test_an_option_that_is_newer_than_a_description_has_its_default_there() -> None:
    mine = {"recipe": Outer(name="a", rate=0.25), "n": 3}
    old = {"recipe": {"name": "a", "rate": 0.25}, "n": 3}
    assert same_run(mine, old) == []
    assert same_run({**mine, "recipe": Outer(name="a", rate=0.25, flag=True)}, old) == ["recipe.flag"]


@pytest.mark.parametrize(
    ("stored", "changed"),
    [
        ({"recipe": {"name": "b"}, "n": 3}, ["recipe.name"]),
        ({"recipe": {"name": "a", "inner": {"depth": 2}}, "n": 4}, ["recipe.inner.depth", "n"]),
        ({"recipe": {"name": "a", "newer": 1}, "n": 3}, ["recipe.newer"]),
        ({"recipe": {"name": "a", "size": 7}, "n": 3}, ["recipe.size"]),
        ({"recipe": {"name": "a"}, "n": 3, "more": 1}, ["more"]),
        ({"recipe": None, "n": 3}, ["recipe"]),
        ([], ["everything"]),
    ],
)
def test_every_value_that_differs_is_named(stored: Any, changed: list[str]) -> None:
    found = same_run({"recipe": Outer(name="a"), "n": 3}, stored)
    assert [name for name in found if name in changed] == changed
    assert {name.split(".")[0] for name in found} == {name.split(".")[0] for name in changed}
