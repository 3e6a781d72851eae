"""fit(): the one training loop, for plain and gated models; a Recipe says how.

Everything random is a function of (seed, epoch, step), so a run that is killed and started again ends with the
same weights, bit for bit, as one that was not (same machine, versions and number of threads).
"""

from __future__ import annotations

import copy
import dataclasses
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor, nn

from cofire.data.feeding import AnyLoader, checked, map_tensors, num_batches
from cofire.data.images import Loader
from cofire.errors import ConfigError, DataError, FileError, TrainingError
from cofire.evaluation import Metric, Report, evaluate
from cofire.files.atomic import read_json, remove, write_json
from cofire.files.strict import same_run, unstructure
from cofire.files.tensors import read_tensors, write_tensors
from cofire.gates.gating import GatedModel, describe_backbone, gated_parts, has_gates, mask_loss, num_filters
from cofire.gates.persistence import fill
from cofire.progress import progress
from cofire.training import tracking
from cofire.training.averaging import Average
from cofire.training.callbacks import AbstractCallback
from cofire.training.checkpoints import CheckpointFolder, capture, restore
from cofire.training.log import RunLog
from cofire.training.memory_format import channels_last, to_channels_last
from cofire.training.processes import together
from cofire.training.recipe import Recipe
from cofire.training.setup import described, length, only_learning, parameter_groups, seed
from cofire.training.task import Loss, score, task_loss
from cofire.training.tracking import Track


@dataclass(frozen=True, kw_only=True)
class EpochRecord:
    """One epoch: mean losses over its steps and, where there is a validation set, what it gave."""

    epoch: int
    loss: float
    mask_loss: float
    seconds: float
    val_top1: float | None
    val_reduction: float | None
    val_score: float | None = None
    """What epochs are chosen by: top-1, or the first of the caller's own metrics."""


@dataclass(frozen=True, kw_only=True)
class FitResult:
    """A finished training: its epochs, and the epoch whose weights the model has now; None if there was none."""

    epochs: list[EpochRecord]
    selected: int | None


def fit(
    model: nn.Module,
    train: AnyLoader,
    recipe: Recipe,
    *,
    val: AnyLoader | None = None,
    teacher: nn.Module | None = None,
    out: str | Path | None = None,
    track: Track | None = None,
    callbacks: Sequence[AbstractCallback] = (),
    loss: Loss | None = None,
    metric: Metric | None = None,
) -> FitResult:
    """Train ``model`` in place: a plain one, a gated one, or one with gated parts.

    Args:
        train: batches (x_BCHW, label_B) of known number: a cofire ``Loader``, a torch DataLoader, a list. What a
            DataLoader draws from torch's global generator is a function of seed, epoch and step as well.
        val: validation batches; the epoch that does best on them is kept (``recipe.select``).
        teacher: whose logits the model learns from where ``recipe.distill`` is above 0, e.g. the dense model.
        out: folder for checkpoints and the log ``log.jsonl``. A run found there is resumed; another run's is an
            error. Without it nothing is written.
        track: also tell a tracker how it goes: ``tensorboard``, ``trackio``, ``wandb``, or one of Accelerate's kind.
        callbacks: called at each step and epoch; see :class:`AbstractCallback`.
        loss: ``loss(output, target)`` in place of cross-entropy, for models that return anything but logits; batches
            are (x_BCHW, target) then, with targets of any form. The gates' loss is added to it.
        metric: what ``val`` is measured by then, as in `evaluate`; the first of its values chooses the epoch.

    Raises:
        TrainingError: a loss is not finite, or another process of the run has ended.
        FileError: ``out`` belongs to another run, or cannot be written.
    """
    if (teacher is None) != (recipe.distill == 0):
        given = "none" if teacher is None else "one"
        raise ConfigError(f"a teacher goes with Recipe.distill above 0, got distill={recipe.distill} and {given}")
    if loss is not None and (teacher is not None or (val is not None and metric is None)):
        raise ConfigError("a loss of your own goes without a teacher and, where there is a val, with a metric")
    with together(), only_learning(model, recipe), channels_last(model):
        folder = Path(out) if out is not None else None
        return _Run(model, train, recipe, val, teacher, folder, track, callbacks, loss, metric).go()


