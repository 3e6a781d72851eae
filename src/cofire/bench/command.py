"""``cofire bench``: the command line of the bench."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Group

from cofire import data
from cofire.bench import paper, report
from cofire.bench.ours import load_program
from cofire.bench.peers import COMPILED, PEERS
from cofire.bench.plan import Plan, own_plan, random_plan
from cofire.bench.program import bench_program
from cofire.bench.run import bench as run_bench
from cofire.data import AbstractImages
from cofire.errors import CofireError, ConfigError, DataError
from cofire.experiments.provenance import provenance
from cofire.experiments.recipes import read_run
from cofire.experiments.runs import read_sets
from cofire.files.atomic import write_json
from cofire.files.card import Card
from cofire.gates.gating import GatedModel
from cofire.gates.persistence import load, read_card
from cofire.runtime.engine import Precision
from cofire.runtime.quantized import IMAGES
from cofire.shell import AsJson, show

logger = logging.getLogger("cofire")
Shape = tuple[int, int, int]


def bench(
    what: Annotated[
        Path | None,
        typer.Argument(help="A program (x.cofire) or a run folder, in place of --backbone.", metavar="WHAT"),
    ] = None,
    backbone: Annotated[str, typer.Option(help="A network with random weights and masks; see `cofire info`.")] = "",
    size: Annotated[str, typer.Option("--input", help="C,H,W; default: what the network was made for.")] = "",
    macs: Annotated[
        list[float] | None, typer.Option(help="Share of the MACs that REMAINS, e.g. 0.48. May be repeated.")
    ] = None,
    keep: Annotated[list[float] | None, typer.Option(help="The same by keep rate of filters. May be repeated.")] = None,
    threads: Annotated[int, typer.Option(min=1, help="Of every engine.")] = 1,
    rounds: Annotated[
        int, typer.Option(min=1, help="Every engine runs once per round; 100 or more to be quoted.")
    ] = 100,
    warm_up: Annotated[int, typer.Option(min=0, help="Rounds before those that count.")] = 10,
    seed: Annotated[int, typer.Option(help="Of weights, inputs and masks.")] = 0,
    images: Annotated[
        str,
        typer.Option(help="Real images: a data set's name or a folder of pictures. Runs default to their test set."),
    ] = "",
    count: Annotated[int, typer.Option(min=1, help="How many real images, one per round.")] = 200,
    int8: Annotated[
        bool, typer.Option(help="Also engines in int8, ranges fitted to training images or else to those timed.")
    ] = True,
    compiled: Annotated[bool, typer.Option("--compiled", help="Also torch.compile, which takes minutes.")] = False,
    paper_latency: Annotated[bool, typer.Option("--paper-latency", help="The paper's latency table.")] = False,
    out_file: Annotated[Path | None, typer.Option("--out", help="Write everything to this file, as JSON.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw latency saved against MACs saved: .svg, .png, .pdf.")] = None,
    as_json: AsJson = False,
) -> None:
    """Latency beside PyTorch, ONNX Runtime, OpenVINO, MNN and ncnn, whichever are installed, in interleaved rounds.

    In float32 and, where an engine has it, in int8; with accuracy where images have labels.
    """
    if sum((what is not None, bool(backbone), paper_latency)) != 1:
        raise ConfigError("bench takes one of: a program or run folder, --backbone NAME, --paper-latency")
    if what is not None and what.is_file():
        engine = load_program(what)
        shape = engine.input_shape
        found = _random(shape, seed) if not images else _pixels(_images(images, shape), count, shape)
        program = bench_program(
            what.name, engine, found.numpy(), images or "random", threads=threads, rounds=rounds, warm_up=warm_up
        )
        _tell(as_json, out_file, program.to_json(), program)
        return
    if paper_latency:
        result = paper.measure(threads=threads, rounds=rounds, warm_up=warm_up, seed=seed)
    else:
        plan = _plan(what, backbone, _shape(size), macs or [], keep or [], seed, images, count)
        if None in plan.pools:
            rounds = max(rounds, len(plan.images))
        peers = (*PEERS, COMPILED) if compiled else PEERS
        precisions: list[Precision] = ["float32", "int8"] if int8 else ["float32"]
        result = run_bench(plan, threads=threads, rounds=rounds, warm_up=warm_up, peers=peers, precisions=precisions)
    shown = [report.table(result)]
    if paper_latency:
        shown.append(paper.paper_table(result.network, paper.paper_rows(result)))
    _tell(as_json, out_file, paper.to_json(result) if paper_latency else result.to_json(), Group(*shown))
    if plot is not None:
        report.plot(result, plot)


def _plan(
    what: Path | None,
    backbone: str,
    shape: Shape | None,
    macs: list[float],
    keep: list[float],
    seed: int,
    images: str,
    count: int,
) -> Plan:
    if what is None:
        if images:
            raise ConfigError("--images needs a trained model: cofire bench RUN --images ...")
        shares = macs or ([] if keep else [0.5])
        return random_plan(backbone, input_shape=shape, macs=shares, keep=keep, seed=seed)
    model = load(what)
    if not isinstance(model, GatedModel):
        card = read_card(what)
        shares = macs or ([] if keep else [0.5])
        own = shape or (card.input_shape if card else None)
        plan = random_plan(model, input_shape=own, macs=shares, keep=keep, seed=seed)
        return _on(plan, what, images, count, seed, card)
    if macs or keep or shape:
        raise ConfigError("a run's own gates and images rule: --macs, --keep and --input belong to --backbone")
    plan = own_plan(what.name, model, _random(model.graph.input_shape, seed), "random")
    return _on(plan, what, images, count, seed, read_card(what))


def _on(plan: Plan, run: Path, images: str, count: int, seed: int, card: Card | None) -> Plan:
    """The plan of a run on images of its test set, or on those that were asked for, with labels where there are some.

    Where its sets are not on this machine, on random pixels as its card says to feed them.
    """
    shape = plan.gated.graph.input_shape
    plan = dataclasses.replace(plan, network=run.name)
    try:
        sets = read_sets(read_run(run))
    except CofireError as error:
        if images:
            return _looking(plan, _images(images, shape, card), count)
        logger.warning(
            "timed on random pixels, for which gates decide otherwise than for pictures: %s; give --images FOLDER",
            error,
        )
        return dataclasses.replace(plan, images=_fed(card, count, shape, seed).numpy(), inputs="random")
    found = _images(images, shape, card) if images else sets.test
    return dataclasses.replace(_looking(plan, found, count), calibration=_pixels(sets.train, IMAGES, shape).numpy())


def _looking(plan: Plan, images: AbstractImages, count: int) -> Plan:
    shape = plan.gated.graph.input_shape
    chosen = torch.arange(min(count, len(images)))
    labels = None if images.label_N is None else images.label_N[chosen].numpy()
    return dataclasses.replace(plan, images=_pixels(images, count, shape).numpy(), labels=labels, inputs=images.name)


def _fed(card: Card | None, count: int, shape: Shape, seed: int) -> torch.Tensor:
    """Random pixels, as a card says to feed them."""
    if card is None:
        return _random(shape, seed)
    mean_C11, std_C11 = (torch.tensor(values).view(-1, 1, 1) for values in (card.mean, card.std))
    pixels_NCHW = torch.rand(min(count, 16), *shape, generator=torch.Generator().manual_seed(seed))
    return (pixels_NCHW - mean_C11) / std_C11


def _shape(text: str) -> Shape | None:
    if not text:
        return None
    try:
        channels, height, width = (int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"--input must be C,H,W, such as 3,224,224, got {text!r}") from None
    return channels, height, width


def _images(name: str, shape: Shape, card: Card | None = None) -> AbstractImages:
    if Path(name).is_dir():
        found = data.folder(name, size=shape[1], labelled=False)
        return found if card is None else dataclasses.replace(found, mean=card.mean, std=card.std)
    return data.source(name)[1]


def _pixels(images: AbstractImages, count: int, shape: Shape) -> torch.Tensor:
    """The first ``count`` images as a network sees them."""
    if images.shape != shape:
        raise DataError(f"{images.name}: images must have shape {shape}, that of the model, got {images.shape}")
    return images.normalise(images.pixels(torch.arange(min(count, len(images)))))


def _random(shape: Shape, seed: int) -> torch.Tensor:
    return torch.randn(16, *shape, generator=torch.Generator().manual_seed(seed))


def _tell(as_json: bool, path: Path | None, value: dict[str, Any], human: Any) -> None:
    told = {"provenance": provenance(), **value}
    if path is not None:
        write_json(path, told)
    show(as_json, told, human)
