"""Findings of `blockfp check`: summaries by format, JSON and tables."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ..files.modelfile import Tensor
from ..formats import Format
from ..notebook import columns
from .comparison import Comparison
from .crosscheck import Backend, Check, Difference, ProductDifference, Products
from .measure import Statistics


@dataclass
class Summary:
    """All tensors in one format: how many were compared among backends, how many differ, and their statistics.

    `products` and `differing_products` count the same of products; `summation` adds them, or `no_products` says why none does.
    """

    compared: int = 0
    differing: int = 0
    products: int = 0
    differing_products: int = 0
    summation: str | None = None
    no_products: str = ""
    statistics: Statistics = field(default_factory=Statistics)


@dataclass
class Findings:
    """The findings in several files.

    Attributes:
        backends: the compared backends, reference first.
        formats: the formats, in the order of the tables.
        files: per file, the tensors with their checks in the order of `formats`.
        skipped: per file, the tensors that were not checked.
        inputs: SHA-256 of the bytes of each checked tensor, by file and name.
        with_products: whether products were asked for.
    """

    backends: Sequence[Backend]
    formats: Sequence[Format]
    files: dict[Path, list[tuple[Tensor, list[Check]]]] = field(default_factory=dict)
    skipped: dict[Path, list[Tensor]] = field(default_factory=dict)
    inputs: dict[tuple[Path, str], str] = field(default_factory=dict)
    with_products: bool = False

    @property
    def empty(self) -> bool:
        """Whether nothing was checked."""
        return not any(self.files.values())

    @property
    def identical(self) -> bool:
        return all(check.identical for _, _, check in self.checks())

    @property
    def alone(self) -> list[Format]:
        """Formats in which a tensor was compared with nothing, because only the reference supports them."""
        return [format for format in self.formats if any(c.format is format and not c.compared for _, _, c in self.checks())]

    def without(self) -> dict[str, list[Format]]:
        """Returns the formats that each backend doesn't support."""
        found: dict[str, list[Format]] = {}
        for _, _, check in self.checks():
            for name in check.without:
                if check.format not in found.setdefault(name, []):
                    found[name].append(check.format)
        return found

    def products(self) -> list[tuple[Format, Products]]:
        """Returns the products of all tensors that have some, or a reason for none."""
        return [(check.format, check.products) for _, _, check in self.checks() if check.products is not None]

    def no_products(self) -> dict[str, list[Format]]:
        """Returns the formats without products, by reason."""
        found: dict[str, list[Format]] = {}
        for format, one in self.by_format().items():
            if one.no_products:
                found.setdefault(one.no_products, []).append(format)
        return found

    def checks(self) -> Iterable[tuple[Path, Tensor, Check]]:
        """Yields every check."""
        for path, tensors in self.files.items():
            for tensor, checks in tensors:
                for check in checks:
                    yield path, tensor, check

    def by_format(self) -> dict[Format, Summary]:
        """Returns the summary of all tensors per format."""
        summary = {format: Summary() for format in self.formats}
        for _, _, check in self.checks():
            one = summary[check.format]
            one.compared += bool(check.compared)
            one.differing += bool(check.differences)
            one.statistics.add(check.statistics)
            if check.products is not None:
                one.products += bool(check.products.compared)
                one.differing_products += bool(check.products.differences)
                one.summation = one.summation or check.products.summation
                one.no_products = "" if one.summation else check.products.reason
        return summary

    def differences(self) -> list[tuple[Path, Tensor, Format, Difference | ProductDifference]]:
        """Returns every difference with its file, tensor and format; those of casts come before those of products."""
        return [
            (path, tensor, check.format, d)
            for path, tensor, check in self.checks()
            for d in (*check.differences, *(check.products.differences if check.products else ()))
        ]


