"""``cofire results``: finished runs become files below results/, and those become the tables of README and docs.

No number in a document is typed by hand.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cofire.analysis.drawing import write_figure
from cofire.comparison.known import read_comparison
from cofire.comparison.plot import plot
from cofire.errors import CofireError, FileError
from cofire.experiments.reproduce import add_result, reproduce
from cofire.files.atomic import read_json, write_text
from cofire.measured import MEASURED
from cofire.shell import AsJson, show
from cofire.text import markdown

if TYPE_CHECKING:
    from matplotlib.figure import Figure

logger = logging.getLogger("cofire")

DOCUMENTS = {
    "README.md": ("summary",),
    "docs/results.md": ("cifar10", "imagenet"),
    "docs/reproduce.md": ("options",),
    "docs/shift.md": ("shift",),
    "docs/engine.md": ("engine",),
    "docs/floors.md": ("floors",),
    "docs/compare.md": ("compare",),
}
"""Document -> the tables between its markers."""
FIGURE, COMPARISON = "docs/images/compare_resnet20.svg", "results/compare_resnet20.json"
LATENCIES = {
    "AMD EPYC, Zen 5": "bench_latency_zen5.json",
    "AMD EPYC, Zen 4": "bench_latency.json",
    "AMD EPYC, Zen 4, held to AVX2": "bench_latency_avx2.json",
    "AMD EPYC, Zen 5, held to AVX2": "bench_latency_avx2_zen5.json",
}
"""Machine -> what `benchmarks/latency.py` found there."""
BEGIN, END = "<!-- results: ", "<!-- end of results -->"

_SMALL = 0.02  # share of an engine's time below which ops are not a row of their own

app = typer.Typer(
    no_args_is_help=True, help="Result files of finished runs, and the tables that documents show of them."
)
Root = Annotated[Path, typer.Option(help="The clone of cofire, with recipes/, results/ and docs/.")]


@app.command()
def add(
    runs: Annotated[list[Path], typer.Argument(help="Folders of finished runs.", metavar="RUN...")],
    name: Annotated[
        str | None, typer.Option("--as", help="Name below results/; default: that of the recipe that makes the run.")
    ] = None,
    root: Root = Path(),
    as_json: AsJson = False,
) -> None:
    """Put what finished runs found into results/, each as RECIPE-sSEED.json."""
    files = [str(add_result(run, root / "recipes", root / "results", name)) for run in runs]
    show(as_json, files, "\n".join(files))


@app.command()
def table(
    write: Annotated[bool, typer.Option("--write", help="Put them into README.md and docs/.")] = False,
    root: Root = Path(),
    as_json: AsJson = False,
) -> None:
    """Print the tables of all documents, made of what is in results/; with --write, put them and the figure in their
    places.
    """
    made, damaged = {}, 0
    for document, names in DOCUMENTS.items():
        try:
            made[document] = tables(names, root)
            if write:
                write_text(root / document, written(document, root))
            if write and "compare" in names:
                write_figure(drawn(root), root / FIGURE)
        except CofireError as error:
            logger.warning("%s is left as it is: %s", document, error)
            damaged += 1
    if as_json:
        show(as_json, made, "")
    elif not write:
        typer.echo("\n".join(made.values()))
    if damaged:
        raise FileError(f"{damaged} of {len(DOCUMENTS)} documents could not be made; the others are done")


def written(document: str, root: Path) -> str:
    """A document's text with what stands between its markers replaced."""
    before, found, rest = (root / document).read_text(encoding="utf-8").partition(BEGIN)
    note, _, rest = rest.partition("\n")
    _, ends, after = rest.partition(END)
    if not (found and ends):
        raise FileError(f"{root / document} must have the markers {BEGIN!r} and {END!r}")
    return f"{before}{BEGIN}{note}\n{tables(DOCUMENTS[document], root)}\n{END}{after}"


def drawn(root: Path) -> Figure:
    """The figure of the comparison."""
    return plot(read_comparison(root / COMPARISON).networks[0])


def tables(names: Sequence[str], root: Path) -> str:
    """Tables by name, as Markdown; those of which nothing was run are left out."""
    return "\n\n".join(filter(None, (_table(name, root) for name in names)))


