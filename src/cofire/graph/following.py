"""torch.fx as far as it goes: questions about shapes are answered at one input size, the rest stays one call.

While a forward is traced it is run on proxies. Where it asks one for a Python value (a branch, a loop, an index), the
calls so far are run on images to find it. Only what follows from shapes is answered, and checked at each call.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import operator
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from cofire.errors import DataError, TraceError

_BATCHES = (2, 3)  # an answer must be the same for batches of any size
_OF_SHAPES = {"shape", "ndim", "dtype", "device", "is_cuda", "size", "dim", "numel", "nelement", "is_floating_point"}
_NOT_THEIRS = (str(Path(torch.__file__).parent), str(Path(__file__).parent), contextlib.__file__)


def same_answer(found: Any, answer: Any, where: str) -> None:
    """Raise unless a question about shapes is answered as it was when the forward was traced."""
    if found != answer:
        raise DataError(
            f"the model's forward takes another way for images of this size: what it asks at {where} was {answer} for "
            f"the size it was traced at and is {found} here; trace or gate it again with this input_shape"
        )


def reason(error: Exception) -> str:
    """What an error says, and the file and line of the model's code it comes from."""
    text = str(error).strip().partition("\n")[0] or type(error).__name__
    where = _where(traceback.extract_tb(error.__traceback__))
    return f"{text} ({where})" if where else text


def _where(frames: traceback.StackSummary) -> str:
    """File and line of the innermost frame of the model's own code."""
    theirs = [frame for frame in frames if not frame.filename.startswith(_NOT_THEIRS)]
    return f"{theirs[-1].filename}:{theirs[-1].lineno}" if theirs else ""


class Constant:
    """What gives a tensor that a forward makes without its input: the same at each call."""

    __name__ = "constant"

    def __init__(self, value: Tensor) -> None:
        self.value = value.detach()

    def __call__(self) -> Tensor:
        return self.value


class _Proxy(fx.Proxy):
    """A proxy that may be used where Python needs a value."""

    def __getattr__(self, name: str) -> _Attribute:
        return _Attribute(self, name)

    def __len__(self) -> int:
        return int(self._follower.asked(self._follower.create_proxy("call_function", len, (self,), {})))

    def __index__(self) -> int:
        return operator.index(self._follower.asked(self))

    def __int__(self) -> int:
        return int(self._follower.asked(self))

    def __float__(self) -> float:
        return float(self._follower.asked(self))

    @property
    def _follower(self) -> Follower:
        assert isinstance(self.tracer, Follower)
        return self.tracer


class _Attribute(fx.proxy.Attribute, _Proxy):
    """The attribute of one."""


