"""cofire compare: methods from the registries, budgets, one run each, rows for what cannot be done."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any, final

import pytest
import torch
from compared import write_recipe
from torch import Tensor, nn

from cofire import (
    FBS,
    LCS,
    AbstractMethod,
    CGNet,
    ConfigError,
    Decision,
    GateConfig,
    Recipe,
    Site,
    Step,
    compare,
    cost,
    create_backbone,
    data,
    estimate,
    fit,
    gate,
    load,
    register_criterion,
    register_method,
    trace,
)
from cofire.comparison import contenders
from cofire.comparison.contenders import Contender, at_budget, chosen
from cofire.comparison.plot import lowest, spread
from cofire.comparison.table import Comparison, Row
from cofire.experiments.recipes import BudgetPart, as_table, read_experiment, read_run
from cofire.experiments.runs import eval_run, gate_config, read_sets
from cofire.gates import base as gates_base
from cofire.gates.base import gate_types
from cofire.pruning import PruneConfig, prune_types
from cofire.pruning import base as pruning_base


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe whose baseline is trained already."""
    torch.manual_seed(0)
    model = create_backbone("resnet8_digits")
    fit(model, data.digits()[0].loader(64, train=True), Recipe(epochs=3, lr=0.1, schedule="cosine"))
    return write_recipe(tmp_path_factory.mktemp("compare"), model)


@pytest.fixture(scope="module")
def made(recipe: Path) -> tuple[Comparison, Path]:
    """Some methods of each sort, compared, and where."""
    out = recipe.parent / "out"
    methods = "L1,FPGM-soft,FTWT-top,FBS,BlockDrop,LCCL"
    return compare([recipe], methods=methods, macs=0.5, out=out, rounds=2), out / "tiny" / "0.5"


def rows(found: Comparison) -> dict[str, Row]:
    return {row.method: row for row in found.networks[0].rows}


# Who takes part


def test_every_registered_method_takes_part_in_all_its_forms() -> None:
    names = set(contenders())
    for config_type in {*prune_types().values(), *gate_types().values()}:
        for form in config_type.forms:
            assert (f"{config_type.__name__}-{form}" if form else config_type.__name__) in names
    assert "Fixed" not in names  # a probe, no method
    assert "Uniform" not in names  # the old name of another


def test_a_method_of_ones_own_takes_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pruning_base, "_criteria", dict(pruning_base._criteria))

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Own(PruneConfig):
        pass

    @register_criterion(Own)
    def first_leave(model: nn.Module, channels: Any, loader: Any, config: Own) -> dict[str, Tensor]:
        return {name: torch.arange(size).double() for name, size in channels.sizes.items()}

    assert contenders()["Own"].sort == "static"


def test_methods_are_named_one_by_one_or_by_their_sort() -> None:
    everything = [one.name for one in chosen("all")]
    assert everything == list(contenders())
    assert [one.name for one in chosen("static")] + [one.name for one in chosen("dynamic")] == everything
    assert [one.name for one in chosen("FBS, L1,FBS")] == ["FBS", "L1"]
    with pytest.raises(ConfigError, match="unknown method 'FTWTT'; did you mean 'FTWT'"):
        chosen("FTWTT")


# Budgets


@pytest.mark.parametrize("contender", contenders().values(), ids=lambda one: one.name)
def test_what_can_be_foretold_is_within_the_budget(contender: Contender, recipe: Path) -> None:
    base = read_experiment(recipe)
    experiment = at_budget(contender, base, 0.5)
    alone = experiment.gate is not None and experiment.gate.alone
    if alone:  # what the method adds learns at the network's rate, and the network stays as it is
        wanted = dataclasses.replace(base.train, train="heads", head_lr=base.train.lr, distill=0.0)
        assert experiment.train == wanted
    aims = experiment.gate is not None and experiment.gate.knob == "target"
    if aims:  # an earlier epoch may not have come to the target
        assert experiment.train == dataclasses.replace(base.train, select="last")
    rest = dataclasses.replace(experiment, name=base.name, gate=None, prune=None, signature=None, budget=None)
    assert (dataclasses.replace(rest, train=base.train) if alone or aims else rest) == base
    if experiment.prune is not None:
        assert experiment.prune.macs == 0.5
    elif experiment.gate is not None and experiment.gate.knob == "threshold":
        assert experiment.budget == BudgetPart(macs=0.5)
    elif aims:
        assert experiment.gate == contender.config_type(**contender.options).aimed(0.5)  # type: ignore[union-attr]
    elif experiment.gate is not None and experiment.gate.knob is not None:
        sets = read_sets(base)
        model = load(str(base.backbone.weights)).eval()
        config: Any = gate_config(experiment, model, sets)
        gated = gate(model, config).eval()
        if config.foretold:
            images = sets.train.take(slice(0, 500)).loader(250)
            share = 1 - estimate(model, config, images, [config.ratio], cascade=True).reduction["executed+heads"][0]
        else:
            gated(sets.train.normalise(sets.train.pixels(torch.arange(64))))
            share = float(1 - gated.cost().reduction("executed+heads").mean())
        assert 0.45 <= share <= 0.503