def _table(name: str, root: Path) -> str:
    if name == "summary":
        return _summary(root / "results")
    if name == "engine":
        return "\n\n".join(_engine(machine, root / "results" / file) for machine, file in LATENCIES.items())
    if name == "floors":
        return _floors(root / "results" / "bench_floors.json")
    if name == "compare":
        return read_comparison(root / COMPARISON).to_markdown()
    if name in MEASURED:
        measured = MEASURED[name].read("short", root / "recipes", root / "results")
        return MEASURED[name].table(measured).to_markdown() if measured else ""
    found = reproduce(name, recipes=root / "recipes", results=root / "results")
    if not any(row.results for row in found.rows):
        return ""
    return f"{found.table.title}, made on {found.machines()}:\n\n{found.to_markdown(only_run=True)}"


def _summary(results: Path) -> str:
    """Three numbers, then accuracy, MACs and milliseconds beside each other; at most six rows."""
    runs = results / "short" / "cifar10"
    dense, twice = (read_json(runs / f"resnet20{name}-s0.json") for name in ("", "_second_look_zoo"))
    timed, fast = read_json(results / "bench_second_look.json"), read_json(results / "bench_latency.json")
    deep = read_json(results / "int8_accuracy_resnet56.json")
    try:
        all_macs, fewer = deep["rows"]
        small = _milliseconds(timed, "mean_milliseconds")
        middle, large = _at(fast, "resnet56", 0.62), _at(fast, "resnet34", 0.48)
        share = f"{100 * fewer['int8']['macs'] / all_macs['int8']['macs']:.0f} %"
        rows = [
            ["ResNet-20, CIFAR-10", _top1(dense["test"]), "100 %", *small[0]],
            ["second look, trained 8 epochs", _top1(twice["test"]), _kept(twice["test"]), *small[1]],
            ["ResNet-56, CIFAR-10", _both(all_macs), "100 %", *middle[0]],
            ["gated, not trained", _both(fewer), share, *middle[1]],
            ["ResNet-34, 224 pixels", "", "100 %", *large[0]],
            ["random masks", "", "48 %", *large[1]],
        ]
        points = 100 * (dense["test"]["top1"] - twice["test"]["top1"])
        numbers = (
            f"**{_kept(twice['test'])} of the MACs, {points:.1f} points of accuracy less, {small[1][2]} ms instead of "
            f"{small[0][0]}**: ResNet-20 on CIFAR-10 with a second look, beside the fastest other engine."
        )
    except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
        raise FileError(f"a file below {results} is damaged: {error!r}") from error
    header = ["network", "top-1", "MACs executed", "others, ms", "others int8, ms", "cofire, ms", "cofire int8, ms"]
    return f"{numbers}\n\n{markdown(header, rows)}"


def _top1(report: dict[str, float]) -> str:
    return f"{100 * report['top1']:.2f} %"


def _both(row: dict[str, Any]) -> str:
    return f"{_top1(row['float32'])}, int8 {_top1(row['int8'])}"


def _kept(report: dict[str, Any]) -> str:
    return f"{100 * (1 - report['reduction']['executed+heads']):.0f} %"


def _at(found: dict[str, Any], network: str, macs: float) -> tuple[list[str], list[str]]:
    """A network's rows, from the first run that has the share of the MACs, which stands in the second in brackets."""
    runs = found["networks"][network]["runs"]
    run, point = next(
        (run, place) for run in runs for place, point in enumerate(run["points"]) if point["asked"] == macs
    )
    dense, gated = _milliseconds(run, "milliseconds", point)
    return dense, [cell and f"{cell} ({100 * macs:.0f} %)" for cell in gated]