class _Run:
    def __init__(
        self,
        model: nn.Module,
        train: AnyLoader,
        recipe: Recipe,
        val: AnyLoader | None,
        teacher: nn.Module | None,
        out: Path | None,
        track: Track | None,
        callbacks: Sequence[AbstractCallback],
        loss: Loss | None,
        metric: Metric | None,
    ) -> None:
        self.recipe, self.train, self.val, self.out = recipe, train, val, out
        self.loss, self.metric = loss, metric
        self.steps_per_epoch = length(train, recipe.accumulate)
        AcceleratorState._reset_state()  # another fit in this process may have used another precision
        mixed = "bf16" if recipe.precision == "bf16" else "no"
        options = tracking.tracking(track, out)
        self.accelerator = Accelerator(cpu=not torch.accelerator.is_available(), mixed_precision=mixed, **options)
        if recipe.warm_heads and self.accelerator.num_processes > 1:
            raise ConfigError("Recipe.warm_heads works in one process; with several, train the heads in an earlier run")
        self.model, self.callbacks = model, callbacks
        self.parts = gated_parts(model) if has_gates(model) else []
        self.teacher = None if teacher is None else copy.deepcopy(teacher).eval().to(self.accelerator.device)
        if self.teacher is not None:
            to_channels_last(self.teacher)
            for part in self.parts:
                self.teacher = part.gates.taught_by(self.teacher)
        groups = parameter_groups(model, recipe)
        self.rates = [group["lr"] for group in groups]  # what the schedule multiplies
        optimizer = torch.optim.SGD(groups, momentum=recipe.momentum)
        self.wrapped, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.folder = CheckpointFolder(out / "checkpoints") if out else None
        path = out / "log.jsonl" if out and self.accelerator.is_main_process else None
        self.log = RunLog(path, track=self.accelerator.log)
        self.average = Average(model, recipe.average) if recipe.average else None
        self.step = 0
        self.epochs: list[EpochRecord] = []
        self.sums = [0.0, 0.0, 0.0]  # loss, mask loss, seconds of the epoch under way
        self.best_weights: dict[str, Tensor] | None = None
        self.own_optimizers = [own for callback in callbacks for own in callback.optimizers(self)]

    @property
    def epoch(self) -> int:
        """The epoch under way; after its last step still that one, until the next begins."""
        return len(self.epochs)

    def go(self) -> FitResult:
        self._resume()
        for callback in self.callbacks:
            callback.on_start(self)
        tracking.start(self.accelerator, self.out, unstructure(self.recipe))
        try:
            self._train()
        finally:
            tracking.finish(self.accelerator)
            # In bf16 accelerate has put autocast around the model's forward, where it would stay.
            self.accelerator.unwrap_model(self.wrapped, keep_fp32_wrapper=False)
        if not self.epochs:
            self.model.eval()
            return FitResult(epochs=[], selected=None)
        selected = self._selected()
        if self.average is not None:
            self.average.write_to(self.model)
        if self.out is not None and selected != len(self.epochs) - 1:
            tensors, _ = read_tensors(self._best_path(selected))
            fill(self.model, tensors, str(self._best_path(selected)))
        elif self.best_weights is not None:
            self.model.load_state_dict(self.best_weights)
        self.model.eval()
        return FitResult(epochs=self.epochs, selected=selected)

    def _train(self) -> None:
        epochs = min(self.recipe.epochs, self.recipe.stop_after or self.recipe.epochs)
        total = epochs * self.steps_per_epoch
        with progress("training") as bar:
            task = bar.add_task("training", total=total, completed=self.step)
            while self.step < total:
                epoch, start = divmod(self.step, self.steps_per_epoch)
                for part in self.parts:
                    part.gates.on_epoch(epoch, self.recipe.epochs)
                batches = self._batches(epoch, start * self.recipe.accumulate)
                for _ in range(start, self.steps_per_epoch):
                    self._train_step(epoch, list(islice(batches, self.recipe.accumulate)))
                    note = f"epoch {epoch + 1}/{self.recipe.epochs}, loss {self.sums[0] / self._step_in_epoch():.3f}"
                    bar.update(task, completed=self.step, description=note)
                    if self.step % self.steps_per_epoch == 0:
                        self._end_epoch(epoch)
                    elif self.recipe.checkpoint_steps and self.step % self.recipe.checkpoint_steps == 0:
                        self._checkpoint()

    def _step_in_epoch(self) -> int:
        return (self.step - 1) % self.steps_per_epoch + 1

    def _batches(self, epoch: int, start: int) -> Iterator[tuple[Tensor, Any]]:
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        if isinstance(self.train, Loader):
            yield from self.train.batches(epoch, start, rank, world)
            return
        torch.manual_seed(seed(self.recipe.seed, epoch))  # a DataLoader draws the seed of its workers from here
        batches = iter(self.train)
        for index in range(self.steps_per_epoch * self.recipe.accumulate):
            torch.manual_seed(seed(self.recipe.seed, epoch, index, 0))  # its order and augmentation from here
            try:
                x_BCHW, target = checked(next(batches), labelled=self.loss is None)
            except StopIteration:
                promised = f"the training loader has length {num_batches(self.train)}"
                raise DataError(f"{promised}, but gave only {index} batches in epoch {epoch}") from None
            if index >= start:
                yield x_BCHW[rank::world], map_tensors(target, lambda tensor: tensor[rank::world])

    def _train_step(self, epoch: int, batches: list[tuple[Tensor, Any]]) -> None:
        began = time.perf_counter()
        torch.manual_seed(seed(self.recipe.seed, epoch, self.step))
        self._set_rates()
        self._set_modes()
        for optimizer in (self.optimizer, *self.own_optimizers):
            optimizer.zero_grad()
        value, mask_value = 0.0, 0.0
        for batch in batches:
            x_BCHW, target = map_tensors(batch, lambda tensor: tensor.to(self.accelerator.device))
            loss, masks = self._losses(x_BCHW, target)
            value, mask_value = value + float(loss.detach()) / len(batches), mask_value + float(masks) / len(batches)
            if not math.isfinite(value):
                raise TrainingError(
                    f"the loss must be finite, got {value} at epoch {epoch}, step {self.step} "
                    f"(mask loss {mask_value}); lower lr or head_lr, or check the images for NaN"
                )
            self.accelerator.backward(loss / len(batches))
        self._rest()
        for optimizer in (self.optimizer, *self.own_optimizers):
            optimizer.step()
        self.step += 1
        for part in self.parts:
            part.gates.on_step()
        for callback in self.callbacks:
            callback.on_step(self)
        if self.average is not None:
            self.average.update(self.model, self.step)
        for i, amount in enumerate((value, mask_value, time.perf_counter() - began)):
            self.sums[i] += amount
        self.log.step(epoch=epoch, step=self.step, loss=value, mask_loss=mask_value, lr=self._rate)

    def _losses(self, x_BCHW: Tensor, target: Any) -> tuple[Tensor, Tensor]:
        """Total loss and the gates' part of it."""
        output = self.wrapped(x_BCHW)
        label_B = target if self.loss is None else None
        taught_BK = None
        if self.teacher is not None and not self._only_heads():
            with torch.no_grad(), self.accelerator.autocast():
                taught_BK = self.teacher(x_BCHW).float()
        masks = mask_loss(self.model, label_B, taught_BK) if self.parts else x_BCHW.new_zeros(())
        total = masks
        if not self._only_heads():
            total = task_loss(output, target, taught_BK, self.recipe, self.loss) + masks
        for callback in self.callbacks:
            more = callback.loss(self, x_BCHW, target, output)
            total = total if more is None else total + more
        return total, masks.detach()

    def _only_heads(self) -> bool:
        return self.recipe.only_heads(self.step, self.steps_per_epoch)

    def _set_rates(self) -> None:
        recipe, when = self.recipe, (self.step, self.steps_per_epoch)
        self._rate = 0.0 if recipe.only_heads(*when) else recipe.lr * recipe.factor(*when)
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * recipe.head_factor(*when) if group["heads"] else self._rate

    def _set_modes(self) -> None:
        self.wrapped.train(not self._only_heads())
        for part in self.parts:
            part.gates.train()

    def _rest(self) -> None:
        """While only heads learn, the others' gradients are dropped, so that they do not gather in momenta either."""
        for group in self.optimizer.param_groups if self._only_heads() else ():
            for parameter in () if group["heads"] else group["params"]:
                parameter.grad = None

    def _end_epoch(self, epoch: int) -> None:
        for callback in self.callbacks:
            callback.on_epoch(self)
        report: Report | None = None
        if self.val is not None:
            with self._kept_weights():
                report = evaluate(self.model, self.val, text="validating", metric=self.metric)
        steps = self.steps_per_epoch
        record = EpochRecord(
            epoch=epoch,
            loss=self.sums[0] / steps,
            mask_loss=self.sums[1] / steps,
            seconds=self.sums[2],
            val_top1=report.top1 if report and self.metric is None else None,
            val_reduction=report.reduction["executed"] if report else None,
            val_score=score(report) if report else None,
        )
        self.epochs.append(record)
        self.sums = [0.0, 0.0, 0.0]
        self.log.epoch(self.step, record)
        if self._selected() == epoch and self.recipe.select == "best" and self.val is not None:
            with self._kept_weights():
                self._keep_best(epoch)
        self._checkpoint()

    def _kept_weights(self) -> AbstractContextManager[None]:
        """Inside the block the model has the weights that would be kept: its own, or their average."""
        return nullcontext() if self.average is None else self.average.applied(self.model)

    def _selected(self) -> int:
        scores = [record.val_top1 if record.val_score is None else record.val_score for record in self.epochs]
        if self.recipe.select == "last" or None in scores:
            return len(self.epochs) - 1
        return max(range(len(scores)), key=lambda epoch: (scores[epoch], epoch))

    def _keep_best(self, epoch: int) -> None:
        if self.out is None:
            self.best_weights = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        elif self.accelerator.is_main_process:
            write_tensors(self._best_path(epoch), self.model.state_dict(), {"epoch": epoch})

    def _best_path(self, epoch: int) -> Path:
        assert self.out is not None
        return self.out / "checkpoints" / f"best-{epoch:04d}.safetensors"

    def _checkpoint(self) -> None:
        if self.folder is None or not self.accelerator.is_main_process:
            return
        state = {"epochs": [dataclasses.asdict(record) for record in self.epochs], "sums": self.sums}
        self.log.flush()
        averages = self.average.tensors if self.average is not None else {}
        called = {f"{n}.{name}": t for n, back in enumerate(self.callbacks) for name, t in back.state_dict().items()}
        parts = {"average": averages, "callback": called}
        self.folder.write(capture(self.step, self.model, [self.optimizer, *self.own_optimizers], state, parts))
        for path in self.folder.folder.glob("best-*.safetensors"):
            if self.epochs and path != self._best_path(self._selected()):
                remove(path)

    def _resume(self) -> None:
        if self.out is None or self.folder is None:
            return
        if self.accelerator.is_main_process:
            self._claim_folder()
            self.folder.tidy()
        self.accelerator.wait_for_everyone()
        checkpoint = self.folder.newest()
        self.accelerator.wait_for_everyone()  # all have read before one writes
        if checkpoint is not None:
            restored = restore(checkpoint, self.model, [self.optimizer, *self.own_optimizers])
            if self.average is not None:
                self.average.tensors = restored["average"]
            for n, callback in enumerate(self.callbacks):
                mine = {key.partition(".")[2]: t for key, t in restored["callback"].items() if key.startswith(f"{n}.")}
                callback.load_state_dict(mine)
            self.step = checkpoint.step
            self.epochs = [EpochRecord(**record) for record in checkpoint.state["epochs"]]
            self.sums = list(checkpoint.state["sums"])
        else:
            self._checkpoint()  # the fresh weights too: who calls again need not draw the same ones
        self.log.rewind(self.step)

    def _claim_folder(self) -> None:
        assert self.out is not None
        model: Any = describe_backbone(self.model)
        if isinstance(self.model, GatedModel):
            config = self.model.config  # itself, so that a field that an older run does not have counts as its default
            model = {**self.model.describe(), "gate": {"type": type(config).__name__, "fields": config}}
        mine = {
            "recipe": self.recipe,
            "model": model,
            "filters": num_filters(self.model),
            "data": described(self.train),
            "steps_per_epoch": self.steps_per_epoch,
        }
        path = self.out / "fit.json"
        if not path.exists():
            write_json(path, unstructure(mine))
        elif changed := same_run(mine, read_json(path)):
            what = ", ".join(changed)
            raise FileError(f"{self.out} holds another run (it differs in {what}); choose another folder or remove it")
