"""MACs: by hand on tiny nets, and against an oracle that counts the channels which are really not zero."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from nets import Net, bn, conv, fc, gated_net, images, inverted_net, mixed_net, option_a_net, random_masks
from torch import Tensor, nn

from cofire import ConfigError, GatedModel, cost, create_backbone

PIXELS = 8 * 8
TAPS = 9


def mask(*on: int, width: int = 8) -> Tensor:
    """(1, width) bool with the filters given on."""
    found = torch.zeros(1, width, dtype=torch.bool)
    found[0, list(on)] = True
    return found


def per_layer(counted: Mapping[str, Tensor]) -> dict[str, list[int]]:
    return {name: macs.tolist() for name, macs in counted.items()}


# By hand


def chain() -> GatedModel:
    return gated_net(
        Net(lambda m, x: m.logits(F.relu(m.two(F.relu(m.one(x))))), one=conv(3, 8), two=conv(8, 6), fc=fc(6))
    )


def test_active_filters_are_the_next_layers_input_width_in_every_column() -> None:
    gated = chain()
    found = gated.cost({"one": mask(0, 1, 2, 5), "two": mask(1, 4, width=6)})
    expected = {"one": [4 * 3 * TAPS * PIXELS], "two": [2 * 4 * TAPS * PIXELS], "fc": [2 * 5]}
    assert per_layer(found.executed) == expected
    assert per_layer(found.paper) == expected
    assert per_layer(found.heads) == {"one": [3 * 8], "two": [8 * 6]}
    assert found.dense == {"one": 3 * 8 * TAPS * PIXELS, "two": 8 * 6 * TAPS * PIXELS, "fc": 6 * 5}
    total = 6912 + 4608 + 10
    assert found.total("executed").tolist() == found.total("paper").tolist() == [total]
    assert found.total("executed+heads").tolist() == [total + 24 + 48]
    assert found.dense_total == 13824 + 27648 + 30
    assert found.reduction("executed").tolist() == [1 - total / 41502]
    assert found.reduction("executed+heads").tolist() == [1 - (total + 72) / 41502]


def test_cost_is_counted_per_sample_in_whole_numbers() -> None:
    gated = chain()
    found = gated.cost({"one": torch.cat([mask(0), mask(), mask(*range(8))]), "two": torch.ones(3, 6)})
    unit = TAPS * PIXELS
    assert found.executed["one"].tolist() == [3 * unit, 0, 24 * unit]
    assert found.executed["two"].tolist() == [6 * unit, 0, 48 * unit]
    assert found.executed["fc"].tolist() == [30, 30, 30]
    for column in (found.paper, found.executed, found.heads):
        assert all(macs.dtype == torch.int64 and macs.shape == (3,) for macs in column.values())
    assert found.total("paper").dtype == torch.int64
    assert found.reduction("paper").dtype == torch.float64
    assert found.reduction("paper")[2] == 0


def test_masks_may_be_bool_integers_or_floats() -> None:
    gated, on = chain(), mask(1, 3, 4)
    wanted = per_layer(gated.cost({"one": on}).executed)
    for given in (on.int(), on.float(), on.to(torch.bfloat16), on.float().requires_grad_()):
        assert per_layer(gated.cost({"one": given}).executed) == wanted


def test_a_group_without_mask_is_open_and_has_no_head() -> None:
    gated = chain()
    nothing = gated.cost({})
    assert nothing.total("executed+heads").tolist() == [nothing.dense_total]
    found = gated.cost({"two": mask(0, 1, width=6)})
    assert found.executed["one"].tolist() == [found.dense["one"]]
    assert list(found.heads) == ["two"]


def test_heads_cost_what_is_given_for_them() -> None:
    gated = chain()
    found = cost(gated.graph, {"one": mask(0)}, heads={"one": 7})
    assert found.heads["one"].tolist() == [7]
    assert found.total("executed+heads") - found.total("executed") == 7


def residual_net(refuse: str | None = None, swapped: bool = False, **options: Any) -> GatedModel:
    def forward(m: Net, x: Tensor) -> Tensor:
        x = F.relu(m.stem(x))
        y = m.bn(m.two(F.relu(m.one(x))))
        x = F.relu(x + y if swapped else y + x)
        return m.logits(F.relu(m.after(x)))

    modules = {"stem": conv(3, 8), "one": conv(8, 8), "two": conv(8, 8), "bn": bn(8), "after": conv(8, 8), "fc": fc(8)}
    return gated_net(Net(forward, **modules), filter_fn=lambda unit: unit.name != refuse, **options)


RESIDUAL = {"stem": mask(0, 1, 2, 3), "one": mask(0, 1), "two": mask(3, 4, 5)}


@pytest.mark.parametrize("swapped", [False, True])
def test_behind_an_addition_executed_takes_the_union_and_paper_the_last_gated_unit(swapped: bool) -> None:
    found = residual_net(swapped=swapped).cost(RESIDUAL)
    unit = TAPS * PIXELS
    before = {"stem": [4 * 3 * unit], "one": [2 * 4 * unit], "two": [3 * 2 * unit]}
    after = {"fc": [8 * 5]}
    assert per_layer(found.executed) == before | {"after": [8 * 6 * unit]} | after  # {0..3} or {3, 4, 5}
    assert per_layer(found.paper) == before | {"after": [8 * 3 * unit]} | after


def test_on_the_activated_sum_the_mask_counts_alone_in_both_columns() -> None:
    found = residual_net(site="post_add").cost(RESIDUAL)
    unit = TAPS * PIXELS
    assert found.executed["after"].tolist() == found.paper["after"].tolist() == [8 * 3 * unit]


def test_a_branch_that_ends_in_an_ungated_conv_refills_all_channels_in_both_columns() -> None:
    found = residual_net(refuse="two").cost({"stem": mask(0, 1, 2, 3), "one": mask(0, 1)})
    unit = TAPS * PIXELS
    assert found.executed["two"].tolist() == [8 * 2 * unit]
    assert found.executed["after"].tolist() == found.paper["after"].tolist() == [8 * 8 * unit]


def test_paper_counts_only_the_newest_block_of_a_long_stream() -> None:
    def forward(m: Net, x: Tensor) -> Tensor:
        x = F.relu(m.stem(x))
        for one, two in ((m.a1, m.a2), (m.b1, m.b2)):
            x = F.relu(two(F.relu(one(x))) + x)
        return m.logits(x)

    names = ("a1", "a2", "b1", "b2")
    gated = gated_net(Net(forward, stem=conv(3, 8), **{name: conv(8, 8) for name in names}, fc=fc(8)))
    found = gated.cost({"stem": mask(0), "a2": mask(1, 2), "b2": mask(2, 3, 4)})
    assert found.executed["b1"].tolist() == [3 * 8 * TAPS * PIXELS]  # {0, 1, 2}
    assert found.paper["b1"].tolist() == [2 * 8 * TAPS * PIXELS]
    assert found.executed["fc"].tolist() == [5 * 5]  # {0, 1, 2, 3, 4}
    assert found.paper["fc"].tolist() == [3 * 5]


def separable_net(**options: Any) -> GatedModel:
    return gated_net(
        Net(
            lambda m, x: m.logits(F.relu(m.point(F.relu(m.depth(F.relu(m.wide(x))))))),
            wide=conv(3, 8, 1),
            depth=conv(8, 8, groups=8),
            point=conv(8, 8, 1),
            fc=fc(8),
        ),
        **options,
    )


def test_a_depthwise_filter_costs_only_where_its_input_and_its_mask_are_on() -> None:
    found = separable_net(depthwise="separate").cost({"wide": mask(0, 1, 2, 3), "depth": mask(2, 3, 4, 5)})
    for column in (found.executed, found.paper):
        assert column["wide"].tolist() == [4 * 3 * PIXELS]
        assert column["depth"].tolist() == [2 * TAPS * PIXELS]
        assert column["point"].tolist() == [4 * 8 * PIXELS]
    assert per_layer(found.heads) == {"wide": [3 * 8], "depth": [8 * 8]}


def test_a_depthwise_conv_in_a_group_costs_its_mask_and_no_second_head() -> None:
    found = separable_net().cost({"wide": mask(0, 1, 2)})
    for column in (found.executed, found.paper):
        assert column["wide"].tolist() == [3 * 3 * PIXELS]
        assert column["depth"].tolist() == [3 * TAPS * PIXELS]
        assert column["point"].tolist() == [3 * 8 * PIXELS]
    assert per_layer(found.heads) == {"wide": [3 * 8]}


def test_a_grouped_conv_costs_per_group() -> None:
    gated = gated_net(
        Net(lambda m, x: m.logits(F.relu(m.two(F.relu(m.one(x))))), one=conv(3, 8), two=conv(8, 8, groups=2), fc=fc(8))
    )
    found = gated.cost({"one": mask(0, 1, 4), "two": mask(0, 1, 2, 7)})
    # the first group has 2 inputs and 3 filters on, the second 1 and 1
    assert found.executed["two"].tolist() == found.paper["two"].tolist() == [(2 * 3 + 1 * 1) * TAPS * PIXELS]
    assert found.dense["two"] == 8 * 4 * TAPS * PIXELS


def test_a_flattened_map_costs_every_pixel_of_its_live_channels() -> None:
    gated = gated_net(
        Net(lambda m, x: m.fc(F.max_pool2d(F.relu(m.one(x)), 2).flatten(1)), one=conv(3, 8), fc=fc(8 * 16))
    )
    assert gated.cost({"one": mask(0, 6, 7)}).executed["fc"].tolist() == [3 * 16 * 5]


def test_a_concatenation_costs_the_live_channels_of_all_its_parts() -> None:
    gated = gated_net(
        Net(
            lambda m, x: m.logits(F.relu(m.last(torch.cat([F.relu(m.one(x)), x, F.relu(m.two(x))], 1)))),
            one=conv(3, 8),
            two=conv(3, 8),
            last=conv(19, 4),
            fc=fc(4),
        )
    )
    found = gated.cost({"one": mask(0, 6, 7), "two": mask(1)})
    assert found.executed["last"].tolist() == found.paper["last"].tolist() == [(3 + 3 + 1) * 4 * TAPS * PIXELS]


def test_a_module_that_is_called_twice_is_counted_twice() -> None:
    gated = gated_net(
        Net(
            lambda m, x: m.logits(F.relu(m.same(F.relu(m.same(F.relu(m.one(x))))))),
            one=conv(3, 8),
            same=conv(8, 8),
            fc=fc(8),
        )
    )
    found = gated.cost({"one": mask(0, 1)})
    counted = {name: macs.item() for name, macs in found.executed.items()}
    assert sorted(counted.values()) == sorted([2 * 3 * 576, 2 * 8 * 576, 8 * 8 * 576, 8 * 5])


# Other input shapes, errors


def test_at_another_input_shape_convs_scale_with_the_pixels() -> None:
    gated = chain()
    masks = {"one": mask(0, 1, 2, 5), "two": mask(1, 4, width=6)}
    small, large = gated.cost(masks), gated.cost(masks, input_shape=(3, 16, 24))
    for name in ("one", "two"):
        assert large.dense[name] == 6 * small.dense[name]
        assert large.executed[name].tolist() == [6 * small.executed[name].item()]
    assert large.executed["fc"].tolist() == small.executed["fc"].tolist()
    assert large.heads == small.heads
    assert gated.graph.input_shape == (3, 8, 8)


def test_cost_is_pure() -> None:
    gated = residual_net()
    masks = {name: given.clone() for name, given in RESIDUAL.items()}
    first = gated.cost(masks)
    second = gated.cost(masks)
    assert all(torch.equal(given, RESIDUAL[name]) for name, given in masks.items())
    assert per_layer(first.executed) == per_layer(second.executed)
    assert gated.decisions == {}


def test_an_unknown_group_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="unknown group 'ones'; did you mean 'one'"):
        chain().cost({"ones": mask(0)})


@pytest.mark.parametrize("shape", [(7,), (1, 7), (2, 8, 1, 1)])
def test_a_mask_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=r"group 'one': mask must have shape \(B, 8\), got"):
        chain().cost({"one": torch.ones(shape)})


def test_masks_of_different_batch_sizes_are_refused() -> None:
    with pytest.raises(ConfigError, match="one batch size"):
        chain().cost({"one": torch.ones(2, 8), "two": torch.ones(3, 6)})


def test_an_unknown_column_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown cost column 'execute'; did you mean 'executed'"):
        chain().cost({}).total("execute")  # type: ignore[arg-type]


# Against an oracle that looks at values: with positive weights no channel is zero unless a mask made it so.


def make_positive(model: nn.Module) -> None:
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if "running_mean" in name:
                tensor.zero_()
            elif tensor.is_floating_point() and not name.startswith("gates."):
                tensor.abs_().clamp_(0.01, 0.5)


def executed_by_values(gated: GatedModel, x: Tensor, masks: Mapping[str, Tensor]) -> dict[str, list[int]]:
    """Runs the masked model; a conv or linear layer costs its filters that are on times inputs that are not zero."""
    filters = {unit.name: masks[unit.group] for unit in gated.units if unit.gated}
    counted: dict[str, list[int]] = {}

    def count(name: str) -> Callable[[nn.Module, tuple[Tensor], Tensor], None]:
        def hook(module: nn.Module, args: tuple[Tensor], y: Tensor) -> None:
            x = args[0]
            counted[name] = []
            for b in range(x.shape[0]):
                nonzero = [bool(x[b, i].any()) for i in range(x.shape[1])]
                if isinstance(module, nn.Linear):
                    counted[name].append(sum(nonzero) * module.out_features)
                    continue
                assert isinstance(module, nn.Conv2d)
                reads = module.in_channels // module.groups
                macs = 0
                for o in range(module.out_channels):
                    if name in filters and not filters[name][b, o]:
                        continue
                    first = o // (module.out_channels // module.groups) * reads
                    macs += sum(nonzero[first : first + reads]) * prod(module.kernel_size) * prod(y.shape[2:])
                counted[name].append(macs)

        return hook

    hooks = [
        module.register_forward_hook(count(name))
        for name, module in gated.named_modules()
        if isinstance(module, (nn.Conv2d, nn.Linear)) and not name.startswith("gates.")
    ]
    with torch.no_grad(), gated.force(masks):
        gated(x)
    for hook in hooks:
        hook.remove()
    return counted


ARCHITECTURES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "residual, option A, projection": (option_a_net, {}),
    "residual, masked after the addition": (option_a_net, {"site": "post_add"}),
    "inverted residual, grouped masks": (inverted_net, {}),
    "inverted residual, separate masks": (inverted_net, {"depthwise": "separate"}),
    "inverted residual, linear convs too": (inverted_net, {"depthwise": "separate", "linear": True}),
    "groups, shuffle, squeeze-and-excite, concat": (mixed_net, {}),
    "a registered ResNet": (lambda: create_backbone("resnet8_digits"), {}),
}


@pytest.mark.parametrize("keep", [0.0, 0.2, 0.5, 0.8, 1.0])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_executed_macs_are_those_of_values_that_are_not_zero(architecture: str, keep: float) -> None:
    make, options = ARCHITECTURES[architecture]
    net = make()
    shape = (1, 8, 8) if architecture == "a registered ResNet" else (3, 8, 8)
    gated = gated_net(net, shape, **options)
    make_positive(gated)
    assert gated.graph.opaque == ()
    masks = random_masks(gated, 4, keep, seed=int(10 * keep))
    found = gated.cost(masks)
    assert per_layer(found.executed) == executed_by_values(gated, images(4, shape).abs() + 0.1, masks)
    assert (found.total("executed") <= found.dense_total).all()
    if keep == 1.0:
        assert found.total("executed").tolist() == found.total("paper").tolist() == [found.dense_total] * 4


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_mask_that_lets_more_through_never_costs_less(architecture: str) -> None:
    make, options = ARCHITECTURES[architecture]
    shape = (1, 8, 8) if architecture == "a registered ResNet" else (3, 8, 8)
    gated = gated_net(make(), shape, **options)
    few = random_masks(gated, 16, 0.4)
    extra = random_masks(gated, 16, 0.3, seed=3)
    more = {group: given | extra[group] for group, given in few.items()}
    low, high = gated.cost(few), gated.cost(more)
    assert all((low.executed[name] <= high.executed[name]).all() for name in low.dense)
