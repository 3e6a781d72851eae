"""What PyTorch users do to models, done to a gated model that has just been trained a step."""

from __future__ import annotations

import copy
import json
import pickle
import shutil
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ddp_worker import BACKBONES, FITS, new_gated, own_gated, teacher_for
from launching import start
from small import digest
from torch import Tensor, nn

from cofire import GatedModel, create_backbone, fit, mask_loss
from cofire.files.tensors import read_tensors

X = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([0, 2])

everywhere = pytest.mark.parametrize("name", BACKBONES)


def train_step(model: nn.Module, x_BCHW: Tensor = X) -> float:
    """Forward and backward; the loss."""
    model.train()
    model.zero_grad()
    loss = F.cross_entropy(model(x_BCHW).float(), LABELS) + mask_loss(model)
    loss.backward()
    return loss.item()


def logits(model: nn.Module, x_BCHW: Tensor = X) -> Tensor:
    model.eval()
    with torch.no_grad():
        found: Tensor = model(x_BCHW)
    return found


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {name: p.grad for name, p in model.named_parameters()}
    assert [name for name, gradient in found.items() if gradient is None] == []
    return {name: gradient for name, gradient in found.items() if gradient is not None}


def used(name: str, **options: Any) -> GatedModel:
    """A gated model after a forward and a backward: its gates hold decisions that hang on an autograd graph."""
    gated = new_gated(name, **options)
    train_step(gated)
    assert gated.decisions
    return gated


@everywhere
@pytest.mark.parametrize("mode", ["joint", "decoupled"])
def test_deepcopy_gives_an_independent_equal(name: str, mode: str) -> None:
    gated = used(name, mode=mode)
    gated.threshold = 0.1
    twin = copy.deepcopy(gated)
    assert twin.decisions == {}
    assert twin.training
    assert twin.threshold == 0.1
    assert torch.equal(logits(twin), logits(gated))
    before = digest(gated)
    train_step(twin)
    with torch.no_grad():
        for p in twin.parameters():
            p.add_(1.0)
    assert digest(gated) == before


@everywhere
def test_state_dict_round_trip(name: str) -> None:
    gated = used(name)
    state = gated.state_dict()
    torch.manual_seed(99)
    plain = create_backbone(name, **BACKBONES[name])
    other = new_gated(name)
    for p in other.parameters():
        nn.init.normal_(p)
    other.load_state_dict(state)
    assert torch.equal(logits(other), logits(gated))
    plain.load_state_dict({key: tensor for key, tensor in state.items() if not key.startswith("gates.")})
    with gated.force("open"):
        assert torch.equal(logits(plain), logits(gated))


@everywhere
def test_pickle_round_trip(name: str) -> None:
    gated = used(name)
    gated.threshold = -0.2
    twin = pickle.loads(pickle.dumps(gated))
    assert twin.decisions == {}
    assert twin.threshold == -0.2
    assert torch.equal(logits(twin), logits(gated))
    train_step(twin)


@contextmanager
def compiling() -> Iterator[None]:
    """Nothing compiled before, and no errors for what torch.compile warns about in its own code."""
    torch.compiler.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def compiled_differs_in(gated: GatedModel, x_BCHW: Tensor, backend: str) -> list[str]:
    """What a training step of the compiled model gives that one of the model itself does not."""
    eager = copy.deepcopy(gated)
    with compiling():
        loss = train_step(torch.compile(gated, backend=backend), x_BCHW)
    found = [] if loss == pytest.approx(train_step(eager, x_BCHW), rel=1e-4) else ["loss"]
    found += [f"mask of {group}" for group, mask in gated.masks.items() if not torch.equal(mask, eager.masks[group])]
    theirs = gradients(eager)
    for key, gradient in gradients(gated).items():
        atol = 1e-3 * float(theirs[key].abs().max()) + 1e-7
        if not torch.allclose(gradient, theirs[key], rtol=1e-2, atol=atol):
            found.append(f"gradient of {key}")
    return found


@everywhere
def test_torch_compile_gives_the_same_masks_and_gradients(name: str) -> None:
    assert compiled_differs_in(used(name), X, "aot_eager") == []


def test_a_compiled_model_infers_like_the_one_it_was_made_of() -> None:
    gated, x_BCHW = own_gated(), torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    expected, masks = logits(gated, x_BCHW), gated.masks
    with compiling():
        found = logits(torch.compile(gated, backend="aot_eager"), x_BCHW)
    torch.testing.assert_close(found, expected)
    assert all(torch.equal(mask, masks[group]) for group, mask in gated.masks.items())


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None and shutil.which("c++") is None, reason="inductor needs a C++ compiler")
def test_inductor_gives_the_same_masks_and_gradients() -> None:
    x_BCHW = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    assert compiled_differs_in(own_gated(), x_BCHW, "inductor") == []


@everywhere
def test_channels_last_gives_the_same_masks_and_logits(name: str) -> None:
    gated = used(name)
    expected, masks = logits(gated), gated.masks
    gated = gated.to(memory_format=torch.channels_last)
    found = logits(gated, X.contiguous(memory_format=torch.channels_last))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
    assert all(torch.equal(mask, masks[group]) for group, mask in gated.masks.items())
    train_step(gated, X.contiguous(memory_format=torch.channels_last))
    assert all(bool(gradient.isfinite().all()) for gradient in gradients(gated).values())


@everywhere
@pytest.mark.parametrize("mode", ["joint", "decoupled"])
def test_bf16_autocast_trains_and_infers(name: str, mode: str) -> None:
    gated = used(name, mode=mode)
    with gated.force("open"):
        expected = logits(gated)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = logits(gated)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), expected, rtol=0.1, atol=0.1 * float(expected.abs().max()))
    exact = train_step(gated)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = train_step(gated)
    assert rounded == pytest.approx(exact, rel=0.05)
    found_gradients = gradients(gated)
    assert {gradient.dtype for gradient in found_gradients.values()} == {torch.float32}
    assert all(bool(gradient.isfinite().all()) for gradient in found_gradients.values())


# Two processes


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """Folder and results of two gloo processes, started as `torchrun` or `accelerate launch` would."""
    out = tmp_path_factory.mktemp("ddp")
    workers = start([sys.executable, str(Path(__file__).with_name("ddp_worker.py")), str(out)])
    texts = ["".join(worker.communicate()) for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], "\n".join(texts)
    return out, [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(2)]


@everywhere
def test_two_processes_agree_on_finite_gradients_of_every_parameter(name: str, two_processes: Any) -> None:
    first, second = (result["steps"][name] for result in two_processes[1])
    assert first["missing"] == second["missing"] == []
    assert first["finite"]
    assert first["sums"] == second["sums"]
    assert any(value > 0 for value in first["sums"].values())


@pytest.mark.parametrize("name", FITS)
def test_fit_in_two_processes_equals_fit_in_one(name: str, two_processes: Any) -> None:
    """Up to the order of sums: each process has half of every batch, and the network has no batch norm."""
    out, results = two_processes
    assert results[0]["fit"][name] == results[1]["fit"][name]
    alone, (loader, recipe) = own_gated(), FITS[name]
    fit(alone, loader, recipe, teacher=teacher_for(recipe))
    newest = max((out / name / "checkpoints").glob("step-*"))
    kept = "average." if recipe.average else "model."
    together = {key.removeprefix(kept): tensor for key, tensor in read_tensors(newest)[0].items()}
    for key, tensor in alone.state_dict().items():
        torch.testing.assert_close(together[key], tensor, rtol=1e-3, atol=1e-5)
