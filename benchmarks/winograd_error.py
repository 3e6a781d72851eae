"""Errors of Winograd against float64, layer by layer: ``python benchmarks/winograd_error.py [NAME=FILE ...]``.

Without arguments for networks with random weights; NAME=FILE adds a backbone with the weights in a file. Prints tables
of Markdown, as in docs/numerics.md. The error of a conv is the largest over all of its outputs for random inputs, in
units of the standard deviation that sums of such products have: what the tuner measures, on every pixel.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F

import cofire
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


def error(op: Conv, side: int, out: int, algorithm: str) -> float:
    filters, channels = op.weight.shape[:2]
    plain = replace(
        op, src=(0,), dst=1, gate=None, padding=(0, 0, 0, 0), residual=False, act="none", slope=0.0, bias=torch.zeros(filters), shift=None
    )  # fmt: skip
    shapes = ((channels, side, side), (filters, out, out))
    program = Program(input=0, output=1, output_shape=shapes[1], buffers=shapes, groups=(), threshold=0.0, ops=(plain,))
    try:
        engine = _native.Engine(to_bytes(program), "", algorithm)
    except RuntimeError:
        return float("nan")  # does not fit
    x = np.random.default_rng(0).uniform(-1, 1, (1, *shapes[0])).astype("f4")
    found = np.empty((1, *shapes[1]), "f4")
    engine.run(x, found, 1, 0.0, False, None, None, None, None, None, [])
    wanted = F.conv2d(torch.from_numpy(x).double(), op.weight.double(), stride=op.stride)
    spread = (op.weight.double().flatten(1).square().sum(1) / 3).sqrt().clamp(min=1e-300)
    return float(((torch.from_numpy(found).double() - wanted).abs() / spread[None, :, None, None]).max())


def main() -> None:
    given = dict(argument.split("=", 1) for argument in sys.argv[1:])
    torch.manual_seed(0)
    models = {f"{name}, random weights": cofire.create_backbone(name) for name in ("resnet34", "vgg16_bn")}
    for name, path in given.items():
        model = cofire.create_backbone(name)
        cofire.load_weights(model, path)
        models[f"{name}, trained"] = model
    for title, model in models.items():
        print(f"\n### {title}\n\n| layer | weights | {' | '.join(ALGORITHMS)} |\n|---|---|---|---|---|")
        worst = dict.fromkeys(ALGORITHMS, 0.0)
        for op, side, out in convs(lower(model.eval())):
            errors = {name: error(op, side, out, name) for name in ALGORITHMS}
            worst = {name: max(worst[name], errors[name]) if errors[name] == errors[name] else worst[name] for name in worst}
            cells = " | ".join("" if value != value else f"{value:.1e}" for value in errors.values())
            print(f"| {op.name} | {'x'.join(map(str, op.weight.shape))} | {cells} |")
        print(f"| **largest** | | {' | '.join(f'**{value:.1e}**' for value in worst.values())} |", flush=True)


if __name__ == "__main__":
    main()
