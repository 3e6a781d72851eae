"""Laws of fit(): one seed, one result, however often the run is interrupted; and errors that leave nothing behind."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small import ROOT, OwnNet, digest, tiny_gated, tiny_images, tiny_plain
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from cofire import FBS, DataError, FileError, FitResult, Recipe, TrainingError, data, evaluate, fit, gate, mask_loss
from cofire.data import Loader
from cofire.errors import ConfigError
from cofire.files.tensors import read_tensors
from cofire.training.callbacks import AbstractCallback, Run
from cofire.training.setup import parameter_groups

GOLDEN = Path(__file__).parent / "golden" / "resnet8_digits_20_steps.json"
RECIPE = Recipe(epochs=3, lr=0.05, schedule="cosine", checkpoint_steps=2)
BATCH = 16
STEPS = 3  # of an epoch: 48 images
VAL = tiny_images(20).loader(20)


pytestmark = pytest.mark.usefixtures("one_thread")


class Killed(Exception):
    """Stands for the end of the process."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Mortal(Loader):
    """A loader in whose hands the run ends before it gets batch ``dies_at``, counted from the start of training."""

    dies_at: int = -1

    def batches(self, epoch: int, start: int = 0, rank: int = 0, world: int = 1) -> Iterator[Any]:
        for index, batch in enumerate(super().batches(epoch, start, rank, world), start):
            if epoch * len(self) + index == self.dies_at:
                raise Killed
            yield batch


def feed(dies_at: int = -1, seed: int = 0) -> Mortal:
    images = tiny_images()
    return Mortal(images=images, batch_size=BATCH, train=True, augment="crop", pad=1, seed=seed, dies_at=dies_at)


def test_stopping_early_leaves_the_schedule_as_it_was() -> None:
    whole, part = tiny_gated(), tiny_gated()
    long = fit(whole, feed(), dataclasses.replace(RECIPE, epochs=3))
    short = fit(part, feed(), dataclasses.replace(RECIPE, epochs=3, stop_after=2))
    assert untimed(short) == untimed(long)[:2]
    with pytest.raises(ConfigError, match="stop_after must be at least 1, got 0"):
        Recipe(stop_after=0)


