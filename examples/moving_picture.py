"""Three pictures go through a gated network, and the filters that run light up: docs/images/filters.svg.

Usage: python examples/moving_picture.py [--out docs/images/filters.svg]
Needs CIFAR-10 (`cofire data cifar10`); the network is the zoo's dense ResNet-20 with heads fitted offline.
"""

from __future__ import annotations

import argparse
import base64
import io
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

import cofire

WIDTH, LIGHT, STEP, LEFT, TOP = 800, 8, 10, 150, 48
SECONDS = 2.5  # each picture is shown so long


@dataclass(frozen=True)
class Frame:
    """One picture: its pixels (H, W, 3), what was said of it, and group -> which filters ran, (O,)."""

    picture: Tensor
    caption: str
    masks: dict[str, Tensor]


def drawn(frames: list[Frame]) -> str:
    """An SVG in which the frames follow one another; a light is on where its filter ran."""
    parts, y = [], TOP
    for group, mask_O in frames[0].masks.items():
        for number in range(len(mask_O)):
            column, row = number % 64, number // 64
            lit = "".join(str(int(frame.masks[group][number])) for frame in frames)
            parts.append(f'<rect class="p{lit}" x="{LEFT + STEP * column}" y="{y + STEP * row}"/>')
        y += STEP * (1 + (len(mask_O) - 1) // 64)
    for number, frame in enumerate(frames):
        parts.append(
            f'<g class="f{number}"><image x="16" y="{TOP}" width="112" height="112" href="{_png(frame.picture)}"/>'
            f'<text x="16" y="30">{frame.caption}</text></g>'
        )
    body = "\n".join(parts)
    size = f'viewBox="0 0 {WIDTH} {y + 16}" width="{WIDTH}" height="{y + 16}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n<style>{_style(len(frames))}</style>\n{body}\n</svg>\n'


def _style(count: int) -> str:
    """A pattern such as 101 is on in the first and third frame; each frame has its share of the time."""
    rules = [
        "text{font:15px sans-serif;fill:#888}image{image-rendering:pixelated}"
        f"rect{{width:{LIGHT}px;height:{LIGHT}px;rx:2px;animation-duration:{SECONDS * count}s;"
        "animation-iteration-count:infinite;animation-timing-function:step-end}"
        f"g{{animation-duration:{SECONDS * count}s;"
        "animation-iteration-count:infinite;animation-timing-function:step-end}"
    ]
    for pattern in range(2**count):
        lit = f"{pattern:0{count}b}"
        steps = "".join(f"{100 * n / count:.3f}%{{fill:{_colour(on)}}}" for n, on in enumerate(lit))
        rules.append(f"@keyframes k{lit}{{{steps}}}.p{lit}{{fill:{_colour(lit[0])};animation-name:k{lit}}}")
    for shown in range(count):
        steps = "".join(f"{100 * n / count:.3f}%{{opacity:{int(n == shown)}}}" for n in range(count))
        rules.append(f"@keyframes g{shown}{{{steps}}}.f{shown}{{opacity:{int(shown == 0)};animation-name:g{shown}}}")
    return "".join(rules)


def _colour(on: str) -> str:
    return "#ff9f1c" if on == "1" else "#8884"


def _png(picture_HWC: Tensor) -> str:
    file = io.BytesIO()
    Image.fromarray(picture_HWC.contiguous().numpy()).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/images/filters.svg"))
    parser.add_argument("--macs", type=float, default=0.6)
    args = parser.parse_args()
    train, test = cofire.data.cifar10()
    model = cofire.zoo.load("resnet20_cifar10")
    gated = cofire.fit_heads(model, train.loader(200), macs=args.macs, images=2000)
    frames: list[Frame] = []
    for row, (x_BCHW, label_B) in enumerate(test.loader(1)):
        with torch.no_grad():
            found = int(gated(x_BCHW).argmax())
        if found == int(label_B) and found in (1, 7, 8)[len(frames) :][:1]:  # car, horse, ship
            saved = float(gated.cost().reduction("executed+heads"))
            caption = f"{test.classes[found]}: {100 * (1 - saved):.0f} % of the MACs; lights are filters that run"
            masks = {name: mask_BO[0].clone() for name, mask_BO in gated.masks.items()}
            frames.append(Frame(test.pixels(torch.tensor([row]))[0].permute(1, 2, 0), caption, masks))
        if len(frames) == 3:
            break
    args.out.write_text(drawn(frames))
    print(f"{args.out}: {args.out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
