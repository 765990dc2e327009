"""Comparison of two reports of `blockfp check`, from two machines or releases.

Reports contain SHA-256 hashes of each tensor's bytes and of its codes, scales and values in each format. Differing versions,
paths and devices are mentioned, but don't count.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ..array import QuantizedArray, quantize
from ..definition.numerics import Quantized
from ..errors import BadFile
from ..files import untrusted
from ..files.contents import Contents
from ..files.modelfile import Model
from .measure import measure

T = TypeVar("T")

PARTS, OF_PRODUCTS = ("codes", "scales", "values"), ("operands", "products")
"""The parts that a report hashes, for each tensor and format, and with --products."""

_MOST = 2**30
"""Maximum bytes of a report; a thousand tensors in all formats need less than a tenth."""


@dataclass
class Comparison:
    """The result of comparing two reports.

    Attributes:
        compared: per format, the number of tensors that both reports have.
        differences: one line per tensor, or tensor and format, that differs or is in one report only, and per report whose own
            backends differed.
        differing: per format, the number of tensors whose casts differ.
        products: per format, the numbers of tensors whose products both reports have, and whose products differ.
        unlike_sums: tensors and formats whose products both reports have, but by different summations.
        remarks: other differences, such as versions, one sentence each.
    """

    compared: dict[str, int] = field(default_factory=dict)
    differences: list[str] = field(default_factory=list)
    differing: dict[str, int] = field(default_factory=dict)
    products: dict[str, tuple[int, int]] = field(default_factory=dict)
    unlike_sums: int = 0
    remarks: list[str] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        """Whether both have the same tensors in the same formats, with equal bits, also among each report's backends."""
        return not self.differences


def read_report(path: Path) -> dict[str, Any]:
    """Reads a report written by `blockfp check --report`; raises BadFile if it isn't one."""
    try:
        report = untrusted.read_json(path, _MOST)
    except OSError as error:
        raise BadFile(path, error.strerror or error) from error
    except ValueError as error:
        raise BadFile(path, f"is not JSON: {error}") from error
    try:
        _tensors(report)
        _facts(report)
    except Exception as error:
        raise BadFile(path, f"is not a report of blockfp check --report: {type(error).__name__} at {error}") from error
    return report


def compare(a: Mapping[str, Any], b: Mapping[str, Any]) -> Comparison:
    """Compares two reports from `read_report`."""
    found = Comparison()
    facts = [_facts(report) for report in (a, b)]
    for name in dict.fromkeys([*facts[0], *facts[1]]):
        values = [fact.get(name, "not there") for fact in facts]
        if values[0] != values[1]:
            found.remarks.append(f"A and B differ in {name}: {values[0]} and {values[1]}")
    found.differences += [
        f"bits differed among the backends of {which}; the first one's are compared"
        for which, r in zip("AB", (a, b), strict=True)
        if not r["identical"]
    ]
    tensors = [_tensors(report) for report in (a, b)]
    unlike_sums: dict[tuple[str | None, str | None], int] = {}
    for name in dict.fromkeys([*tensors[0], *tensors[1]]):
        _compare_tensor(found, name, tensors[0].get(name), tensors[1].get(name), unlike_sums)
    for (one, other), number in unlike_sums.items():
        said = f"{one or 'none'} and {other or 'none'}"
        found.remarks.append(f"A and B differ in products: {said}; {number} not compared, counted per format")
        found.unlike_sums += number if one and other else 0
    return found


def _facts(report: Mapping[str, Any]) -> dict[str, str]:
    facts = [*report["versions"].items(), *((f"backend {name}", version) for name, version in report["backends"].items())]
    return {name: _is_a(str, version) for name, version in facts}


def _tensors(report: Mapping[str, Any]) -> dict[str, tuple[dict[str, Any], dict[str, dict[str, str]]]]:
    """Returns each tensor's identity and its hashes by format. Paths don't count, because they differ between machines."""
    files = {file["path"]: file for file in report["files"]}
    tensors = {}
    for number, file in enumerate(files.values(), 1):
        for tensor in file["tensors"]:
            name = _is_a(str, tensor["name"]) if len(files) == 1 else f"file {number}, {tensor['name']}"
            shape = [_is_a(int, size) for size in _is_a(list, tensor["shape"])]
            identity = {"dtype": _is_a(str, tensor["dtype"]), "shape": shape, "bytes": _is_a(str, tensor["sha256"])}
            formats = {}
            for check in tensor["checks"]:
                hashes = {part: _is_a(str, check[f"{part}_sha256"]) for part in PARTS} | _products(check)
                if formats.setdefault(_is_a(str, check["format"]), hashes) is not hashes:
                    raise ValueError(f"{check['format']!r} of {name!r}, which is duplicated")
            if tensors.setdefault(name, (identity, formats))[1] is not formats:
                raise ValueError(f"{name!r}, which is duplicated")
    _is_a(bool, report["identical"])
    return tensors