def test_what_training_aims_at_follows_from_the_budget() -> None:
    assert LCS().aimed(0.7).target == 0.7
    # a quarter of each sum is always there; of the other three, half are: the partial sums above their median
    assert CGNet(parts=4).aimed(0.625).target == pytest.approx(0.0, abs=1e-3)
    assert CGNet(parts=4).aimed(0.25 + 0.75 * 0.1587).target == pytest.approx(1.0, abs=1e-3)  # one deviation above
    with pytest.raises(
        ConfigError, match=r"macs=0.2 cannot be reached: CGNet adds up 0.25 of the MACs at every position"
    ):
        CGNet(parts=4).aimed(0.2)
    with pytest.raises(ConfigError, match="FBS has no target to aim with"):
        FBS().aimed(0.5)


def test_a_budget_that_no_knob_meets_says_so(recipe: Path) -> None:
    with pytest.raises(ConfigError, match=r"macs=0\.001 cannot be reached: with ratio = 0\.01, 0\.\d+ of the MACs"):
        at_budget(contenders()["FTWT"], read_experiment(recipe), 0.001)


def test_a_number_of_ones_own_is_turned_until_the_gates_cost_the_budget(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gates_base, "_methods", dict(gates_base._methods))

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class First(GateConfig):
        part: float = 1.0

        @property
        def knob(self) -> str:
            return "part"

    @final
    @register_method(First)
    class FirstFilters(AbstractMethod):
        def decide(self, site: Site, x_BIHW: Tensor) -> Decision:
            kept_O = torch.arange(site.filters) < self.config.part * site.filters
            return Decision(None, kept_O.to(x_BIHW.dtype).expand(len(x_BIHW), -1))

        def loss(self, step: Step) -> Tensor:
            return torch.zeros(())

    base = read_experiment(recipe)
    turned = at_budget(contenders()["First"], base, 0.5).gate
    gated = gate(load(str(base.backbone.weights)).eval(), turned)
    sets = read_sets(base)
    with torch.no_grad():
        gated(sets.train.normalise(sets.train.pixels(torch.arange(4))))
    assert float(1 - gated.cost().reduction("executed+heads").mean()) == pytest.approx(0.5, abs=0.05)  # 8 to 32 filters


# Runs


def test_every_method_gets_the_same_but_its_own_section(made: tuple[Comparison, Path], recipe: Path) -> None:
    found, folder = made
    base = as_table(read_experiment(recipe))
    for name in rows(found):
        table = as_table(read_run(folder / f"{name}-s0" / "run"))
        for part in ("gate", "prune", "signature", "name"):
            table.pop(part, None)
        assert table == {key: value for key, value in base.items() if key != "name"}


def test_a_row_is_what_an_ordinary_run_found(made: tuple[Comparison, Path]) -> None:
    found, folder = made
    for name, row in rows(found).items():
        run = folder / f"{name}-s0" / "run"
        test = eval_run(run)
        assert row.values("top1") == [test.top1]
        assert row.values("executed") == [1 - test.reduction["executed"]]


def test_budgets_are_met_or_reported(made: tuple[Comparison, Path]) -> None:
    network = made[0].networks[0]
    notes = "\n".join(network.notes())
    for row in network.rows:
        off = row.reached - 0.5
        assert (f"{row.method} missed the budget" in notes) == (abs(off) > 0.01)
        if row.sort == "static" or row.method == "FTWT-top":
            assert -0.01 <= off <= 0.0051, row.method
    assert "LCCL missed the budget" in notes


def test_soft_pruning_cuts_what_is_zero_in_the_end(made: tuple[Comparison, Path], recipe: Path) -> None:
    model = load(made[1] / "FPGM-soft-s0" / "run")
    dense = load(recipe.parent / "dense")
    left = cost(trace(model), {}).dense_total / cost(trace(dense), {}).dense_total
    assert left == pytest.approx(rows(made[0])["FPGM-soft"].values("executed")[0])


def test_dynamic_rows_have_bits_and_a_twin_or_a_reason(made: tuple[Comparison, Path]) -> None:
    found = rows(made[0])
    top = found["FTWT-top"]
    assert len(top.values("bits")) == len(top.values("twin")) == 1
    assert 0 <= top.values("bits")[0] <= 1
    notes = "\n".join(made[0].networks[0].notes())
    assert "LCCL has no static twin: a twin keeps filters; this method decides on pixels" in notes
    assert "BlockDrop has no static twin: a twin keeps filters; this method decides on block" in notes
    assert "FBS has no static twin: what the method scales has no dense form" in notes