def _milliseconds(bench: dict[str, Any], key: str, point: int = 0) -> tuple[list[str], list[str]]:
    """Of the fastest others in float32 and int8, and of ours: dense, then where filters are left out."""

    def least(ours: bool, precision: str, at: int | None) -> str:
        found = [
            row[key]["median"] if isinstance(row[key], dict) else row[key]
            for row in bench["engines"]
            if (row["engine"] == "cofire") == ours and row.get("precision", "float32") == precision
            if row["point"] == at
        ]
        return f"{min(found):.2f}" if found else ""

    precisions = ("float32", "int8")
    dense = [least(ours, precision, None) for ours in (False, True) for precision in precisions]
    return dense, ["", "", *(least(True, precision, point) for precision in precisions)]


def _engine(machine: str, path: Path) -> str:
    """What `benchmarks/latency.py` found on one machine; bold: within its limit."""
    found = read_json(path)
    try:
        networks, commit = found["networks"], found["provenance"]["commit"]
        shares = sorted({row["macs"] for found in networks.values() for row in found["rows"]}, reverse=True)
        rows = []
        for name, found in networks.items():
            pixels = found["runs"][0]["input_shape"][-1]
            for precision, key in (("float32", "fastest_dense"), ("int8", "fastest_dense_int8")):
                cell = {row["macs"]: _ratio(row) for row in found["rows"] if row["precision"] == precision}
                if cell:
                    against = sorted({str(run[key]) for run in found["runs"]})
                    cells = [cell.get(share, "") for share in shares]
                    rows.append([f"{name}, {pixels}", precision, *cells, ", ".join(against)])
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise FileError(f"{path} is damaged: {error!r}") from error
    costs = [f"{100 * share:.0f} % of MACs" for share in shares[1:]]
    table = markdown(["network, pixels", "precision", "dense", *costs, "against"], rows)
    return f"{machine}, commit {commit[:7]}:\n\n{table}"


def _ratio(row: dict[str, Any]) -> str:
    """The middle run's, bold within its limit, beside it beyond; empty where some engine did not run."""
    middle, limit = row["middle"], row["limit"]
    if middle is None:
        return ""
    if limit is None:
        return f"{middle:.3f}"
    return f"**{middle:.3f}**" if middle <= limit else f"{middle:.3f} ({limit:.2f})"


def _floors(path: Path) -> str:
    """What `benchmarks/floors.py` found, if it has run."""
    if not path.exists():
        return ""
    found = read_json(path)
    try:
        return floors_tables(found["engines"])
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise FileError(f"{path} is damaged: {error!r}") from error


def floors_tables(engines: Sequence[dict[str, Any]]) -> str:
    """A table for each engine: its ops, by the time they take beyond their floors.

    Args:
        engines: each with ``network``, ``precision``, ``macs`` (share that is executed), ``kernel``, ``speeds``, and
            ``rows``: ops -> milliseconds, those of products alone, of bytes alone, and of the larger of both op by op.
    """
    return "\n\n".join(map(_floors_table, engines))


def _floors_table(engine: dict[str, Any]) -> str:
    whole = [sum(values) for values in zip(*engine["rows"].values(), strict=True)]
    small = [times for times in engine["rows"].values() if times[0] < _SMALL * whole[0]]
    large = [(what, times) for what, times in engine["rows"].items() if times not in small]
    ordered = sorted(large, key=lambda row: row[1][3] - row[1][0])
    if small:
        ordered.append(("all others", [sum(values) for values in zip(*small, strict=True)]))
    cells = [
        [what, *(f"{ms:.3f}" for ms in times), f"{times[0] - times[3]:.3f}"]
        for what, times in [*ordered, ("all", whole)]
    ]
    rates = {what: rate / 1e9 for what, rate in engine["speeds"].items()}
    share = "dense" if engine["macs"] == 1 else f"{100 * engine['macs']:.0f} % of MACs"
    at_best = (
        f"{rates['macs']:.0f} MACs / ns"
        if engine["precision"] == "float32"
        else f"{rates['macs8']:.0f} MACs / ns, {rates['macs16']:.0f} in Winograd's 16 bits"
    )
    title = f"{engine['network']}, {engine['precision']}, {share}; kernels {engine['kernel']}, at best {at_best}"
    headings = ["ops, pixels", "ms", "products alone", "bytes alone", "floor", "beyond it"]
    return f"{title}, {rates['bytes']:.1f} GB/s:\n\n{markdown(headings, cells)}"
