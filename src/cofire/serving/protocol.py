"""The Open Inference Protocol v2: bytes of a request -> images and wishes; answers -> bytes. Pure functions.

Tensors travel as JSON, or as raw little-endian bytes behind the JSON (the binary tensor extension).
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from cofire.errors import ConfigError, DataError, unknown

HEADER_LENGTH = "inference-header-content-length"
"""The HTTP header that says how many bytes of a body are JSON; what follows them are tensors."""
VERSION = "1"
INPUT, OUTPUT, MACS = "input", "output", "macs"
EXTENSIONS = ["binary_tensor_data", "model_repository"]
TYPES = {"float32": "FP32", "int64": "INT64"}
PARAMETERS = ("threshold", "budget", "binary_data_output")


@dataclass(frozen=True, kw_only=True)
class Request:
    """An inference that was asked for.

    Args:
        x_BCHW: the images.
        id: the client's, which the answer repeats.
        threshold: filters with a logit above it run; None: as the program says.
        budget: in place of it, the share of the dense MACs that the mean image may cost.
        outputs: which are wanted, and whether as bytes.
    """

    x_BCHW: NDArray[np.float32]
    id: str | None = None
    threshold: float | None = None
    budget: float | None = None
    outputs: dict[str, bool] = field(default_factory=dict)


def metadata(name: str, input_shape: tuple[int, ...], output_shape: tuple[int, ...]) -> dict[str, Any]:
    """Of a model, as the protocol has it; -1 is the batch."""
    return {
        "name": name,
        "versions": [VERSION],
        "platform": "cofire",
        "inputs": [{"name": INPUT, "datatype": "FP32", "shape": [-1, *input_shape]}],
        "outputs": [
            {"name": OUTPUT, "datatype": "FP32", "shape": [-1, *output_shape]},
            {"name": MACS, "datatype": "INT64", "shape": [-1]},
        ],
    }


def parse(body: bytes, json_bytes: str | None, shape: tuple[int, int, int], max_batch: int) -> Request:
    """A request's body.

    Args:
        json_bytes: what the header ``HEADER_LENGTH`` says; None: the whole body is JSON.
        shape: (C, H, W) of an image.
        max_batch: how many images a request may have.

    Raises:
        DataError, ConfigError: what is wrong with it.
    """
    length = len(body) if json_bytes is None else _length(json_bytes, len(body))
    try:
        table = json.loads(body[:length], parse_constant=_not_json)
    except (ValueError, RecursionError) as error:
        raise DataError(f"the body must be JSON as the Open Inference Protocol has it: {error}") from error
    if not isinstance(table, dict):
        raise DataError(f"the body must be a JSON object, got {type(table).__name__}")
    inputs = table.get("inputs")
    if not isinstance(inputs, list) or len(inputs) != 1 or not isinstance(inputs[0], dict):
        raise DataError(f"inputs must be a list of one tensor, named {INPUT!r}")
    parameters = _table(table, "parameters")
    for name in parameters:
        if name not in PARAMETERS:
            raise unknown("parameter", str(name), PARAMETERS)
    threshold, budget = (_number(parameters, name) for name in ("threshold", "budget"))
    if threshold is not None and budget is not None:
        raise ConfigError("a request takes one of threshold and budget, got both")
    if budget is not None and not 0 < budget <= 1:
        raise ConfigError(f"budget is a share of the dense MACs and must be in (0, 1], got {budget}")
    given = table.get("id")
    if given is not None and not isinstance(given, str):
        raise DataError(f"id must be a text, got {given!r}")
    return Request(
        x_BCHW=_images(inputs[0], memoryview(body)[length:], shape, max_batch),
        id=given,
        threshold=threshold,
        budget=budget,
        outputs=_outputs(table, bool(parameters.get("binary_data_output", False))),
    )


def answer(
    name: str, request: Request, tensors: dict[str, NDArray[Any]], parameters: dict[str, Any]
) -> tuple[bytes, int | None]:
    """The body of a response, and how many bytes of it are JSON if tensors follow.

    Raises:
        DataError: a value is not finite and was to be written as JSON, which has no word for it.
    """
    outputs: list[dict[str, Any]] = []
    raw: list[bytes] = []
    for output, binary in request.outputs.items():
        array = tensors[output]
        entry: dict[str, Any] = {"name": output, "datatype": TYPES[array.dtype.name], "shape": array.shape}
        if binary:
            raw.append(array.tobytes())
            entry["parameters"] = {"binary_data_size": len(raw[-1])}
        else:
            entry["data"] = array.ravel().tolist()
        outputs.append(entry)
    table = {"model_name": name, "model_version": VERSION, "parameters": parameters, "outputs": outputs}
    if request.id is not None:
        table["id"] = request.id
    try:
        text = json.dumps(table, allow_nan=False).encode()
    except ValueError as error:
        raise DataError("the answer is not finite, and JSON has no word for that: ask for binary_data") from error
    return b"".join([text, *raw]), len(text) if raw else None


def _images(entry: dict[str, Any], rest: memoryview, shape: tuple[int, ...], max_batch: int) -> NDArray[np.float32]:
    if entry.get("name") != INPUT:
        raise unknown("input", str(entry.get("name")), [INPUT])
    if entry.get("datatype") != "FP32":
        raise DataError(f"datatype of {INPUT!r} must be FP32, got {entry.get('datatype')!r}")
    given = entry.get("shape")
    if not isinstance(given, list) or not all(type(size) is int for size in given) or tuple(given[1:]) != shape:
        raise DataError(f"shape of {INPUT!r} must be [B, {', '.join(map(str, shape))}], got {given!r}")
    if not 1 <= given[0] <= max_batch:
        raise DataError(f"a request must have 1 to {max_batch} images, got {given[0]}")
    count = math.prod(given)
    if "data" in entry:
        try:
            flat = np.asarray(entry["data"], np.float32).ravel()
        except (ValueError, TypeError, OverflowError) as error:
            raise DataError(f"data of {INPUT!r} must be numbers: {error}") from error
        if len(rest):
            raise DataError(f"{len(rest)} bytes follow the JSON, and no input says that they are its own")
    else:
        size = _table(entry, "parameters").get("binary_data_size")
        if type(size) is not int or size != len(rest):
            raise DataError(f"{INPUT!r} must have data, or a binary_data_size of the {len(rest)} bytes after the JSON")
        if size != 4 * count:
            raise DataError(f"{INPUT!r} must have 4 bytes for each of {count} numbers, got {size} bytes")
        flat = np.frombuffer(rest, "<f4").astype(np.float32)
    if flat.size != count:
        raise DataError(f"{INPUT!r} must have {count} numbers, as its shape says, got {flat.size}")
    if not np.isfinite(flat).all():
        raise DataError(f"{INPUT!r} must be finite, got {flat[~np.isfinite(flat)][0]} among its numbers")
    return flat.reshape(given)


def _outputs(table: dict[str, Any], binary: bool) -> dict[str, bool]:
    wanted = table.get("outputs")
    if wanted is None:
        return dict.fromkeys((OUTPUT, MACS), binary)
    if not isinstance(wanted, list) or not all(isinstance(entry, dict) for entry in wanted):
        raise DataError("outputs must be a list of objects with a name")
    found = {}
    for entry in wanted:
        name = str(entry.get("name"))
        if name not in (OUTPUT, MACS):
            raise unknown("output", name, (OUTPUT, MACS))
        found[name] = bool(_table(entry, "parameters").get("binary_data", binary))
    return found


def _table(table: dict[str, Any], key: str) -> dict[str, Any]:
    found = table.get(key, {})
    if not isinstance(found, dict):
        raise DataError(f"{key} must be a JSON object, got {found!r}")
    return found


def _number(parameters: dict[str, Any], name: str) -> float | None:
    found = parameters.get(name)
    if found is None:
        return None
    if isinstance(found, bool) or not isinstance(found, int | float) or not math.isfinite(found):
        raise ConfigError(f"{name} must be a finite number, got {found!r}")
    return float(found)


def _length(text: str, size: int) -> int:
    if not text.isascii() or not text.isdigit() or int(text) > size:
        raise DataError(f"the header {HEADER_LENGTH} must be at most the body's {size} bytes, got {text!r}")
    return int(text)


def _not_json(word: str) -> NoReturn:
    raise ValueError(f"{word} is not JSON")