def test_the_engine_times_what_it_runs_and_says_what_it_refuses(made: tuple[Comparison, Path]) -> None:
    found = rows(made[0])
    for name in ("L1", "FTWT-top", "FBS", "BlockDrop"):
        time = found[name].time
        assert time is not None
        assert time["mean"] is not None
        assert time["mean"] > 0
    assert found["LCCL"].time is None
    assert "LCCL is not timed: " in "\n".join(made[0].networks[0].notes())


def test_the_json_has_every_result_in_full(made: tuple[Comparison, Path]) -> None:
    found, folder = made
    written = json.loads((folder / "comparison.json").read_text())
    assert set(written["provenance"]) == set(found.to_json()["provenance"])
    (network,) = written["networks"]
    assert network["timing"]["provenance"]["machine"]
    for row in network["rows"]:
        result = json.loads((folder / f"{row['method']}-s0" / "run" / "result.json").read_text())
        assert row["seeds"]["0"]["result"] == result
        assert result["provenance"]["commit"] is not None or result["provenance"]["cofire"]


def test_the_figure_names_every_method_in_both_panels(made: tuple[Comparison, Path]) -> None:
    drawn = (made[1] / "comparison.svg").read_text()
    for name, row in rows(made[0]).items():
        shown = len(re.findall(rf">{name}(?: ↓ [0-9.]+)?<", drawn))
        assert shown == (2 if row.time else 1), name


def test_what_is_far_below_the_others_stands_at_the_edge() -> None:
    assert lowest(90.0, [89.0, 88.0, 87.0]) == 87.0
    assert lowest(90.0, [89.0, 88.0, 20.0]) == 82.0  # four times the middle drop
    assert lowest(90.0, [92.0, 91.0, 30.0]) == 30.0  # most gain: there is no usual drop
    assert lowest(90.0, []) == 90.0


def test_names_beside_the_figure_lie_a_line_apart_around_their_dots() -> None:
    assert spread([1.0, 5.0], 2.0) == [1.0, 5.0]
    assert spread([4.0, 4.0, 4.0], 2.0) == [2.0, 4.0, 6.0]
    assert spread([0.0, 3.0, 4.0], 2.0) == [0.0, 2.5, 4.5]
    assert spread([], 1.0) == []


def test_a_finished_comparison_is_read_and_other_methods_join_it(made: tuple[Comparison, Path], recipe: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in made[1].glob("*/run/model.safetensors")}
    again = compare([recipe], methods="L1", macs=0.5, out=recipe.parent / "out", rounds=0)
    assert set(rows(again)) == set(rows(made[0]))
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_a_method_that_cannot_is_a_row_with_its_reason(recipe: Path, tmp_path: Path) -> None:
    found = compare([recipe], methods="L1,FTWT-top,BlockDrop", macs=0.001, out=tmp_path, rounds=0, epochs=0)
    refused = {name: row.refused for name, row in rows(found).items()}
    assert "macs=0.001 cannot be reached" in (refused["L1"] or "")
    assert "macs=0.001 cannot be reached" in (refused["FTWT-top"] or "")
    assert refused["BlockDrop"] is None
    assert rows(found)["BlockDrop"].results
    assert "L1 was not run: macs=0.001 cannot be reached" in str(found)


def test_a_twin_is_trained_where_it_is_asked_for(recipe: Path, tmp_path: Path) -> None:
    found = compare([recipe], methods="L1,FBS", macs=0.5, out=tmp_path, epochs=0, rounds=0, twins=True)
    twins = {name: row.values("trained twin") for name, row in rows(found).items()}
    folder = tmp_path / "tiny" / "0.5" / "FBS-s0" / "run" / "twin"
    assert twins == {"L1": [], "FBS": [json.loads((folder / "result.json").read_text())["test"]["top1"]]}


def test_without_weights_the_baseline_is_trained_once_and_all_start_from_it(recipe: Path, tmp_path: Path) -> None:
    fresh = tmp_path / "fresh.toml"
    fresh.write_text(recipe.read_text().replace("distill = 0.5\n", "").replace("weights = ", "# weights = "))
    found = compare([fresh], methods="L1,Random", macs=0.5, out=tmp_path / "out", epochs=0, seeds=2, rounds=0)
    dense = tmp_path / "out" / "fresh" / "dense" / "run"
    assert read_run(dense).train.epochs == 1
    for name in ("L1-s0", "L1-s1", "Random-s0", "Random-s1"):
        experiment = read_run(tmp_path / "out" / "fresh" / "0.5" / name / "run")
        assert experiment.backbone.weights == str(dense)
        assert experiment.train.epochs == 0
        assert experiment.prune is not None
        if name.startswith("Random"):
            assert experiment.prune.seed == int(name[-1])  # type: ignore[attr-defined]
    assert [len(row.results) for row in found.networks[0].rows] == [2, 2]
