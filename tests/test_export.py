"""ONNX files give PyTorch's logits, gated ones too; folding batch norm changes nothing but the number of calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from nets import Net, bn, conv, fc, gated_net, images
from small import tiny_gated, tiny_plain
from torch import Tensor, nn

from cofire import FTWT, create_backbone, gate
from cofire.errors import DataError, TraceError
from cofire.export import folded, to_onnx

NEEDS = "onnx and onnxruntime are needed (extra peers)"


def run_onnx(path: Path, x: Tensor) -> Tensor:
    session = pytest.importorskip("onnxruntime", reason=NEEDS).InferenceSession(path)
    return torch.from_numpy(session.run(None, {"images": x.numpy()})[0])


@torch.no_grad()
def logits(model: nn.Module, x: Tensor) -> Tensor:
    return model.eval()(x)


@pytest.mark.parametrize("name", ["resnet20", "vgg11_bn", "mobilenet_v2"])
def test_a_plain_model_gives_the_same_logits_in_onnx_runtime_for_any_batch(name: str, tmp_path: Path) -> None:
    pytest.importorskip("onnx", reason=NEEDS)
    torch.manual_seed(0)
    model = create_backbone(name).eval()
    path = to_onnx(model, tmp_path / "model.onnx")
    for batch in (1, 3):
        x = images(batch, model.input_shape)
        torch.testing.assert_close(run_onnx(path, x), logits(model, x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"pool": "avg", "softmax": False}, {"depthwise": "separate"}])
@pytest.mark.parametrize("name", ["resnet8_digits", "mobilenet_v2"])
def test_a_gated_model_gives_the_same_logits_in_onnx_runtime(name: str, options: Any, tmp_path: Path) -> None:
    pytest.importorskip("onnx", reason=NEEDS)
    torch.manual_seed(0)
    plain = create_backbone(name)
    gated = gated_net(plain, plain.input_shape, **options)
    x = images(4, plain.input_shape)
    expected = logits(gated, x)
    assert 0.1 < torch.cat([mask.flatten() for mask in gated.masks.values()]).float().mean() < 0.9
    path = to_onnx(gated, tmp_path / "gated.onnx")
    torch.testing.assert_close(run_onnx(path, x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["resnet8_digits", "mobilenet_v2"])
def test_the_k_largest_logits_and_fixed_filters_go_into_the_file(name: str, tmp_path: Path) -> None:
    pytest.importorskip("onnx", reason=NEEDS)
    torch.manual_seed(0)
    plain = create_backbone(name)
    groups = gate(plain, FTWT()).gates.sites
    half = {group: -(-site.filters // 2) for group, site in groups.items()}
    fixed = {group: (0, 2) for group in list(groups)[::3]}
    heads: Any = {"select": "top", "pool": "both", "softmax": False, "standardise": True}
    gated = gate(plain, FTWT(signature=half, fixed=fixed, **heads)).eval()
    path = to_onnx(gated, tmp_path / "gated.onnx")
    for batch in (1, 4):
        x = images(batch, plain.input_shape)
        expected = logits(gated, x)
        torch.testing.assert_close(run_onnx(path, x), expected, rtol=1e-4, atol=1e-5)
    counts = {group: set(mask_BO.sum(1).tolist()) for group, mask_BO in gated.masks.items()}
    assert counts == {group: {2} if group in fixed else {k} for group, k in half.items()}


def test_the_threshold_goes_into_the_file(tmp_path: Path) -> None:
    pytest.importorskip("onnx", reason=NEEDS)
    gated = tiny_gated().eval()
    x = images(2, (1, 8, 8))
    as_trained = logits(gated, x)
    gated.threshold = 0.1
    found = run_onnx(to_onnx(gated, tmp_path / "strict.onnx"), x)
    torch.testing.assert_close(found, logits(gated, x), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(found, as_trained)


def test_a_model_is_left_as_it_was(tmp_path: Path) -> None:
    pytest.importorskip("onnx", reason=NEEDS)
    gated = tiny_gated().train()
    to_onnx(gated, tmp_path / "gated.onnx")
    assert gated.training
    assert gated.decisions == {}


def test_a_model_that_does_not_run_at_the_shape_is_named_in_the_error(tmp_path: Path) -> None:
    pytest.importorskip("onnx", reason=NEEDS)
    with pytest.raises(TraceError, match=r"cannot be written as ONNX for images of shape \(2, 8, 8\)"):
        to_onnx(tiny_plain(), tmp_path / "wrong.onnx", (2, 8, 8))
    assert list(tmp_path.iterdir()) == []


def test_without_onnx_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(__import__("sys").modules, "onnx", None)
    with pytest.raises(DataError, match=r"onnx is needed here: pip install 'cofire\[export\]'"):
        to_onnx(tiny_plain(), tmp_path / "model.onnx")


def test_folding_leaves_no_batch_norm_and_the_same_logits() -> None:
    plain = Net(
        lambda net, x: net.logits(torch.relu(net.bn2(net.b(torch.relu(net.bn1(net.a(x))))))),
        **{"a": conv(3, 6, bias=False), "bn1": bn(6), "b": conv(6, 4), "bn2": bn(4), "fc": fc(4)},
    )
    before = {key: value.clone() for key, value in plain.state_dict().items()}
    found = folded(plain)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in found.modules())
    torch.testing.assert_close(logits(found, images()), logits(plain, images()), rtol=1e-4, atol=1e-4)
    assert all(torch.equal(before[key], value) for key, value in plain.state_dict().items())


def test_a_norm_is_not_folded_where_another_reads_the_conv_or_a_module_is_called_twice() -> None:
    shared = Net(
        lambda net, x: net.logits(net.bn1(net.a(x)) + net.bn2(net.b(net.b(x)))),
        **{"a": conv(3, 3), "bn1": bn(3), "b": conv(3, 3), "bn2": bn(3), "fc": fc(3)},
    )
    forked = Net(
        lambda net, x: (lambda y: net.logits(net.bn1(y) + y))(net.a(x)), **{"a": conv(3, 4), "bn1": bn(4), "fc": fc(4)}
    )
    for model, norms in ((shared, 1), (forked, 1)):
        found = folded(model)
        assert sum(isinstance(module, nn.BatchNorm2d) for module in found.modules()) == norms
        torch.testing.assert_close(logits(found, images()), logits(model, images()), rtol=1e-4, atol=1e-4)
