"""The command line: each sub-command is one call of a public function."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from cofire import data, demo, zoo
from cofire.analysis.command import analyze, report
from cofire.analysis.drawing import write_figure
from cofire.analysis.figures import trade_off
from cofire.analysis.tradeoff import reproduced_points
from cofire.backbones import list_backbones
from cofire.bench.command import bench
from cofire.comparison.command import compare
from cofire.compiling import compile
from cofire.completion import script, verbs
from cofire.doctor import doctor
from cofire.errors import ConfigError, unknown
from cofire.estimate import RATIOS
from cofire.experiments import runs
from cofire.experiments.paper import Budget, paper_tables
from cofire.experiments.provenance import version
from cofire.experiments.recipes import read_experiment
from cofire.experiments.reproduce import made_on, run_missing, tables
from cofire.experiments.reproduce import reproduce as reproduce_table
from cofire.experiments.twin import train_twin
from cofire.explore.command import explore
from cofire.exporting import export
from cofire.files.atomic import write_json
from cofire.gates.base import gate_types
from cofire.gates.gating import GatedModel, describe_backbone
from cofire.gates.persistence import load, read_card
from cofire.graph.cost import cost
from cofire.graph.graph import trace
from cofire.measured import MEASURED, AbstractMeasured
from cofire.plugins import load_installed, load_plugin
from cofire.pruning import prune_types
from cofire.results import app as results_app
from cofire.runtime.classify import classify
from cofire.runtime.engine import Precision, load_program
from cofire.runtime.program_file import read as read_program
from cofire.serving.command import serve
from cofire.shell import AsJson, output, show
from cofire.shell import run as call
from cofire.shift.command import shift
from cofire.speedup.command import speedup
from cofire.training.processes import processes

app = typer.Typer(
    name="cofire",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="Networks that compute only what an input needs: dynamic channel pruning of CNNs.\n\n"
    "A typical session: `cofire solve RECIPE --macs 0.5` (which r gives half the MACs?), "
    "`cofire train RECIPE --set gate.ratio=... --out runs/a`, `cofire eval runs/a`, "
    "`cofire compile runs/a -o a.cofire`, `cofire run a.cofire PICTURE`, `cofire bench runs/a`.\n\n"
    "Exit codes: 0 done, 2 something you can fix (the message says what), 130 interrupted.",
)
out = output()

RecipeFile = Annotated[Path, typer.Argument(help="A recipe, a TOML file; see the folder recipes/.", metavar="RECIPE")]
RunFolder = Annotated[Path, typer.Argument(help="Folder of a run that `cofire train` made.", metavar="RUN")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", help="Change a recipe value, e.g. gate.ratio=0.8 or train.epochs=4. May be repeated."),
]
NumImages = Annotated[int, typer.Option("--images", min=1, help="How many training images to look at.")]


@app.callback()
def load_plugins(
    plugins: Annotated[
        list[Path] | None,
        typer.Option(
            "--plugin",
            help="A Python file that registers a method, a criterion or a backbone; it is run. May be repeated.",
        ),
    ] = None,
) -> None:
    """Before any command."""
    for path in plugins or ():
        load_plugin(path)


@app.command()
def estimate(
    recipe: RecipeFile,
    overrides: Overrides = None,
    ratios: Annotated[str, typer.Option(help="Ratios r in (0, 1], separated by commas.")] = "",
    images: NumImages = 2000,
    cascade: Annotated[bool, typer.Option(help="Apply the masks: exact, at one pass per ratio.")] = False,
    as_json: AsJson = False,
) -> None:
    """What each ratio r would save, before any training, from one pass over training images."""
    try:
        chosen = [float(part) for part in ratios.split(",")] if ratios else list(RATIOS)
    except ValueError:
        raise ConfigError(f"--ratios takes numbers separated by commas, got {ratios!r}") from None
    parsed = read_experiment(recipe, overrides or ())
    table = runs.estimate_experiment(parsed, images=images, ratios=chosen, cascade=cascade)
    show(as_json, table.to_json(), table)


@app.command()
def solve(
    recipe: RecipeFile,
    macs: Annotated[float | None, typer.Option(help="Share of the MACs that may REMAIN; 0.5 is half.")] = None,
    latency_ms: Annotated[
        float | None, typer.Option(help="Or milliseconds per image in the native engine on this machine.")
    ] = None,
    int8: Annotated[bool, typer.Option("--int8", help="Milliseconds of the engine in int8.")] = False,
    overrides: Overrides = None,
    images: NumImages = 2000,
    as_json: AsJson = False,
) -> None:
    """The ratio r for a budget of MACs or of milliseconds, before any training."""
    if (macs is None) == (latency_ms is None):
        raise ConfigError(f"solve takes one of --macs and --latency-ms, got {'neither' if macs is None else 'both'}")
    parsed = read_experiment(recipe, overrides or ())
    precision: Precision = "int8" if int8 else "float32"
    solution = runs.solve_experiment(parsed, macs=macs, latency_ms=latency_ms, precision=precision, images=images)
    show(as_json, solution.to_json(), f"{solution}\nuse it: --set gate.ratio={solution.config.ratio:.4f}")


@app.command()
def train(
    recipe: RecipeFile,
    out_folder: Annotated[Path, typer.Option("--out", help="Folder of the run; an interrupted run there goes on.")],
    overrides: Overrides = None,
    result: Annotated[Path | None, typer.Option(help="Also copy result.json to this file.")] = None,
    track: Annotated[str | None, typer.Option(help="Also report to tensorboard, trackio or wandb.")] = None,
    twin: Annotated[bool, typer.Option("--twin", help="Then train its static twin the same way, in OUT/twin.")] = False,
    as_json: AsJson = False,
) -> None:
    """Train a recipe, test it once, save model and result. Killed and called again, it goes on where it was."""
    finished = runs.train_experiment(read_experiment(recipe, overrides or ()), out_folder, track=track)
    if twin:
        train_twin(out_folder, track=track)
        finished = runs.read_result(out_folder)
    if not processes().is_main_process:
        return  # one of several processes says it for all
    if result is not None:
        write_json(result, finished)
    test = finished["test"]
    saved = ", ".join(f"{column} {100 * share:.1f} %" for column, share in test["reduction"].items())
    beside = f"; static twin: top-1 {100 * finished['twin']['top1']:.2f} %" if "twin" in finished else ""
    show(
        as_json,
        finished,
        f"top-1 {100 * test['top1']:.2f} % on {test['n']} test images; MACs saved: {saved}{beside}\n"
        f"model and result in {out_folder}; look closer: cofire eval {out_folder}",
    )


@app.command(name="eval")
def evaluate(
    run: RunFolder,
    threshold: Annotated[float | None, typer.Option(help="Run filters with a logit above this (trained: 0).")] = None,
    as_json: AsJson = False,
) -> None:
    """Accuracy, the three cost columns and every gate of a run on its test set."""
    report = runs.eval_run(run, threshold=threshold)
    show(as_json, report.to_json(), report)


@app.command()
def run(
    path: Annotated[Path, typer.Argument(help="A program that `cofire compile` made.", metavar="PROGRAM")],
    pictures: Annotated[list[Path], typer.Argument(help="Pictures; resized and cropped to the program's input.")],
    threads: Annotated[int, typer.Option(min=1, help="Threads for one picture.")] = 1,
    threshold: Annotated[float | None, typer.Option(help="Run filters with a logit above this (trained: 0).")] = None,
    top: Annotated[int, typer.Option(min=1, help="How many classes to print.")] = 5,
    as_json: AsJson = False,
) -> None:
    """Classify pictures with a program: the best classes, what was computed, and how long it took."""
    engine = load_program(path)
    if threshold is not None:
        engine.threshold = threshold
    answers = [classify(engine, picture, threads, top) for picture in pictures]
    show(as_json, [answer.to_json() for answer in answers], "\n".join(map(str, answers)))


app.command(name="compile")(compile)
app.command(name="bench")(bench)
app.command(name="export")(export)
app.command(name="analyze")(analyze)
app.command(name="report")(report)
app.command(name="shift")(shift)
app.command(name="compare")(compare)
app.command(name="serve")(serve)
app.command(name="explore")(explore)
app.command(name="doctor")(doctor)
app.command(name="speedup")(speedup)
app.add_typer(results_app, name="results")


@app.command()
def info(
    what: Annotated[
        Path | None, typer.Argument(help="A run folder, a recipe or a program; nothing: what cofire has.")
    ] = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """The units of a model: shapes, MACs, which are gated and why others are not."""
    if what is None:
        load_installed()
        known = {
            "version": version(),
            "backbones": list_backbones(),
            "gates": sorted(gate_types()),
            "criteria": sorted(prune_types()),
            "data": data.list_sources(),
        }
        show(
            as_json,
            known,
            "\n".join(f"{k}: {v if isinstance(v, str) else ', '.join(v)}" for k, v in known.items()),
        )
        return
    if what.suffix == ".cofire":
        program = read_program(what)
        show(as_json, program.describe(), program)
        return
    card = read_card(what) if what.is_dir() else None
    if what.is_dir():
        model = load(what)
    else:
        parsed = read_experiment(what, overrides or ())
        model = runs.build_gated(parsed, runs.read_sets(parsed))
    if card is not None and not as_json:
        out.print(str(card), markup=False, highlight=False)
    described = {} if card is None else {"card": dataclasses.asdict(card)}
    if isinstance(model, GatedModel):
        units = [unit.__dict__ for unit in model.units]
        show(as_json, {**model.describe(), "units": units, **described}, model.units)
    else:
        dense = cost(trace(model), {}).dense
        show(
            as_json,
            {"backbone": describe_backbone(model), "macs": dense, **described},
            f"plain model, {sum(dense.values()):,} MACs, no gates",
        )


@app.command(name="data")
def prepare(
    name: Annotated[str | None, typer.Argument(help="Set to prepare, read and check; nothing: list them.")] = None,
    origin: Annotated[
        Path | None,
        typer.Option("--from", help="The original archive or its folder; else CIFAR is downloaded."),
    ] = None,
    shorter: Annotated[
        int | None, typer.Option(min=1, help="Of imagenet: resize larger pictures to this shorter side (256).")
    ] = None,
    skip_unreadable: Annotated[
        bool, typer.Option("--skip-unreadable", help="Of imagenet: leave damaged pictures out, counted and named.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """The data sets cofire knows; with a name, bring it into the data folder (COFIRE_DATA) and check it."""
    if name is None:
        show(as_json, data.list_sources(), "\n".join(data.list_sources()))
        return
    options: dict[str, Any] = {} if shorter is None else {"shorter": shorter}
    if skip_unreadable:
        options["unreadable"] = "skip"
    sets = data.prepare(name, origin, **options)
    described = [{"name": s.name, "n": len(s), "shape": list(s.shape)} for s in sets]
    show(as_json, described, "\n".join(map(repr, sets)))


@app.command()
def reproduce(
    table: Annotated[str | None, typer.Argument(help="A table of the paper; nothing: list them.")] = None,
    budget: Annotated[
        Budget, typer.Option(help="short: recipes for two cores; paper: the paper's settings.")
    ] = "short",
    run: Annotated[bool, typer.Option("--run", help="Run or resume what has no result yet; may take days.")] = False,
    seeds: Annotated[int | None, typer.Option(min=1, help="Runs per row; default: what the table asks for.")] = None,
    only: Annotated[str, typer.Option(help="Only rows whose network or method contains this text.")] = "",
    recipes: Annotated[Path, typer.Option(help="Folder of the recipes.")] = Path("recipes"),
    results: Annotated[Path, typer.Option(help="Folder of the result files.")] = Path("results"),
    plot: Annotated[Path | None, typer.Option(help="Draw accuracy against MACs saved: .svg, .png or .pdf.")] = None,
    as_json: AsJson = False,
) -> None:
    """A table of the paper with our numbers beside it, read from result files; with --run, made.

    For example `cofire reproduce cifar10`, or `cofire reproduce cifar10 --run --only ResNet-20`; the paper's figure 1
    is `cofire reproduce imagenet --only ResNet-34 --plot figure1.svg`. Runs go to
    $COFIRE_RUNS (default ~/.cache/cofire/runs) and can be interrupted.
    """
    if table is None:
        titles = {name: paper_tables()[name].title for name in tables()}
        titles |= {name: found.title for name, found in MEASURED.items()}
        show(as_json, titles, "\n".join(f"{name:10} {title}" for name, title in titles.items()))
        return
    if table not in (known := [*tables(), *MEASURED]):
        raise unknown("table of the paper:", table, known)
    if table in MEASURED:
        if only or plot or seeds:
            raise ConfigError(f"--only, --plot and --seeds are for tables of runs; {table} is measured as a whole")
        _show_measured(MEASURED[table], budget, run, recipes, results, as_json)
        return
    found = reproduce_table(table, budget=budget, recipes=recipes, results=results, only=only)
    if run:
        run_missing(found, recipes=recipes, results=results, seeds=seeds, say=Console(stderr=True).print)
        found = reproduce_table(table, budget=budget, recipes=recipes, results=results, only=only)
    if plot is not None:
        ours, papers = reproduced_points(found)
        write_figure(trade_off(ours, papers, column="paper"), plot)
    typer.echo(json.dumps(found.to_json(), indent=2) if as_json else str(found))


def _show_measured(
    table: AbstractMeasured, budget: Budget, run: bool, recipes: Path, results: Path, as_json: bool
) -> None:
    found = table.read(budget, recipes, results)
    if found is None and run:
        found = table.measure(budget, recipes, results, Console(stderr=True).print)
        write_json(results / table.file(budget), found)
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        typer.echo(table.title)
        typer.echo(f"made on {made_on([found])}\n\n{table.table(found)}" if found else "not run; add --run")


@app.command(name="zoo")
def show_zoo(
    name: Annotated[str | None, typer.Argument(help="A model; nothing: list them.")] = None,
    out_folder: Annotated[Path | None, typer.Option("--out", help="Copy it there, as the folder of a run.")] = None,
    as_json: AsJson = False,
) -> None:
    """The trained models that ship with cofire; with --out, one as a run folder for the other commands."""
    if out_folder is not None:
        if name is None:
            raise ConfigError("--out needs the name of a model: cofire zoo NAME --out FOLDER")
        zoo.copy(name, out_folder)
    entries = [zoo.entry(each) for each in ([name] if name else zoo.names())]
    told = "\n".join(map(str, entries)) or "no models come with this version"
    show(as_json, [dataclasses.asdict(entry) for entry in entries], told)


@app.command(name="demo")
def run_demo(
    out_folder: Annotated[Path, typer.Option("--out", help="Where the models go.")] = Path("runs/demo"),
    as_json: AsJson = False,
) -> None:
    """The whole method in two minutes, offline: train on digits, estimate, solve for half the MACs, gate, compare."""
    result = demo.run(out_folder, say=lambda what: None if as_json else out.print(what))
    if as_json:
        typer.echo(json.dumps(result, indent=2))


@app.command()
def completion(
    shell: Annotated[str, typer.Argument(help="bash, zsh or fish.", metavar="SHELL")],
) -> None:
    """A script for your shell that completes verbs and options, e.g. `source <(cofire completion bash)`."""
    typer.echo(script(shell, verbs(typer.main.get_command(app))), nl=False)


def main() -> None:
    """The whole command line, as ``cofire.start`` calls it where PyTorch is needed."""
    call(app)
