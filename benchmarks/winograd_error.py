"""Errors of Winograd against float64, layer by layer, and of plain sums beside it.

Usage: python benchmarks/winograd_error.py [--trained NAME=FILE ...] [--json results/winograd_error.json]
For networks with random weights, and for backbones with the weights in a file. Prints tables of Markdown, as in
docs/numerics.md. The error of a conv is the largest over all of its outputs for random inputs, in units of the standard
deviation that sums of such products have: what the tuner measures, on every pixel.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

import cofire
from cofire.experiments.provenance import provenance
from cofire.files.atomic import write_json
from cofire.runtime import _native
from cofire.runtime.lowering import lower
from cofire.runtime.program import Conv, Program
from cofire.runtime.program_file import to_bytes

ALGORITHMS = ("wino4", "wino2", "gemm")


def convs(program: Program) -> Iterator[tuple[Conv, int, int]]:
    """Those that Winograd may take, with the sides of a map of eight outputs."""
    for op in program.ops:
        if isinstance(op, Conv) and op.groups == 1 and min(op.kernel) > 1 and program.buffers[op.dst][1] > 2:
            side = min(program.buffers[op.dst][1], 8)
            yield op, (side - 1) * op.stride[0] + op.kernel[0], side


def error(op: Conv, side: int, out: int, algorithm: str) -> float | None:
    """None if the algorithm does not fit."""
    filters, channels = op.weight.shape[:2]
    own = {"padding": (0, 0, 0, 0), "residual": False, "act": "none", "slope": 0.0, "shift": None}
    plain = replace(op, src=(0,), dst=1, gate=None, bias=torch.zeros(filters), **own)
    shapes = ((channels, side, side), (filters, out, out))
    program = Program(input=0, output=1, output_shape=shapes[1], buffers=shapes, groups=(), threshold=0.0, ops=(plain,))
    try:
        engine = _native.Engine(to_bytes(program), "", algorithm)
    except RuntimeError as refused:
        if "inexact" in str(refused):
            raise
        return None
    x = np.random.default_rng(0).uniform(-1, 1, (1, *shapes[0])).astype("f4")
    found = np.empty((1, *shapes[1]), "f4")
    engine.run(x, found, 1, 0.0, False, None, None, None, None, None, [])
    wanted = F.conv2d(torch.from_numpy(x).double(), op.weight.double(), stride=op.stride)
    spread = (op.weight.double().flatten(1).square().sum(1) / 3).sqrt().clamp(min=1e-300)
    return float(((torch.from_numpy(found).double() - wanted).abs() / spread[None, :, None, None]).max())


def errors(model: torch.nn.Module) -> list[dict[str, Any]]:
    """A row for each conv that Winograd may take."""
    return [
        {"layer": op.name, "weights": "x".join(map(str, op.weight.shape))}
        | {name: error(op, side, out, name) for name in ALGORITHMS}
        for op, side, out in convs(lower(model.eval()))
    ]


def table(title: str, rows: list[dict[str, Any]]) -> str:
    lines = [f"## {title}", "", f"| layer | weights | {' | '.join(ALGORITHMS)} |", "|---|---|---|---|---|"]
    for row in rows:
        cells = " | ".join("" if row[name] is None else f"{row[name]:.1e}" for name in ALGORITHMS)
        lines.append(f"| {row['layer']} | {row['weights']} | {cells} |")
    worst = [max(row[name] for row in rows if row[name] is not None) for name in ALGORITHMS]
    return "\n".join([*lines, f"| **largest** | | {' | '.join(f'**{value:.1e}**' for value in worst)} |", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trained", nargs="*", default=[], metavar="NAME=FILE")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    models = {f"{name}, random weights": cofire.create_backbone(name) for name in ("resnet34", "vgg16_bn")}
    for name, path in (given.split("=", 1) for given in args.trained):
        models[f"{name}, trained"] = cofire.create_backbone(name)
        cofire.load_weights(models[f"{name}, trained"], path)
    found = {title: errors(model) for title, model in models.items()}
    print("\n".join(table(title, rows) for title, rows in found.items()))
    if args.json:
        write_json(args.json, {"provenance": provenance(), "networks": found})


if __name__ == "__main__":
    main()
