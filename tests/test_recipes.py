"""Every recipe that ships can be read, builds its model and trains a step; what is wrong in one is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from small import ROOT, digest

from cofire import (
    FTWT,
    CofireError,
    ConfigError,
    FileError,
    data,
    estimate,
    evaluate,
    fit,
    gate,
    load,
    save,
    signatures,
)
from cofire.data import Images
from cofire.experiments.recipes import as_table, parse_experiment, read_experiment, read_run
from cofire.experiments.runs import build_gated, build_model, eval_run, gate_config, read_sets, train_experiment
from cofire.pruning import cp, prune_types

RECIPES = sorted((ROOT / "recipes").rglob("*.toml"))


def kind(path: Path) -> tuple[Any, ...]:
    """What of a recipe decides which code it reaches."""
    found = read_experiment(path)
    parts = (type(part) for part in (found.gate, found.prune, found.signature, found.budget))
    return (found.backbone.name, *parts, getattr(found.gate, "mode", None), found.data.name, bool(found.train.epochs))


KINDS = {kind(path): path for path in RECIPES}  # the last of each
SHAPES = {
    **{name: (3, 32, 32) for name in ("cifar10", "cifar100", "synthetic")},
    **{name: (3, 64, 64) for name in ("imagenet", "pictures")},  # 64 pixels: small, and still 2 x 2 in the last layer
    "digits": (1, 8, 8),
}

TINY: dict[str, Any] = {
    "data": {"name": "synthetic", "batch_size": 8, "args": {"train": 24, "test": 8, "shape": [1, 8, 8]}},
    "backbone": {"name": "resnet8_digits"},
    "gate": {"ratio": 0.8},
    "train": {"epochs": 1},
}


def tiny(**sections: Any) -> dict[str, Any]:
    """The tiny recipe with some sections replaced; None takes one away."""
    return {key: value for key, value in {**TINY, **sections}.items() if value is not None}


@pytest.fixture
def synthetic_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few synthetic images in place of every source, so that no data set is needed."""

    def source(name: str, **arguments: Any) -> tuple[Images, Images]:
        assert name in data.list_sources()
        return data.synthetic(12, SHAPES[name]).split(4)

    monkeypatch.setattr(data, "source", source)


@pytest.fixture
def quick_lasso(monkeypatch: pytest.MonkeyPatch) -> None:
    """A LASSO of 512 channels takes most of a minute; what a recipe says shows in a rough one too."""
    monkeypatch.setattr(cp, "_PLACES", 10)
    monkeypatch.setattr(cp, "_HALVINGS", 3)


# The recipes that ship


def recipe_id(path: Path) -> str:
    return path.relative_to(ROOT / "recipes").as_posix()


def test_there_are_recipes() -> None:
    assert RECIPES


@pytest.mark.usefixtures("synthetic_source", "quick_lasso")
@pytest.mark.parametrize("path", KINDS.values(), ids=recipe_id)
def test_every_kind_of_recipe_builds_its_model_and_trains_a_step(path: Path) -> None:
    written = read_experiment(path)
    changes = ["data.batch_size=4", "data.val=0"]
    if written.backbone.weights:
        changes += ["backbone.weights=", "train.distill=0"]
    experiment = read_experiment(path, [*changes, *(["train.epochs=1"] if written.train.epochs else [])])
    sets = read_sets(experiment)
    model = build_gated(experiment, sets)
    part = experiment.data
    batch = sets.train.take(slice(0, 4)).loader(4, train=True, augment=part.augment, pad=part.pad)
    before = digest(model)
    fitted = fit(model, batch, experiment.train)
    assert len(fitted.epochs) == experiment.train.epochs
    assert (digest(model) != before) == bool(experiment.train.epochs)


