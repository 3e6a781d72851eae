"""nn.Module -> fx.Graph: the model's forward as a flat list of calls, with its modules and keys untouched."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import is_lazy

from cofire.errors import TraceError
from cofire.graph.following import Follower, reason, unchanged

# Subclasses of these keep their own forward (timm's Conv2dSame, BatchNormAct2d, LayerNorm2d ...), which is
# one operation to us, so they are not traced through.
_WHOLE = (_ConvNd, _NormBase, nn.Linear, nn.LayerNorm, nn.GroupNorm)


def is_norm(module: nn.Module) -> bool:
    """True for batch, layer, group and instance norms and for anything that carries a batch norm's tensors."""
    if isinstance(module, (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.LocalResponseNorm)):
        return True
    tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    return {"running_mean", "running_var"} <= {name for name, _ in tensors}


def norm_mixes(module: nn.Module) -> bool:
    """True for a norm whose result for one channel depends on others: layer, group and local response norms."""
    if isinstance(module, nn.GroupNorm):
        return module.num_groups < module.num_channels
    return isinstance(module, (nn.LayerNorm, nn.LocalResponseNorm))


def norm_activates(module: nn.Module) -> bool:
    """True for a norm that holds an activation of its own, as timm's BatchNormAct2d does."""
    neutral = (nn.Identity, nn.Dropout)
    return is_norm(module) and any(not isinstance(child, neutral) for child in module.children())


def is_elementwise(module: nn.Module) -> bool:
    """True for a module without state that treats every element alike, found by trying it.

    Such a module commutes with any permutation of all elements. That covers activations and stochastic
    depth of any library without a list of their names.
    """
    if any(True for _ in module.children()) or any(True for _ in module.parameters()):
        return False
    if any(True for _ in module.buffers()):
        return False
    generator = torch.Generator().manual_seed(0)
    probe = torch.randn(2, 4, 3, 3, generator=generator)
    order = torch.randperm(probe.numel(), generator=generator)
    try:
        with torch.no_grad(), evaluating(module):
            # A copy each time: the module may work in place.
            plain = module(probe.clone())
            shuffled = module(probe.flatten()[order].view_as(probe).clone())
    except Exception:
        return False
    if not isinstance(plain, Tensor) or plain.shape != probe.shape:
        return False
    # Nearly equal: vectorised code rounds some elements differently from those left over at the end.
    return torch.allclose(plain.flatten()[order], shuffled.flatten(), equal_nan=True)