def log_of(out: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


def untimed(result: FitResult) -> list[dict[str, Any]]:
    return [dataclasses.asdict(dataclasses.replace(record, seconds=0.0)) for record in result.epochs]


def tracks(out: Path) -> set[str]:
    """Every file of a run, but for the numbers of its checkpoints."""
    return {path.relative_to(out).as_posix().partition("-0")[0] for path in out.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[dict[str, Any]], list[dict[str, Any]], int]:
    """Weights, log, epochs and selected epoch of a run that nothing interrupted."""
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("whole")
    gated = tiny_gated()
    result = fit(gated, feed(), RECIPE, val=VAL, out=out)
    return digest(gated), log_of(out), untimed(result), result.selected


def assert_equals_whole(whole: Any, out: Path) -> None:
    """Go on with the run in ``out``, from a model with other weights, and compare."""
    gated = tiny_gated(seed=99)
    result = fit(gated, feed(), RECIPE, val=VAL, out=out)
    assert (digest(gated), log_of(out), untimed(result), result.selected) == whole


# Randomness


def test_the_same_seed_gives_the_same_weights_twice() -> None:
    once, again = tiny_gated(), tiny_gated()
    fit(once, feed(), RECIPE)
    torch.rand(7)  # what others drew from the global generator does not matter
    fit(again, feed(), RECIPE)
    assert digest(once) == digest(again)


def test_writing_checkpoints_and_validating_change_nothing(whole: Any) -> None:
    gated = tiny_gated()
    fit(gated, feed(), dataclasses.replace(RECIPE, checkpoint_steps=None), val=VAL)
    assert digest(gated) == whole[0]


def test_another_seed_gives_other_weights() -> None:
    one, other = tiny_gated(), tiny_gated()
    fit(one, feed(), RECIPE)
    fit(other, feed(seed=1), RECIPE)
    assert digest(one) != digest(other)


class Dropping(nn.Module):
    """A network whose training forward draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.last = nn.Conv2d(1, 4, 3), nn.Linear(4, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.dropout(self.conv(x).mean((2, 3)), 0.5, self.training))  # type: ignore[no-any-return]


def test_the_recipe_s_seed_is_that_of_dropout() -> None:
    digests = []
    for seed in (0, 0, 1):
        model = Dropping()
        fit(model, feed(), dataclasses.replace(RECIPE, seed=seed))
        digests.append(digest(model))
    assert digests[0] == digests[1] != digests[2]


# Resuming


@pytest.mark.parametrize("dies_at", [0, 1, 3, 5, 6, 8])
def test_a_resumed_run_equals_one_that_was_not_interrupted(whole: Any, tmp_path: Path, dies_at: int) -> None:
    with pytest.raises(Killed):
        fit(tiny_gated(), feed(dies_at), RECIPE, val=VAL, out=tmp_path)
    assert_equals_whole(whole, tmp_path)


def test_a_run_interrupted_again_and_again_equals_one_that_was_not(whole: Any, tmp_path: Path) -> None:
    for dies_at in (2, 3, 3, 7):
        with pytest.raises(Killed):
            fit(tiny_gated(), feed(dies_at), RECIPE, val=VAL, out=tmp_path)
    assert_equals_whole(whole, tmp_path)


def test_a_finished_run_is_not_trained_again(whole: Any, tmp_path: Path) -> None:
    fit(tiny_gated(), feed(), RECIPE, val=VAL, out=tmp_path)
    gated = tiny_gated(seed=5)
    result = fit(gated, feed(dies_at=0), RECIPE, val=VAL, out=tmp_path)
    assert (digest(gated), result.selected) == (whole[0], whole[3])


def test_a_run_of_dropout_and_a_shuffling_data_loader_resumes_exactly(tmp_path: Path) -> None:
    class Noisy(TensorDataset):  # augments from torch's global generator
        dies_at = -1
        served = 0

        def __getitem__(self, index: Any) -> Any:
            if self.served == self.dies_at:
                raise Killed
            self.served += 1
            x, label = super().__getitem__(index)
            return x + 0.1 * torch.randn_like(x), label

    images = tiny_images()
    noisy = Noisy(images.normalise(images.pixels_NCHW), images.label_N)
    loader = DataLoader(noisy, batch_size=BATCH, shuffle=True)
    once = Dropping()
    fit(once, loader, RECIPE)
    noisy.served, noisy.dies_at = 0, 80  # in the batch of step 5, after the checkpoint of step 4
    with pytest.raises(Killed):
        fit(Dropping(), loader, RECIPE, out=tmp_path)
    noisy.dies_at = -1
    resumed = Dropping()
    fit(resumed, loader, RECIPE, out=tmp_path)
    assert digest(resumed) == digest(once)


def test_the_last_two_checkpoints_are_kept(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        fit(tiny_gated(), feed(dies_at=5), RECIPE, out=tmp_path)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-00000003.safetensors", "step-00000004.safetensors"]


@pytest.mark.parametrize("damage", ["truncated", "flipped", "emptied"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(
    whole: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    with pytest.raises(Killed):
        fit(tiny_gated(), feed(dies_at=5), RECIPE, val=VAL, out=tmp_path)
    newest = tmp_path / "checkpoints" / "step-00000004.safetensors"
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1
    newest.write_bytes({"truncated": content[: len(content) // 2], "flipped": content, "emptied": b""}[damage])
    with caplog.at_level(logging.WARNING, logger="cofire"):
        assert_equals_whole(whole, tmp_path)
    assert [newest.name in record.getMessage() for record in caplog.records] == [True]


def test_with_every_checkpoint_damaged_the_run_starts_anew(whole: Any, tmp_path: Path) -> None:
    with pytest.raises(Killed):
        fit(tiny_gated(), feed(dies_at=5), RECIPE, val=VAL, out=tmp_path)
    for path in (tmp_path / "checkpoints").iterdir():
        path.write_bytes(b"nonsense")
    gated = tiny_gated()
    result = fit(gated, feed(), RECIPE, val=VAL, out=tmp_path)
    assert (digest(gated), log_of(tmp_path), untimed(result), result.selected) == whole


def test_a_half_written_line_of_the_log_is_dropped(whole: Any, tmp_path: Path) -> None:
    with pytest.raises(Killed):
        fit(tiny_gated(), feed(dies_at=5), RECIPE, val=VAL, out=tmp_path)
    with (tmp_path / "log.jsonl").open("ab") as file:
        file.write(b'{"event": "step", "epoch": 1, "st\xff')
    assert_equals_whole(whole, tmp_path)


def test_a_finished_run_leaves_only_what_it_says(tmp_path: Path) -> None:
    fit(tiny_gated(), feed(), RECIPE, val=VAL, out=tmp_path)
    assert tracks(tmp_path) == {"checkpoints/best", "checkpoints/step", "fit.json", "log.jsonl"}
    assert len(list(tmp_path.rglob("best-*"))) == 1


@pytest.mark.parametrize(
    ("other", "what"),
    [
        ({"recipe": dataclasses.replace(RECIPE, lr=0.5, epochs=4)}, "recipe.epochs, recipe.lr"),
        ({"model": tiny_gated(ratio=0.5)}, "model.gate.fields.ratio"),
        ({"model": tiny_plain()}, "model.backbone"),
        ({"train": tiny_images(96).loader(BATCH, train=True)}, "data.n"),
        ({"train": feed(seed=3)}, "data.seed"),
        ({"train": list(feed())}, "data"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_folder_with_another_run_is_refused_and_left_alone(tmp_path: Path, other: dict[str, Any], what: str) -> None:
    with pytest.raises(Killed):
        fit(tiny_gated(), feed(dies_at=3), RECIPE, out=tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    call = {"model": tiny_gated(), "train": feed(), "recipe": RECIPE, "out": tmp_path, **other}
    with pytest.raises(FileError, match=f"holds another run .it differs in [^)]*{what}"):
        fit(**call)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_checkpoint_of_another_network_is_refused(tmp_path: Path) -> None:
    images = data.synthetic(48, (3, 8, 8), classes=3)
    fit(OwnNet(), images.loader(16, train=True), RECIPE, out=tmp_path)
    other = OwnNet()
    other.last = nn.Linear(8, 4)
    with pytest.raises(FileError, match=r"has other shapes for last\.bias, last\.weight; it belongs to another model"):
        fit(other, images.loader(16, train=True), RECIPE, out=tmp_path)


# Schedules and parameter groups


def test_steps_divide_the_rate_by_ten_at_each_milestone() -> None:
    recipe = Recipe(epochs=5, schedule="steps", milestones=(2, 4))
    factors = [recipe.factor(step, steps_per_epoch=3) for step in range(15)]
    assert factors == pytest.approx([1.0] * 6 + [0.1] * 6 + [0.01] * 3)


def test_cosine_falls_from_one_to_zero_step_by_step() -> None:
    recipe = Recipe(epochs=2, schedule="cosine")
    assert recipe.factor(0, 4) == 1.0
    assert recipe.factor(2, 4) == pytest.approx(0.5 + 0.5 * math.cos(math.pi / 4))
    assert recipe.factor(4, 4) == pytest.approx(0.5)
    assert recipe.factor(8, 4) == pytest.approx(0.0)


def test_heads_follow_the_backbone_or_stay_constant_until_they_freeze() -> None:
    same, constant = Recipe(epochs=4, schedule="cosine"), Recipe(epochs=4, schedule="cosine", head_schedule="constant")
    frozen = Recipe(epochs=4, schedule="cosine", head_schedule="constant", freeze_heads=2)
    assert [same.head_factor(step, 5) for step in range(20)] == [same.factor(step, 5) for step in range(20)]
    assert {constant.head_factor(step, 5) for step in range(20)} == {1.0}
    assert [frozen.head_factor(step, 5) for step in range(20)] == [1.0] * 10 + [0.0] * 10


def test_frozen_heads_stay_as_they_are_while_the_backbone_learns_on() -> None:
    gated = tiny_gated()
    before = {name: tensor.clone() for name, tensor in gated.state_dict().items()}
    fit(gated, feed(), dataclasses.replace(RECIPE, epochs=1, freeze_heads=0))
    moved = {name for name, tensor in gated.state_dict().items() if not torch.equal(tensor, before[name])}
    assert moved
    assert not any(name.startswith("gates.") for name in moved)


def test_the_logged_rates_are_the_schedule_s(tmp_path: Path) -> None:
    fit(tiny_gated(), feed(), RECIPE, out=tmp_path)
    rates = [line["lr"] for line in log_of(tmp_path) if line["event"] == "step"]
    assert rates == [RECIPE.lr * RECIPE.factor(step, STEPS) for step in range(3 * STEPS)]


def test_backbone_and_heads_have_rate_and_decay_of_their_own() -> None:
    gated = tiny_gated()
    recipe = Recipe(lr=0.1, head_lr=0.2, weight_decay=0.3, head_weight_decay=0.7)
    backbone, heads = parameter_groups(gated, recipe)
    assert (backbone["lr"], backbone["weight_decay"]) == (0.1, 0.3)
    assert (heads["lr"], heads["weight_decay"]) == (0.2, 0.7)
    assert {id(p) for p in heads["params"]} == {id(p) for p in gated.gates.parameters()}
    assert {id(p) for p in backbone["params"]} == {id(p) for p in gated.backbone.parameters()}


def test_what_is_part_of_the_network_learns_as_the_backbone_does(tmp_path: Path) -> None:
    """At its rate and decay, but like heads: also while the backbone rests, and not once heads are frozen."""
    recipe = Recipe(
        epochs=3, lr=0.1, head_lr=9.0, weight_decay=0.3, head_weight_decay=0.7, warm_heads=1, freeze_heads=2
    )
    gated = gate(tiny_plain(), FBS())
    (group,) = (found for found in parameter_groups(gated, recipe) if found["heads"])
    assert (group["lr"], group["weight_decay"]) == (0.1, 0.3)
    rates: list[list[float]] = []

    class Watch(AbstractCallback):
        def on_step(self, run: Run) -> None:
            rates.append([found["lr"] for found in run.optimizer.param_groups])

    fit(gated, [next(iter(tiny_images(16).loader(16)))], recipe, callbacks=[Watch()])
    assert rates == [[0.0, 0.1], [0.1, 0.1], [0.1, 0.0]]


def test_one_step_is_the_sgd_of_the_recipe() -> None:
    """Two steps by hand: gradient + decay, momentum, rate of the schedule, for backbone and heads."""
    recipe = Recipe(epochs=2, lr=0.05, head_lr=0.2, weight_decay=0.01, head_weight_decay=0.1, schedule="cosine")
    batch = next(iter(tiny_images(16).loader(16)))
    gated, by_hand = tiny_gated(), tiny_gated()
    fit(gated, [batch], recipe)
    heads = {id(p) for p in by_hand.gates.parameters()}
    velocity: dict[int, Tensor] = {}
    by_hand.train()
    for step in range(2):
        by_hand.zero_grad()
        (F.cross_entropy(by_hand(batch[0]), batch[1]) + mask_loss(by_hand)).backward()
        for p in by_hand.parameters():
            lr, decay = (0.2, 0.1) if id(p) in heads else (0.05, 0.01)
            assert p.grad is not None
            push = p.grad + decay * p.detach()
            velocity[id(p)] = push if step == 0 else 0.9 * velocity[id(p)] + push
            p.data -= lr * 0.5 * (1 + math.cos(math.pi * step / 2)) * velocity[id(p)]
    for (name, ours), theirs in zip(gated.named_parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, msg=lambda text, name=name: f"{name}: {text}")


# What is trained


@pytest.mark.parametrize("mode", ["joint", "decoupled"])
@pytest.mark.parametrize("labelled", [True, False])
def test_heads_only_training_leaves_the_backbone_bit_equal(mode: str, labelled: bool) -> None:
    gated = tiny_gated(mode=mode)
    gated.backbone.conv1.weight.requires_grad_(False)  # a user's own choice, to be found again
    wanted = {name: p.requires_grad for name, p in gated.named_parameters()}
    before = {name: tensor.clone() for name, tensor in gated.state_dict().items()}
    loader = tiny_images(labelled=labelled).loader(BATCH, train=True)
    fit(gated, loader, dataclasses.replace(RECIPE, train="heads"))
    after = gated.state_dict()
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert same == {name for name in before if not name.startswith("gates.")}
    assert {name: p.requires_grad for name, p in gated.named_parameters()} == wanted


def test_heads_only_training_restores_the_gradients_after_an_error() -> None:
    gated = tiny_gated()
    with pytest.raises(Killed):
        fit(gated, feed(dies_at=1), dataclasses.replace(RECIPE, train="heads"))
    assert all(p.requires_grad for p in gated.parameters())


def test_heads_only_training_teaches_the_heads() -> None:
    gated = tiny_gated()
    result = fit(gated, tiny_images().loader(BATCH, train=True), Recipe(epochs=8, train="heads", head_lr=0.5))
    assert result.epochs[-1].mask_loss < 0.8 * result.epochs[0].mask_loss


def test_training_teaches_a_gated_model() -> None:
    train, test = tiny_images(480).split(160)
    gated = tiny_gated(ratio=0.8)
    fit(gated, train.loader(32, train=True), Recipe(epochs=8, lr=0.05, schedule="cosine"))
    report = evaluate(gated, test.loader(160))
    assert report.top1 > 0.6
    assert report.reduction["executed"] > 0.05


def test_a_plain_model_trains_too() -> None:
    train, test = tiny_images(480).split(160)
    model = tiny_plain()
    result = fit(model, train.loader(32, train=True), Recipe(epochs=3, lr=0.05, schedule="cosine"))
    assert evaluate(model, test.loader(160)).top1 > 0.6
    assert [record.mask_loss for record in result.epochs] == [0.0] * 3


def test_a_trained_model_is_left_in_eval_mode() -> None:
    gated = tiny_gated()
    fit(gated, feed(), dataclasses.replace(RECIPE, epochs=1))
    assert not any(module.training for module in gated.modules())


@pytest.mark.parametrize("dies_at", [-1, 1])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_steps_are_channels_last_and_the_model_comes_back_in_its_own_layout(
    layout: torch.memory_format, dies_at: int
) -> None:
    gated, seen = tiny_gated(), set()
    weight = next(p for p in gated.parameters() if p.ndim == 4 and p.shape[1] > 1 and p.shape[2] > 1)
    weight.data = weight.data.contiguous(memory_format=layout)
    for module in gated.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.register_forward_hook(
                lambda _, __, y: (
                    seen.add(y.is_contiguous(memory_format=torch.channels_last)) if y.shape[1] > 1 else None
                )
            )
    with pytest.raises(Killed) if dies_at > 0 else nullcontext():
        fit(gated, feed(dies_at=dies_at), dataclasses.replace(RECIPE, epochs=1))
    assert True in seen
    assert weight.is_contiguous(memory_format=layout)


def test_bf16_trains_and_keeps_the_weights_in_fp32() -> None:
    exact, rounded = tiny_gated(), tiny_gated()
    first = fit(exact, feed(), RECIPE)
    second = fit(rounded, feed(), dataclasses.replace(RECIPE, precision="bf16"))
    assert digest(exact) != digest(rounded)
    assert {tensor.dtype for tensor in rounded.parameters()} == {torch.float32}
    assert second.epochs[0].loss == pytest.approx(first.epochs[0].loss, rel=0.05)


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_a_teacher_computes_in_the_precision_of_the_run(precision: Any, dtype: torch.dtype) -> None:
    seen: set[torch.dtype] = set()

    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = tiny_plain()

        def forward(self, x_BCHW: Tensor) -> Tensor:
            logits_BK: Tensor = self.net(x_BCHW)
            seen.add(logits_BK.dtype)
            return logits_BK

    fit(
        tiny_plain(), feed(), dataclasses.replace(RECIPE, epochs=1, distill=0.5, precision=precision), teacher=Watched()
    )
    assert seen == {dtype}


# Loaders


def as_list(images: Any) -> list[Any]:
    return list(images.loader(BATCH))


def as_data_loader(images: Any) -> Any:
    return DataLoader(TensorDataset(images.normalise(images.pixels_NCHW), images.label_N), batch_size=BATCH)


@pytest.mark.parametrize("convert", [as_list, as_data_loader])
def test_a_list_and_a_torch_data_loader_train_like_our_own(convert: Callable[[Any], Any]) -> None:
    ours, theirs = tiny_gated(), tiny_gated()
    images = tiny_images()
    fit(ours, images.loader(BATCH), RECIPE, val=VAL)
    fit(theirs, convert(images), RECIPE, val=list(VAL))
    assert digest(ours) == digest(theirs)


class Short:
    """Has a length that it does not keep."""

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[Any]:
        return iter(as_list(tiny_images()))


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        while True:
            yield torch.zeros(1, 8, 8), 0


# Selection


@pytest.mark.parametrize("folder", [True, False], ids=["on disk", "in memory"])
@pytest.mark.parametrize("select", ["best", "last"])
def test_the_model_ends_with_the_weights_of_the_selected_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, select: str, folder: bool
) -> None:
    digests: list[str] = []
    scores = iter([0.5, 0.9, 0.7])

    def scored(model: nn.Module, *args: Any, **options: Any) -> Any:
        digests.append(digest(model))
        return dataclasses.replace(evaluate(model, VAL), top1=next(scores))

    monkeypatch.setattr("cofire.training.loop.evaluate", scored)
    gated = tiny_gated()
    recipe = dataclasses.replace(RECIPE, select=select)
    result = fit(gated, feed(), recipe, val=VAL, out=tmp_path if folder else None)
    assert result.selected == {"best": 1, "last": 2}[select]
    assert digest(gated) == digests[result.selected]
    assert [record.val_top1 for record in result.epochs] == [0.5, 0.9, 0.7]


def test_without_a_validation_set_the_last_epoch_is_kept() -> None:
    result = fit(tiny_gated(), feed(), RECIPE)
    assert result.selected == 2
    assert {record.val_top1 for record in result.epochs} == {None}


# Errors


def test_a_loss_that_is_not_finite_ends_the_run_and_leaves_its_checkpoints_whole(tmp_path: Path) -> None:
    recipe = dataclasses.replace(RECIPE, lr=1e18, head_lr=0.0)
    with pytest.raises(TrainingError, match=r"must be finite, got .*(lower lr|lower the learning rate)"):
        fit(tiny_plain(), feed(), recipe, out=tmp_path)
    assert not list(tmp_path.rglob("*.tmp"))
    for path in tmp_path.rglob("*.safetensors"):
        read_tensors(path)
    for line in (tmp_path / "log.jsonl").read_text().splitlines() if (tmp_path / "log.jsonl").exists() else ():
        assert math.isfinite(json.loads(line)["loss"])


def test_images_with_nan_are_named() -> None:
    x_BCHW, label_B = next(iter(tiny_images(16).loader(16)))
    x_BCHW[3, 0, 4, 4] = math.nan
    for model in (tiny_gated(), tiny_plain()):
        with pytest.raises(TrainingError, match="must be finite, got"):
            fit(model, [(x_BCHW, label_B)], RECIPE)


@pytest.mark.parametrize(
    ("train", "error"),
    [
        ([], "at least one batch, got an empty"),
        (iter(as_list(tiny_images())), "must have a length"),
        (DataLoader(Endless(), batch_size=4), "must have a length"),
        (Short(), "has length 4, but gave only 3 batches in epoch 0"),
        ([(torch.zeros(2, 1, 8, 8), torch.tensor([0, 10]))], r"labels must be in 0\.\.9, .* got 0\.\.10"),
        ([(torch.zeros(2, 1, 8, 8), torch.tensor([0, -100]))], r"labels must be in 0\.\.9, .* got -100\.\.0"),
        ([(torch.zeros(2, 1, 8, 8), torch.tensor([0]))], r"labels must be an integer tensor \(2,\)"),
        ([(torch.zeros(2, 8, 8), torch.tensor([0, 1]))], r"float images \(B, C, H, W\), got torch.float32 \(2, 8, 8\)"),
        ([(torch.zeros(2, 3, 8, 8), torch.tensor([0, 1]))], r"shape \(B, 1, H, W\), got \(2, 3, 8, 8\)"),
        (tiny_images(labelled=False).loader(BATCH), "unlabelled images only the heads can learn"),
    ],
    ids=["empty", "iterator", "endless", "short", "label 10", "label -100", "labels", "3-d", "channels", "unlabelled"],
)
def test_a_loader_that_does_not_fit_gets_an_error_that_says_so(train: Any, error: str) -> None:
    with pytest.raises(DataError, match=error):
        fit(tiny_gated(), train, RECIPE)


def test_heads_only_training_needs_a_gated_model() -> None:
    with pytest.raises(ConfigError, match="needs a gated model"):
        fit(tiny_plain(), feed(), Recipe(train="heads"))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"epochs": -1}, "Recipe.epochs must be at least 0, got -1"),
        ({"epochs": 1.5}, "Recipe.epochs must be of type int, got 1.5"),
        ({"checkpoint_steps": 0}, "Recipe.checkpoint_steps must be at least 1, got 0"),
        ({"lr": -0.1}, "Recipe.lr must be a number >= 0, got -0.1"),
        ({"head_lr": math.nan}, "Recipe.head_lr must be a number >= 0, got nan"),
        ({"milestones": (-1, 3)}, "must be epochs >= 0"),
        ({"freeze_heads": -1}, "must be epochs >= 0"),
        ({"schedule": "cosin"}, "Recipe.schedule must be one of 'steps', 'cosine', 'one-cycle', got 'cosin'"),
        ({"train": "head"}, "Recipe.train must be one of 'all', 'heads', got 'head'"),
    ],
)
def test_a_recipe_checks_its_values(options: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        Recipe(**options)


# Golden losses


def golden_losses(out: Path) -> list[float]:
    """Loss of each of 20 steps on digits; the images come with scikit-learn."""
    train, _ = data.digits()
    loader = train.take(slice(0, 640)).loader(32, train=True, augment="crop", pad=1)
    fit(tiny_gated(ratio=0.8), loader, Recipe(epochs=1, lr=0.02, schedule="cosine"), out=out)
    return [line["loss"] for line in log_of(out) if line["event"] == "step"]


def test_twenty_steps_give_the_losses_they_always_gave(tmp_path: Path) -> None:
    """After an intended change ``.venv/bin/python tests/test_training.py`` writes the file; the commit says why."""
    stored = json.loads(GOLDEN.read_text())["loss"]
    assert len(stored) == 20
    assert golden_losses(tmp_path) == pytest.approx(stored, rel=1e-4)


if __name__ == "__main__":
    import tempfile

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        losses = golden_losses(Path(folder))
    GOLDEN.write_text(json.dumps({"loss": losses}, indent=2) + "\n")
    print(f"wrote {GOLDEN.relative_to(ROOT)}")