@pytest.mark.usefixtures("synthetic_source")
@pytest.mark.parametrize("path", [path for path in RECIPES if '"run:' in path.read_text()], ids=recipe_id)
def test_weights_that_a_recipe_takes_from_a_run_are_made_by_another(path: Path) -> None:
    experiment = read_experiment(path)
    assert experiment.backbone.weights
    dense = read_experiment(ROOT / "recipes" / f"{experiment.backbone.weights.removeprefix('run:')}.toml")
    assert (dense.backbone.name, dense.backbone.args) == (experiment.backbone.name, experiment.backbone.args)
    assert (dense.gate, dense.prune) == (None, None)


@pytest.mark.usefixtures("synthetic_source")
@pytest.mark.parametrize("path", sorted((ROOT / "recipes" / "digits").glob("*.toml")), ids=recipe_id)
def test_a_recipe_makes_a_run(path: Path, tmp_path: Path) -> None:
    changes = ["data.batch_size=4", "data.val=4", "train.epochs=1"]
    result = train_experiment(read_experiment(path, changes), tmp_path / "run")
    assert result["test"]["n"] == 4
    assert result["experiment"]["name"] == path.stem
    assert eval_run(tmp_path / "run").to_json()["loss"] == pytest.approx(result["test"]["loss"])


@pytest.mark.parametrize("path", RECIPES, ids=recipe_id)
def test_every_recipe_begins_with_a_line_that_says_what_it_is(path: Path) -> None:
    assert path.read_text().startswith("# ")


@pytest.mark.parametrize("path", RECIPES, ids=recipe_id)
def test_no_recipe_names_a_place_of_one_machine(path: Path) -> None:
    experiment = read_experiment(path)
    weights, places = experiment.backbone.weights, [experiment.data.args.get(key) for key in ("root", "train", "test")]
    assert not weights or not {"..", "/", "~"} & set(Path(weights).parts)
    assert [place for place in places if isinstance(place, str) and not place.startswith("data:")] == []


@pytest.mark.parametrize("path", RECIPES, ids=recipe_id)
def test_the_table_of_an_experiment_reads_back_as_the_experiment(path: Path) -> None:
    experiment = read_experiment(path)
    assert parse_experiment(json.loads(json.dumps(as_table(experiment)))) == experiment


# What a recipe may say


def test_a_recipe_that_extends_another_says_only_what_differs(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text('[data]\nname = "digits"\nval = 9\n[backbone]\nname = "resnet8_digits"\n')
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "top.toml").write_text('extends = "../base.toml"\n[data]\nval = 5\n[gate]\nratio = 0.7\n')
    experiment = read_experiment(tmp_path / "sub" / "top.toml", ["data.batch_size=32"])
    assert (experiment.data.name, experiment.data.val, experiment.data.batch_size) == ("digits", 5, 32)
    assert (experiment.name, experiment.gate) == ("top", FTWT(ratio=0.7))