def to_json(findings: Findings, versions: Mapping[str, str]) -> dict[str, object]:
    """Returns the report as plain values. SQNR is null if nothing was lost, or if all is zero."""
    files = []
    for path, tensors in findings.files.items():
        checked = [
            {
                **_identity(tensor),
                "sha256": findings.inputs[path, tensor.name],
                "checks": [
                    {
                        "format": check.format.name,
                        "identical": check.identical,
                        "differences": [asdict(d) for d in check.differences],
                        "compared": list(check.compared),
                        "without": check.without,
                        **_numbers(check.statistics),
                        "codes_sha256": check.codes_sha256,
                        "scales_sha256": check.scales_sha256,
                        "values_sha256": check.values_sha256,
                        **({} if check.products is None else {"products": _products(check.products)}),
                    }
                    for check in checks
                ],
            }
            for tensor, checks in tensors
        ]
        skipped = [{**_identity(tensor), "reason": tensor.unchecked} for tensor in findings.skipped[path]]
        files.append({"path": str(path), "tensors": checked, "skipped": skipped})
    summary = [
        {
            "format": format.name,
            "identical": one.differing + one.differing_products == 0,
            "compared_tensors": one.compared,
            "differing_tensors": one.differing,
            **_numbers(one.statistics),
        }
        for format, one in findings.by_format().items()
    ]
    return {
        "versions": dict(versions),
        "backends": {backend.name: backend.version for backend in findings.backends},
        "identical": findings.identical,
        "formats": summary,
        "files": files,
    }


def _products(products: Products) -> dict[str, object]:
    return {**asdict(products), "identical": not products.differences}


def _identity(tensor: Tensor) -> dict[str, object]:
    return {"name": tensor.name, "dtype": tensor.dtype.name, "shape": list(tensor.shape)}


def _numbers(statistics: Statistics) -> dict[str, object]:
    return {
        "sqnr_db": statistics.sqnr_db if math.isfinite(statistics.sqnr_db) else None,
        "largest_relative_error": statistics.largest_relative_error,
        "saturated_share": statistics.saturated_share,
        "flushed_share": statistics.flushed_share,
        "elements": statistics.elements,
        "excluded": statistics.excluded,
        "bytes": statistics.stored_bytes,
        "original_bytes": statistics.original_bytes,
        "scale_exponents": {str(e): n for e, n in sorted(statistics.exponents.items())},
    }


def format_table(findings: Findings) -> list[str]:
    """Returns a header and one line per format, for all tensors together."""
    shown = findings.with_products
    rows: list[tuple[str, ...]] = [("format", "equal", *_product_cells(shown, "products"), *_TITLES)]
    for format, one in findings.by_format().items():
        products = _product_cells(shown, product_verdict(one))
        rows.append((format.name, _verdict(one.compared, one.differing), *products, *_cells(one.statistics)))
    return columns(rows, left=2 + shown)


def tensor_table(findings: Findings) -> list[str]:
    """Returns a header and one line per tensor and format."""
    shown = findings.with_products
    rows: list[tuple[str, ...]] = [("tensor", "format", "equal", *_product_cells(shown, "products"), *_TITLES)]
    for _, tensor, check in findings.checks():
        verdict, of_products = _verdict(len(check.compared), len(check.differences)), check.products
        counts = (len(of_products.compared), len(of_products.differences)) if of_products else (0, 0)
        products = _product_cells(shown, _verdict(*counts))
        rows.append((tensor.name, check.format.name, verdict, *products, *_cells(check.statistics)))
    return columns(rows, left=3 + shown)


def comparison_table(comparison: Comparison) -> list[str]:
    """Returns a header and one line per format of two reports."""
    shown = bool(comparison.products)
    rows: list[tuple[str, ...]] = [("format", "equal", *_product_cells(shown, "products"), "tensors")]
    for format, tensors in comparison.compared.items():
        products = _product_cells(shown, _verdict(*comparison.products.get(format, (0, 0))))
        rows.append((format, _verdict(tensors, comparison.differing[format]), *products, str(tensors)))
    return columns(rows, left=2 + shown)


_TITLES = ("SQNR dB", "max rel.", "saturated", "to zero", "bytes")


def _verdict(compared: int, differing: int) -> str:
    """What was compared with nothing is neither equal nor different."""
    return f"NO ({differing})" if differing else "yes" if compared else "-"


def product_verdict(one: Summary) -> str:
    """Returns the cell of a format in the column of products."""
    return _verdict(one.products, one.differing_products)


def _product_cells(shown: bool, cell: str) -> tuple[str, ...]:
    return (cell,) if shown else ()


def _cells(statistics: Statistics) -> tuple[str, ...]:
    sqnr = statistics.sqnr_db
    return (
        f"{sqnr:.2f}" if math.isfinite(sqnr) else ("exact" if sqnr > 0 else "-"),
        f"{statistics.largest_relative_error:.3g}",
        _percent(statistics.saturated_share),
        _percent(statistics.flushed_share),
        f"{statistics.stored_bytes / max(statistics.original_bytes, 1):.1%}",
    )


def _percent(share: float) -> str:
    return "0" if share == 0 else f"{share:.3%}" if share >= 1e-5 else "<0.001%"