def _products(check: Mapping[str, Any]) -> dict[str, str]:
    """Returns the summation and the hashes of products, if there are any."""
    if "products" not in check:
        return {}
    products = _is_a(dict, check["products"])
    if products["summation"] is None:
        return {}
    hashes = {part: _is_a(str, products[f"{part}_sha256"]) for part in OF_PRODUCTS}
    return {"summation": _is_a(str, products["summation"]), **hashes}


def _is_a(kind: type[T], value: Any) -> T:
    if type(value) is not kind:
        raise TypeError(f"{value!r}, which must be a {kind.__name__}")
    return value


def _compare_tensor(
    found: Comparison, name: str, a: Any, b: Any, unlike_sums: dict[tuple[str | None, str | None], int]
) -> None:
    """Compares a tensor of both reports; counts in `unlike_sums` the products that only one has, or in another summation."""
    if a is None or b is None:
        found.differences.append(f"{name}: only in {'A' if b is None else 'B'}")
        return
    unlike = [part for part in a[0] if a[0][part] != b[0][part]]
    if unlike:
        what = (
            "other values" if unlike == ["bytes"] else " and ".join(f"{a[0][p]} and {b[0][p]}" for p in unlike if p != "bytes")
        )
        found.differences.append(f"{name}: not the same tensor: {what}")
        return
    for format in dict.fromkeys([*a[1], *b[1]]):
        hashes = [each[1].get(format) for each in (a, b)]
        if None in hashes:
            found.differences.append(f"{name}, {format}: only in {'A' if hashes[1] is None else 'B'}")
            continue
        found.compared[format] = found.compared.get(format, 0) + 1
        parts = [part for part in PARTS if hashes[0][part] != hashes[1][part]]
        found.differing[format] = found.differing.get(format, 0) + bool(parts)
        sums = hashes[0].get("summation"), hashes[1].get("summation")
        if sums[0] != sums[1]:
            unlike_sums[sums] = unlike_sums.get(sums, 0) + 1
        elif sums[0] is not None:
            wrong = [part for part in OF_PRODUCTS if hashes[0][part] != hashes[1][part]]
            counts = found.products.get(format, (0, 0))
            found.products[format] = counts[0] + 1, counts[1] + bool(wrong)
            parts += wrong
        if parts:
            said = ", ".join(f"{part} {hashes[0][part][:12]}.. and {hashes[1][part][:12]}.." for part in parts)
            found.differences.append(f"{name}, {format}: SHA-256 of {said}")


# ---- a model and its source


class Held(NamedTuple):
    """The comparison of a quantized model's tensor with its source.

    Attributes:
        name: name of the tensor in both files.
        format: format of the codes; None for an unquantized tensor.
        equal: whether codes and scales equal blockfp's quantization of the source, or values equal the source's.
        sqnr_db: signal-to-quantization-noise ratio of the codes' values; None for an unquantized tensor.
    """

    name: str
    format: str | None
    equal: bool
    sqnr_db: float | None = None


def against_source(model: Contents, source: Model) -> Iterator[Held]:
    """Yields the comparison of each tensor of a quantized model with its source.

    Raises BadFile if a tensor is missing on either side or has another shape.
    """
    there = {tensor.name: tensor for tensor in source.tensors}
    own = {**model.weights, **model.others}
    for name in [*own, *there]:
        if name not in own or name not in there:
            raise BadFile(model.path if name in there else source.path, "has no such tensor, and the other file has one", name)
        if own[name].shape != there[name].shape:
            raise BadFile(model.path, f"has shape {own[name].shape}, and {there[name].shape} in {source.path}", name)
        if name in model.weights and there[name].skipped:
            raise BadFile(source.path, f"is {there[name].dtype}, and a source is in high precision", name)
    for name, weight in model.weights.items():
        x, q = there[name].read(), weight.read()
        parts = Quantized(q.codes, q.scales, q.tensor_scale)
        sqnr = measure(x, parts, np.asarray(q.dequantize(np.float32)), q.format).sqnr_db
        yield Held(name, q.format.name, _same(q, quantize(x, q.format)), sqnr)
    for name, tensor in model.others.items():
        equal = tensor.dtype == there[name].dtype and tensor.read().tobytes() == there[name].read().tobytes()
        yield Held(name, None, equal)


def _same(a: QuantizedArray, b: QuantizedArray) -> bool:
    parts = zip((a.codes, a.scales, a.tensor_scale), (b.codes, b.scales, b.tensor_scale), strict=True)
    return all(x is y is None or np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in parts)