@contextmanager
def evaluating(model: nn.Module, so: bool = True) -> Iterator[None]:
    """Eval mode inside the block (training mode if not ``so``); every module's own is put back afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.train(not so)
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def require_followable(model: object) -> None:
    """Raise a TraceError, with the way out, for what has no Python forward to follow, or no weights yet."""
    kind = type(model).__name__
    if not isinstance(model, nn.Module):
        raise TraceError(
            f"a torch.nn.Module is needed, got {kind}; call it in the forward of a module of your own "
            "(cofire.compile also takes ONNX files and programs of torch.export)"
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise TraceError(
            f"a TorchScript module ({kind}) holds no Python code to follow; pass the module it was made of, or write "
            "it as ONNX and give the file to cofire.compile"
        )
    if hasattr(model, "_orig_mod"):
        raise TraceError("torch.compile hides the module's own forward; pass the module itself: model._orig_mod")
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if is_lazy(tensor) or tensor.is_meta:
            raise TraceError(
                f"{name!r} has no values yet; run a lazy module once on a batch, load the weights of one on the device "
                "'meta'"
            )


def trace_calls(model: nn.Module, input_shape: tuple[int, int, int]) -> fx.Graph:
    """The forward of ``model`` in eval mode as an ``fx.Graph`` with one input and no ``nn.Identity``.

    Functions that were handed ``self.training`` read it anew at each call, so dropout and stochastic depth keep working
    in both modes. Questions about shapes are answered for images of ``input_shape``, (C, H, W), and checked at each
    call. A module that cannot be followed is one call; the reason is in the call's ``meta["opaque"]``.

    Raises:
        TraceError: torch.fx cannot follow the model's own forward; names file and line, and the ways out.
    """
    require_followable(model)
    with evaluating(model):
        return _traced(model, input_shape)


def trace_training_calls(model: nn.Module, input_shape: tuple[int, int, int], calls: fx.Graph) -> fx.Graph | None:
    """The same for the forward in training mode; None if it is made of the same ``calls``."""
    with evaluating(model, False):
        found = _traced(model, input_shape)
    return None if found.python_code("self").src == calls.python_code("self").src else found


def _traced(model: nn.Module, input_shape: tuple[int, int, int]) -> fx.Graph:
    tracer = Follower(model, input_shape, _whole_modules(model))
    parameters = inspect.signature(model.forward).parameters
    if len(required := [name for name, p in parameters.items() if _is_required(p)]) > 1:
        raise _many_inputs(required)
    optional = dict(list(parameters.items())[1:])
    fixed = {name: p.default for name, p in optional.items() if p.default is not inspect.Parameter.empty}
    try:
        with unchanged(model):
            graph = tracer.trace(model, concrete_args=fixed or None)
    except Exception as error:
        _check_runs(model, input_shape)
        raise _untraceable(model, tracer.blamed(error), error) from error
    _drop_fixed_inputs(graph)
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    if len(inputs) != 1:
        raise _many_inputs([node.name for node in inputs])
    _drop_identities(graph, model)
    _read_training_anew(graph, model.training)
    return graph


def _is_required(parameter: inspect.Parameter) -> bool:
    many = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return parameter.default is inspect.Parameter.empty and parameter.kind not in many


def _many_inputs(names: Sequence[str]) -> TraceError:
    return TraceError(
        f"the model's forward must take one image batch, got {len(names)} inputs: {', '.join(names)}\n"
        "Ways out: (1) a forward that takes one batch with all of them, joined along channels, and takes it apart; "
        "(2) gate the part that sees one input, e.g. model.features = cofire.gate(model.features, config)."
    )


def _check_runs(model: nn.Module, input_shape: tuple[int, int, int]) -> None:
    """Raise if the model itself does not take such images: then it is not torch.fx that fails."""
    like = next(model.parameters(), torch.zeros(1))
    images = torch.zeros(2, *input_shape, device=like.device, dtype=like.dtype)
    try:
        with torch.no_grad(), evaluating(model), unchanged(model):
            model(images)
    except Exception as error:
        raise TraceError(
            f"the model does not run on images of shape {input_shape}: {reason(error)}\n"
            "Pass the shape it was made for: input_shape=(C, H, W)."
        ) from error


def _whole_modules(model: nn.Module) -> set[nn.Module]:
    # Looked up beforehand: while tracing, calling a module to try it would be traced as well.
    return {m for m in model.modules() if isinstance(m, _WHOLE) or is_norm(m) or is_elementwise(m)}


def _untraceable(model: nn.Module, path: str, error: Exception) -> TraceError:
    where = f"module {path!r}" if path else "the model's own forward"
    kind = type(model.get_submodule(path)).__name__
    return TraceError(
        f"torch.fx cannot trace {where} ({kind}): {reason(error)}\n"
        "Ways out: (1) move what looks at values into a module of its own, which is then run as it is; (2) decorate "
        "the function that does with torch.fx.wrap, or replace the branch by torch.where; (3) gate only the part of "
        "the model that can be traced, e.g. model.features = cofire.gate(model.features, config)."
    )


def _drop_fixed_inputs(graph: fx.Graph) -> None:
    """Remove the inputs that were fixed to their defaults, with the checks torch.fx hangs on them."""
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    for placeholder in placeholders[1:]:
        checks = [placeholder]
        for node in checks:
            checks.extend(user for user in node.users if user not in checks)
        if all(node.op == "placeholder" or _is_check(node) for node in checks):
            for node in sorted(checks, reverse=True):
                graph.erase_node(node)


def _is_check(node: fx.Node) -> bool:
    name = getattr(node.target, "__name__", "")
    return node.op == "call_function" and (name in ("eq", "is_", "_assert") or name.startswith("_assert"))


def _drop_identities(graph: fx.Graph, model: nn.Module) -> None:
    for node in list(graph.nodes):
        if node.op == "call_module" and type(model.get_submodule(str(node.target))) is nn.Identity:
            node.replace_all_uses_with(node.all_input_nodes[0])
            graph.erase_node(node)


def _read_training_anew(graph: fx.Graph, training: bool) -> None:
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        try:
            bound = inspect.signature(node.target).bind(*node.args, **node.kwargs)
        except (TypeError, ValueError):
            continue
        if bound.arguments.get("training") is training:  # what self.training was; the other is a constant
            path = ".".join(part for part in (node.meta["inside"], "training") if part)
            with graph.inserting_before(node):
                bound.arguments["training"] = graph.create_node("get_attr", path, name="training")
            node.args, node.kwargs = bound.args, bound.kwargs