class Follower(fx.Tracer):
    """Traces through modules, except those that are ``whole`` and those that cannot be followed."""

    def __init__(self, model: nn.Module, input_shape: tuple[int, int, int], whole: set[nn.Module]) -> None:
        super().__init__()
        self.model, self.whole = model, whole
        tensors = [*model.parameters(), *model.buffers()]
        like = next((t for t in tensors if t.is_floating_point()), torch.zeros(1))
        self.images = [torch.zeros(b, *input_shape, device=like.device, dtype=like.dtype) for b in _BATCHES]
        self.values: dict[fx.Node, list[Any]] = {}
        self.running = False  # modules are run, not traced
        self.inside: list[str] = [""]
        self.parameters: dict[str, fx.Proxy] = {}
        self.failed: tuple[Exception, str] | None = None

    def blamed(self, error: Exception) -> str:
        """The innermost module that an error came from."""
        return self.failed[1] if self.failed is not None and self.failed[0] is error else ""

    # What torch.fx asks

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Callable[..., Any], list[Any]]:
        """A forward that takes ``*args`` or ``**kwargs`` after its images is called without any."""
        variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        if any(parameter.kind in variable for parameter in inspect.signature(root_fn).parameters.values()):

            def images_only(self: nn.Module, x: Any) -> Any:
                return root_fn(self, x)

            return super().create_args_for_root(images_only, is_module)
        return super().create_args_for_root(root_fn, is_module, concrete_args)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return super().is_leaf_module(m, module_qualified_name) or m in self.whole

    def create_arg(self, a: Any) -> Any:
        """A tensor that a forward makes of numbers is a call of its own: torch.fx would write it on the model."""
        made_here = isinstance(a, Tensor) and not isinstance(a, nn.Parameter) and a not in self.tensor_attrs
        if made_here and not any(a is buffer for buffer in self.root.buffers()):
            return self.create_node("call_function", Constant(a), (), {})
        return super().create_arg(a)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().create_node(*args, **kwargs)
        node.meta["inside"] = self.inside[-1]
        return node

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, fx.Proxy]) -> Any:
        self.parameters = parameter_proxy_cache
        return attr_val if self.running else super().getattr(attr, attr_val, parameter_proxy_cache)

    def to_bool(self, obj: fx.Proxy) -> bool:
        return bool(self.asked(obj))

    def iter(self, obj: fx.Proxy) -> Iterator[fx.Proxy]:
        return iter([_item(obj, i) for i in range(len(obj))])

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self.running:
            return forward(*args, **kwargs)
        path = self.path_of_module(m)
        last, stack = next(reversed(self.graph.nodes)), dict(self.module_stack)
        self.inside.append(path)
        try:
            with unchanged(m):
                return super().call_module(m, forward, args, kwargs)
        except Exception as error:
            if self.failed is None or self.failed[0] is not error:
                self.failed = (error, path)
            self._forget_after(last)
            self.module_stack.clear()
            self.module_stack.update(stack)
            return self._opaque(path, args, kwargs, error)
        finally:
            self.inside.pop()

    # Questions

    def asked(self, proxy: fx.Proxy) -> Any:
        """The Python value of ``proxy``, if it follows from shapes; else a `TraceError`."""
        where = _where(traceback.extract_stack())
        if not _follows_from_shapes(proxy.node):
            raise TraceError(f"the forward looks at values of a tensor: {proxy.node.name}")
        answer, other = self._values(proxy.node)
        if answer != other:
            raise TraceError(f"the forward depends on the size of the batch: {proxy.node.name} is {answer} or {other}")
        self.create_node("call_function", same_answer, (proxy.node, answer, where), {})
        return answer

    def _values(self, node: fx.Node) -> list[Any]:
        """What ``node`` gives for each batch of images."""
        needed, todo = {node}, [node]
        for needing in todo:
            fresh = [n for n in needing.all_input_nodes if n not in needed and n not in self.values]
            needed.update(fresh)
            todo.extend(fresh)
        self.running = True
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                for each in self.graph.nodes if node not in self.values else ():
                    if each in needed:
                        self.values[each] = [self._run(each, n) for n in range(len(_BATCHES))]
        finally:
            self.running = False
        return self.values[node]

    def _run(self, node: fx.Node, n: int) -> Any:
        if node.op == "placeholder":
            return self.images[n]
        if node.op == "get_attr":
            found = operator.attrgetter(str(node.target))(self.model)
            return found.clone() if isinstance(found, Tensor) else found
        args, kwargs = thawed(fx.node.map_arg((node.args, node.kwargs), lambda source: self.values[source][n]))
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        if node.op == "call_function":
            return node.target(*args, **kwargs)  # type: ignore[operator]
        # A copy, so that no norm takes these images into its statistics.
        module = copy.deepcopy(self.model.get_submodule(str(node.target)))
        if "opaque" not in node.meta:
            module.eval()
        return module(*args, **kwargs)

    # What cannot be followed

    def _opaque(self, path: str, args: Any, kwargs: Any, error: Exception) -> Any:
        """One call of the module as it is; raises ``error`` where it does not take and give tensors."""
        last = next(reversed(self.graph.nodes))
        try:
            proxy = self.create_proxy("call_module", path, args, kwargs)
            proxy.node.meta["opaque"] = reason(error)
            result = self._values(proxy.node)[0]
        except Exception:
            self._forget_after(last)
            raise error from None
        if not _is_tensors(result):
            self._forget_after(last)
            raise error
        return _unpacked(proxy, result)

    def _forget_after(self, last: fx.Node) -> None:
        nodes = list(self.graph.nodes)
        for node in reversed(nodes[nodes.index(last) + 1 :]):
            self.graph.erase_node(node)
            self.values.pop(node, None)
        alive = set(self.graph.nodes)
        for name in [name for name, proxy in self.parameters.items() if proxy.node not in alive]:
            del self.parameters[name]


@contextlib.contextmanager
def unchanged(module: nn.Module) -> Iterator[None]:
    """A traced forward leaves the module's attributes as they were; one that would keep what it computes is refused."""
    before = dict(vars(module))
    try:
        yield
        for name, kept in vars(module).items():
            if any(isinstance(part, fx.Proxy) for part in (kept if isinstance(kept, (tuple, list)) else (kept,))):
                code = type(module).forward.__code__
                here = f"{code.co_filename}:{code.co_firstlineno}"
                raise TraceError(f"its forward keeps what it computes in self.{name}, see {here}")
    finally:
        vars(module).clear()
        vars(module).update(before)


def _follows_from_shapes(node: fx.Node) -> bool:
    """Whether a call reads sizes and types of tensors only, never what is in them."""
    if node.target is len:
        return True
    asks = node.args[1] if node.target is getattr else node.target
    if isinstance(asks, str) and node.op in ("call_method", "call_function") and asks in _OF_SHAPES:
        return True
    sources = node.all_input_nodes
    return node.op in ("call_method", "call_function") and bool(sources) and all(map(_follows_from_shapes, sources))


def _item(proxy: fx.Proxy, key: Any) -> fx.Proxy:
    found: fx.Proxy = operator.getitem(proxy, key)
    return found


def thawed(value: Any) -> Any:
    """Arguments as a module gets them from Python: torch.fx keeps lists and dicts that nobody can write on."""
    if isinstance(value, dict):
        return {key: thawed(part) for key, part in value.items()}
    if isinstance(value, list):
        return [thawed(part) for part in value]
    return tuple(thawed(part) for part in value) if type(value) is tuple else value


def _is_tensors(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_tensors, value.values()))
    return all(map(_is_tensors, value)) if isinstance(value, (tuple, list)) else isinstance(value, Tensor)


def _unpacked(proxy: fx.Proxy, value: Any) -> Any:
    """``proxy`` in the form of ``value``: containers of proxies, which the code around can look into."""
    if isinstance(value, dict):
        return {key: _unpacked(_item(proxy, key), part) for key, part in value.items()}
    if not isinstance(value, (tuple, list)):
        return proxy
    parts = [_unpacked(_item(proxy, i), part) for i, part in enumerate(value)]
    if isinstance(value, list):
        return parts
    return tuple(parts) if type(value) is tuple else type(value)(*parts)  # the latter: a named tuple