@pytest.mark.parametrize(
    ("first", "said"),
    [
        ('extends = "a.toml"', r"a\.toml, which .*a\.toml extends, extends itself"),
        ('extends = "b.toml"', r"b\.toml, which .*a\.toml extends, does not exist"),
        ("extends = 3", "extends must be the path of another recipe, got 3"),
    ],
)
def test_what_a_recipe_extends_must_be_another_recipe(first: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(first)
    with pytest.raises(CofireError, match=said):
        read_experiment(tmp_path / "a.toml")


def test_weights_of_a_run_that_is_not_there_say_how_to_make_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COFIRE_RUNS", str(tmp_path))
    experiment = parse_experiment(tiny(backbone={"name": "resnet8_digits", "weights": "run:some/net"}))
    with pytest.raises(FileError, match=r"no such run; make it by `cofire train recipes/some/net\.toml --out"):
        build_model(experiment, read_sets(experiment))


def test_no_epochs_leave_the_weights_as_they_are(tmp_path: Path) -> None:
    experiment = parse_experiment(tiny(gate=None, train={"epochs": 0}))
    result = train_experiment(experiment, tmp_path)
    assert (result["epochs"], result["selected_epoch"]) == ([], None)
    assert digest(load(tmp_path)) == digest(build_model(experiment, read_sets(experiment)))


def test_a_gated_run_keeps_what_was_expected_of_it(tmp_path: Path) -> None:
    experiment = parse_experiment(TINY)
    estimated = train_experiment(experiment, tmp_path)["estimated"]
    sets = read_sets(experiment)
    model = build_model(experiment, sets)
    for way, cascade in (("independent", False), ("cascade", True)):
        whole = estimate(model, FTWT(ratio=0.8), sets.train.loader(24), [0.8], cascade=cascade)
        for column, saved in estimated[way].items():
            assert saved == pytest.approx(whole.reduction[column][0], abs=1e-6)
    assert estimated["images"] == 24


def test_presets_are_a_base_for_the_other_keys() -> None:
    experiment = parse_experiment(tiny(gate={"preset": "official", "ratio": 0.7, "floor": 1}))
    assert experiment.gate == FTWT.preset("official", ratio=0.7, floor=1)


def test_overrides_come_on_top_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('[data]\nname = "digits"\n[backbone]\nname = "resnet8_digits"\n')
    experiment = read_experiment(tmp_path / "a.toml", ["gate.ratio=0.7", "train.schedule=cosine", "name=other"])
    assert experiment.gate == FTWT(ratio=0.7)
    assert (experiment.train.schedule, experiment.name) == ("cosine", "other")
    assert read_experiment(tmp_path / "a.toml").gate is None
    assert read_experiment(tmp_path / "a.toml").name == "a"


def test_the_validation_set_is_held_out_of_the_training_set() -> None:
    held_out = parse_experiment(tiny(data={**TINY["data"], "val": 4}))
    sets = read_sets(held_out)
    assert (len(sets.train), len(sets.val or ()), len(sets.test)) == (20, 4, 8)
    watched = parse_experiment(tiny(data={**TINY["data"], "val": "test"}, train={"select": "last"}))
    sets = read_sets(watched)
    assert sets.val is sets.test
    assert read_sets(parse_experiment(TINY)).val is None


@pytest.mark.parametrize("per", ["model", "group", "filter"])
def test_a_run_with_a_budget_ends_with_it(per: str, tmp_path: Path) -> None:
    table = tiny(gate={"ratio": 0.9}, budget={"macs": 0.5, "per": per}, train={"epochs": 1, "select": "last"})
    result = train_experiment(parse_experiment(table), tmp_path)
    model, images = load(tmp_path), read_sets(read_run(tmp_path)).train.loader(24)
    reached = 1 - evaluate(model, images, text="").reduction["executed+heads"]
    assert reached == pytest.approx(0.5, abs=0.005)
    assert eval_run(tmp_path).reduction == result["test"]["reduction"]


def test_a_fixed_number_of_filters_for_a_budget(tmp_path: Path) -> None:
    heads = {"select": "top", "pool": "both", "softmax": False, "standardise": True}
    table = tiny(gate=heads, signature={"kind": "mass", "macs": 0.5})
    result = train_experiment(parse_experiment(table), tmp_path)
    assert 1 - result["test"]["reduction"]["executed+heads"] == pytest.approx(0.5, abs=0.03)  # additions refill
    assert result["test"]["spread"]["executed"] < 0.05
    with pytest.raises(ConfigError, match=r"\[budget\] sets a threshold, and FTWT, fixed k does not decide by one"):
        train_experiment(parse_experiment({**table, "budget": {"macs": 0.5}}), tmp_path / "both")


@pytest.mark.parametrize(
    "signature",
    [
        {"kind": "uniform", "keep": 0.5},
        {"kind": "uniform", "macs": 0.5},
        {"kind": "taylor", "macs": 0.5},
        {"kind": "mass", "macs": 0.5},
        {"kind": "file", "path": "signature.json"},
    ],
    ids=lambda part: "-".join(map(str, part.values())),
)
def test_a_signature_is_worked_out(signature: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    experiment = parse_experiment(tiny(signature=signature))
    sets = read_sets(experiment)
    model = build_model(experiment, sets)
    signatures.write("signature.json", signatures.uniform(model, FTWT(), 0.3))
    config = gate_config(experiment, model, sets)
    assert config.signature
    if signature["kind"] == "file":
        assert config.signature == signatures.read("signature.json")
    build_gated(experiment, sets)


def test_weights_may_be_a_file_or_the_folder_of_a_dense_run(tmp_path: Path) -> None:
    dense = parse_experiment(tiny(gate=None))
    model = build_model(dense, read_sets(dense))
    folder = save(model, tmp_path / "dense")
    for weights in (folder, folder / "model.safetensors"):
        other = parse_experiment(
            tiny(backbone={"name": "resnet8_digits", "weights": str(weights)}, train={"epochs": 1, "seed": 7})
        )
        assert digest(build_model(other, read_sets(other))) == digest(model)


def test_a_gated_run_is_no_backbone(tmp_path: Path) -> None:
    experiment = parse_experiment(TINY)
    model = build_model(experiment, read_sets(experiment))
    save(gate(model, FTWT()), tmp_path / "gated")
    wrong = parse_experiment(tiny(backbone={"name": "resnet8_digits", "weights": str(tmp_path / "gated")}))
    with pytest.raises(ConfigError, match=r"must hold a dense .* got a gated model"):
        build_model(wrong, read_sets(wrong))
    save(model, tmp_path / "dense")
    wrong = parse_experiment(
        tiny(data={"name": "synthetic"}, backbone={"name": "resnet20", "weights": str(tmp_path / "dense")})
    )
    with pytest.raises(ConfigError, match=r"must hold a dense .*resnet20.* got .*resnet8_digits"):
        build_model(wrong, read_sets(wrong))


def test_other_seeds_give_other_fresh_weights() -> None:
    digests = set()
    for seed in (0, 0, 1):
        experiment = parse_experiment(tiny(train={"seed": seed}))
        digests.add(digest(build_model(experiment, read_sets(experiment))))
    assert len(digests) == 2


# Runs


def test_a_run_is_a_folder_that_explains_itself(tmp_path: Path) -> None:
    experiment = parse_experiment(TINY)
    result = train_experiment(experiment, tmp_path)
    assert read_run(tmp_path) == experiment
    assert result == json.loads((tmp_path / "result.json").read_text())
    assert result["n"] == {"train": 24, "val": 0, "test": 8}
    assert result["provenance"]["torch"]
    assert eval_run(tmp_path).to_json()["top1"] == result["test"]["top1"]
    assert load(tmp_path).config == experiment.gate
    text = (tmp_path / "result.json").read_text()
    assert str(ROOT) not in text
    assert str(Path.home()) not in text


def test_a_finished_run_is_returned_and_not_made_again(tmp_path: Path) -> None:
    first = train_experiment(parse_experiment(TINY), tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert train_experiment(parse_experiment(TINY), tmp_path) == first
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


@pytest.mark.parametrize("finished", [True, False])
def test_a_folder_with_another_run_is_refused_and_left_alone(tmp_path: Path, finished: bool) -> None:
    train_experiment(parse_experiment(TINY), tmp_path)
    if not finished:
        (tmp_path / "result.json").unlink()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    other = parse_experiment(tiny(gate={"ratio": 0.7}, data={**TINY["data"], "batch_size": 4}))
    with pytest.raises(FileError, match=r"holds another run \(it differs in data\.batch_size, gate\.ratio\)"):
        train_experiment(other, tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_run_that_an_older_version_began_goes_on(tmp_path: Path) -> None:
    experiment = parse_experiment(TINY)
    first = train_experiment(experiment, tmp_path)
    table = json.loads((tmp_path / "experiment.json").read_text())
    for section, option in (("train", "temperature"), ("data", "eval_batch_size"), ("gate", "open_bias")):
        assert table[section].pop(option) is not None  # as if that version had not known it
    (tmp_path / "experiment.json").write_text(json.dumps(table))
    assert train_experiment(experiment, tmp_path) == first
    other = parse_experiment(tiny(train={"epochs": 1, "temperature": 2.0}))
    with pytest.raises(FileError, match=r"holds another run \(it differs in train\.temperature\)"):
        train_experiment(other, tmp_path)


def test_a_description_that_cannot_be_read_is_another_run(tmp_path: Path) -> None:
    train_experiment(parse_experiment(TINY), tmp_path)
    table = json.loads((tmp_path / "experiment.json").read_text())
    table["train"]["newer"] = 3
    (tmp_path / "experiment.json").write_text(json.dumps(table))
    with pytest.raises(FileError, match=r"holds another run \(it differs in train\.newer\)"):
        train_experiment(parse_experiment(TINY), tmp_path)
    with pytest.raises(ConfigError, match=r"experiment\.json: unknown key in \[train\]: 'newer'"):
        read_run(tmp_path)


# Mistakes


@pytest.mark.parametrize(
    ("table", "error"),
    [
        (tiny(tain={}), "unknown section or key in the recipe: 'tain'; did you mean 'train'"),
        (tiny(data=None), r"the recipe must have a section \[data\]"),
        (tiny(backbone=None), r"the recipe must have a section \[backbone\]"),
        (tiny(train={"epoch": 3}), r"unknown key in \[train\]: 'epoch'; did you mean 'epochs'\?"),
        (tiny(gate={"ration": 0.8}), r"unknown key in \[gate\]: 'ration'; did you mean 'ratio'\?"),
        (tiny(gate={"ratio": 1.5}), r"FTWT.ratio must be in \(0, 1\], got 1.5"),
        (tiny(gate={"ratio": 0}), r"FTWT.ratio must be in \(0, 1\], got 0"),
        (tiny(gate={"type": "FTW"}), "unknown gate type 'FTW'; did you mean 'FTWT'"),
        (tiny(gate={"preset": "papers"}), "unknown FTWT preset 'papers'; did you mean 'paper'"),
        (tiny(gate=3), r"\[gate\] must be a table, got 3"),
        (
            tiny(train={"schedule": "cosin"}),
            r"\[train\] schedule must be one of 'steps', 'cosine', 'one-cycle', got 'cosin'",
        ),
        (tiny(data={"name": "digits", "val": "test"}), 'val = "test" would select on the test set'),
        (tiny(gate=None, budget={"macs": 0.5}), r"\[budget\] sets thresholds of gates: it needs a section \[gate\]"),
        (tiny(budget={"macs": 1.5}), r"\[budget\] macs is the share of MACs that remains and must be in \(0, 1\)"),
        (tiny(signature={"kind": "uniform"}), r"\[signature\] kind 'uniform' needs the key 'keep' or 'macs'"),
        (
            tiny(signature={"kind": "file", "path": "x"}, gate=None),
            r"\[signature\] needs a \[gate\] of a method that takes a signature",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_mistake_in_a_recipe_is_named(table: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        parse_experiment(table)


@pytest.mark.parametrize(
    ("table", "error"),
    [
        (tiny(data={"name": "digit"}), "unknown data source 'digit'; did you mean 'digits'"),
        (tiny(data={"name": "digits", "args": {"rot": 1}}), "unknown argument of data source 'digits': 'rot'"),
        (tiny(backbone={"name": "resnet8_digit"}), "unknown backbone .* did you mean 'resnet8_digits'"),
        (tiny(backbone={"name": "resnet20", "args": {"widht": 2}}), "unknown argument of backbone 'resnet20' 'widht'"),
        (tiny(backbone={"name": "resnet20"}), r"1, 8, 8"),  # wants three channels
        (tiny(backbone={"name": "resnet20"}, gate=None), r"1, 8, 8"),
        (tiny(backbone={"name": "resnet8_digits", "weights": "gone.pth"}), r"'gone\.pth' does not exist"),
        (tiny(data={**TINY["data"], "batch_size": 100}), "batch_size must be at most 24"),
        (tiny(data={**TINY["data"], "val": 24}), r"n to hold out must be in 1\.\.23, got 24"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_recipe_that_cannot_be_carried_out_leaves_nothing_behind(
    table: dict[str, Any], error: str, tmp_path: Path
) -> None:
    with pytest.raises(CofireError, match=error):
        train_experiment(parse_experiment(table), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_recipe_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"recipe .*gone\.toml does not exist"):
        read_experiment(tmp_path / "gone.toml")
    (tmp_path / "a.toml").write_text("[data\n")
    with pytest.raises(FileError, match=r"a\.toml is not readable as TOML"):
        read_experiment(tmp_path / "a.toml")
    with pytest.raises(FileError, match="is not readable as TOML"):
        read_experiment(tmp_path)


def test_a_folder_that_is_no_run_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"experiment\.json does not exist"):
        eval_run(tmp_path)
    (tmp_path / "experiment.json").write_text("[]")
    with pytest.raises(FileError, match=r"experiment\.json must hold a table"):
        eval_run(tmp_path)


def test_a_threshold_needs_gates(tmp_path: Path) -> None:
    train_experiment(parse_experiment(tiny(gate=None)), tmp_path)
    with pytest.raises(ConfigError, match="threshold: this run has no gates"):
        eval_run(tmp_path, threshold=0.5)


# Recipes of static methods


@pytest.mark.parametrize("method", sorted(prune_types()))
@pytest.mark.parametrize("gated", [True, False])
def test_a_recipe_can_prune_and_its_figures_count_from_the_whole_network(
    method: str, gated: bool, tmp_path: Path
) -> None:
    pruning = {"type": method, "macs": 0.6}
    table = tiny(prune=pruning | {"soft": False}) if gated else tiny(prune=pruning, gate=None)
    experiment = parse_experiment(table)
    assert parse_experiment(json.loads(json.dumps(as_table(experiment)))) == experiment
    result = train_experiment(experiment, tmp_path / "run")
    saved = result["test"]["reduction"]["executed"]
    assert saved >= 0.4 if gated else saved == pytest.approx(0.4, abs=0.01)
    assert eval_run(tmp_path / "run").to_json() == result["test"]
    assert train_experiment(experiment, tmp_path / "run") == result


def test_a_pruned_run_does_not_serve_as_dense_weights(tmp_path: Path) -> None:
    train_experiment(parse_experiment(tiny(prune={"type": "L1", "macs": 0.6}, gate=None)), tmp_path / "run")
    on_top = parse_experiment(tiny(backbone={"name": "resnet8_digits", "weights": str(tmp_path / "run")}))
    with pytest.raises(ConfigError, match=r"must hold a dense .* got a pruned one"):
        build_model(on_top, read_sets(on_top))


@pytest.mark.parametrize(
    ("table", "text"),
    [
        ({"type": "L1", "macs": 0.5, "seed": 1}, r"unknown key in \[prune\]: 'seed'; known: allocation, macs"),
        ({"type": "L1"}, r"\[prune\] must have the key 'macs'"),
        ({"type": "L2", "macs": 0.5}, r"unknown prune type 'L2'; .*known: .*L1,"),
        ({"macs": 0.5}, r"\[prune\] must be a table with the key 'type', one of"),
        ({"type": "L1", "macs": 2}, "must be in"),
        (3, r"\[prune\] must be a table"),
    ],
)
def test_what_is_wrong_in_a_prune_table_is_named(table: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        parse_experiment(tiny(prune=table))
