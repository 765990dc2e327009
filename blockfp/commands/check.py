"""`blockfp check`: runs every tensor through every backend, or compares a quantized model with its source, or two reports."""

from __future__ import annotations

import hashlib
import itertools
import json
import platform
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.markup import escape

from .. import __version__
from ..check import backends, pieces
from ..check.backends import BACKENDS
from ..check.comparison import Comparison, against_source, read_report
from ..check.comparison import compare as compare_reports
from ..check.crosscheck import Backend, Check, check
from ..check.products import DEFAULT, LENGTH, LINES, check_products, chosen, lacks, named
from ..check.report import Findings, comparison_table, format_table, tensor_table, to_json
from ..definition.matrix_units import SUMMATIONS, Summation
from ..errors import BadBackend
from ..files import saving, untrusted
from ..files.atomic import replacing
from ..files.modelfile import Model
from ..files.quantized_model import contents_of
from ..formats import FORMATS, NAMES, Format
from .console import MODEL_FILE, Quiet, among, check_output, counted, err, format_of, progress, refused, say


def versions() -> dict[str, str]:
    python = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    libraries = {name: metadata.version(name) for name in ("numpy", "ml_dtypes", "apache-tvm-ffi")}
    return {"blockfp": __version__, "python": python, **libraries}


FormatOption = Annotated[
    list[str], typer.Option("--format", help="Format name, or all; repeatable.", autocompletion=among("all", *NAMES))
]
OWN = "package.module:attribute of your own (see blockfp.check.crosscheck.Backend)"
BackendOption = Annotated[
    list[str] | None,
    typer.Option(
        "--backend",
        help=f"One of {', '.join(BACKENDS)}, or all, or {OWN}; repeatable. Default: all available except the slow "
        f"{' and '.join(backends.WHERE_NAMED)}.",
        autocompletion=among("all", *BACKENDS),
    ),
]
SummationOption = Annotated[
    str | None,
    typer.Option(
        "--summation",
        metavar="NAME",
        help=f"How --products adds: {', '.join(SUMMATIONS)}. Default: {DEFAULT}, that of blockfp's own kernel.",
        autocompletion=among(*SUMMATIONS),
    ),
]
CompareOption = Annotated[
    tuple[Path, Path] | None,
    typer.Option("--compare", metavar="A.json B.json", help="Instead, compare two reports, of two machines or releases."),
]


def check_command(
    files: Annotated[
        list[Path] | None, typer.Argument(metavar="FILE...", help=f"{MODEL_FILE}; repeatable.", show_default=False)
    ] = None,
    format: FormatOption = ["all"],  # noqa: B006
    backend: BackendOption = None,
    compare: CompareOption = None,
    products: Annotated[
        bool, typer.Option("--products", help="Also compare products: forward, dgrad and wgrad, sampled, with defined bits.")
    ] = False,
    summation: SummationOption = None,
    source: Annotated[
        Path | None, typer.Option("--source", help="Instead, compare FILE, a quantized model in any layout, with this one.")
    ] = None,
    report: Annotated[Path | None, typer.Option(help="Write all results to this .json file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Plot errors and scales into this .png file.")] = None,
    per_tensor: Annotated[bool, typer.Option("--per-tensor", help="Print a table row per tensor and format.")] = False,
    threads: Annotated[
        int | None, typer.Option("--threads", min=1, help="Formats checked at once. Default: the CPUs that it may use.")
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Quantizes every tensor with every backend and compares codes, scales and values bit by bit.

    With --products it also casts random activations and gradients, and compares the products of a layer with these weights.
    With --source it compares a quantized model with the model it was made from: the noise of its values, and whether blockfp
    makes the same bits. With --compare it compares two reports (--report) of the same tensors by SHA-256.

    Exits with 0 if all bits are equal; 1 on any difference; 2 on bad input, or if nothing is compared because no tensor can be
    quantized or only one backend has a format; 3 if a backend fails.
    """
    if compare:
        given = {"FILE": files, "--backend": backend, "--report": report, "--plot": plot, "--per-tensor": per_tensor}
        given |= {"--format": format != ["all"], "--source": source, "--products": products, "--summation": summation}
        if any(given.values()):
            raise refused(f"--compare compares two reports; remove {' and '.join(n for n, v in given.items() if v)}")
        raise typer.Exit(_print_comparison(compare_reports(*map(read_report, compare))))
    if not files:
        raise refused("FILE: name a .safetensors, .npy or .npz file, a folder with a model, or two reports with --compare")
    if source:
        given = {"more than one FILE": files[1:], "--backend": backend, "--report": report, "--plot": plot}
        given |= {"--format": format != ["all"], "--products": products, "--summation": summation}
        if any(given.values()):
            raise refused(f"--source compares one FILE with it; remove {' and '.join(n for n, v in given.items() if v)}")
        raise typer.Exit(_print_source(files[0], source))
    formats = list(FORMATS) if "all" in format else list(dict.fromkeys(map(format_of, format)))
    for path, suffix, option in ((report, ".json", "--report"), (plot, ".png", "--plot")):
        if path:
            check_output(path, suffix, option)
    if summation and not products:
        raise refused("--summation says how --products adds; add --products")
    loaded = backends.load(backend)
    sums = _summation(summation, formats, loaded, backend) if products else None
    models = {path: saving.open_whole(path) for path in files}
    findings = Findings(loaded, formats, with_products=products)
    _run_checks(models, findings, threads or pieces.usable_cpus(), sums)

    for line in tensor_table(findings) if per_tensor else format_table(findings):
        say(line, "red" if " NO (" in line else "")
    _print_skipped(findings, None if per_tensor else 8)
    _print_verdict(findings)
    if report:
        with replacing(report) as temporary:
            temporary.write_text(json.dumps(to_json(findings, versions()), indent=1, allow_nan=False) + "\n")
        say(f"report: {report}")
    if plot:
        from ..check.plot import draw

        with replacing(plot) as temporary:
            draw(findings, temporary)
        say(f"plot: {plot}")
    nothing = findings.alone or (products and not any(one.products for one in findings.by_format().values()))
    raise typer.Exit(2 if findings.empty else 1 if not findings.identical else 2 if nothing else 0)


def _summation(name: str | None, formats: list[Format], loaded: Sequence[Backend], asked: list[str] | None) -> Summation:
    """Returns the summation of products; refuses one that no format has, or that a named backend doesn't run."""
    if name is None:
        return SUMMATIONS[DEFAULT]
    try:
        summation = named(name, formats)
    except ValueError as error:
        raise refused(f"--summation {name}: {error}") from error
    lacking = [why for one in loaded if (why := lacks(one, summation))]
    if lacking and asked and "all" not in asked:
        raise refused(f"--summation {name}: {'; '.join(lacking)}; numpy has all")
    return summation


@contextmanager
def _pool(threads: int) -> Iterator[ThreadPoolExecutor]:
    """Yields a thread pool; an exception cancels work that hasn't begun."""
    pool = ThreadPoolExecutor(threads)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def _run_checks(models: dict[Path, Model], findings: Findings, threads: int, summation: Summation | None) -> None:
    """Fills findings, with products of some tensors if there is a summation."""
    tensors = sum(not tensor.unchecked for model in models.values() for tensor in model.tensors)
    total, multiplied = tensors * len(findings.formats), frozenset() if summation is None else chosen(tensors)
    numbers = itertools.count()
    # NumPy, XLA and the kernels release Python's lock, so formats of a tensor run in parallel.
    work = pieces.InFlight()

    def run(x: np.ndarray, format: Format, number: int) -> Check:
        with work.room(pieces.bytes_of(x, format)):
            found = check(x, format, findings.backends)
            if number not in multiplied:
                return found
            return replace(found, products=check_products(x, format, findings.backends, summation))

    with progress() as bar, _pool(threads) as pool:
        task = bar.add_task("", total=total)
        for path, model in models.items():
            findings.files[path] = []
            findings.skipped[path] = [tensor for tensor in model.tensors if tensor.unchecked]
            for tensor in model.tensors:
                if tensor.unchecked:
                    continue
                bar.update(task, description=escape(untrusted.printable(tensor.name)))
                x = tensor.read()
                findings.inputs[path, tensor.name] = hashlib.sha256(x.tobytes()).hexdigest()
                number = next(numbers)
                running = [pool.submit(run, x, format, number) for format in findings.formats]
                checks = []
                for future in running:
                    try:
                        checks.append(future.result())
                    except BadBackend as error:
                        if error.__cause__ is None:
                            raise  # not a backend
                        raise _failed(path, tensor.name, error) from error
                    bar.advance(task)
                findings.files[path].append((tensor, checks))


def _failed(path: Path, tensor: str, error: BadBackend) -> typer.Exit:
    """Prints a backend's failure with its traceback; returns the exit to raise."""
    say("".join(traceback.format_exception(error.__cause__)).rstrip(), console=err)
    say(f"error: {path}, tensor {tensor!r}: {error}", "red", err)
    return typer.Exit(3)


def _print_skipped(findings: Findings, shown: int | None) -> None:
    for path, tensors in findings.skipped.items():
        reasons: dict[str, list[str]] = {}
        for tensor in tensors:
            reasons.setdefault(tensor.unchecked or "", []).append(tensor.name)
        for reason, names in reasons.items():
            more = f" and {len(names[shown:])} more (--per-tensor lists them)" if shown and names[shown:] else ""
            say(f"skipped in {path.name or path}, {reason}: {', '.join(names[:shown])}{more}")


def _print_verdict(findings: Findings, shown: int = 20) -> None:
    differences = findings.differences()
    for path, tensor, format, difference in differences[:shown]:
        say(f"{path}, {tensor.name}, {format}: {difference}", "red")
    if len(differences) > shown:
        say(f"and {len(differences) - shown} more", "red")
    tensors = sum(len(tensors) for tensors in findings.files.values())
    for name, formats in findings.without().items():
        say(f"{name} has no {', '.join(map(str, formats))}: skipped for these")
    if findings.with_products:
        _print_products(findings)
    names = ", ".join(backend.name for backend in findings.backends)
    what = f"{counted(tensors, 'tensor')} in {counted(len(findings.formats), 'format')} through {names}"
    if findings.empty:
        wanted = "tensors must be float32, float16 or bfloat16, with elements and two or more axes"
        say(f"{what}: nothing to check; {wanted}; --source checks quantized models", "red")
    elif differences:
        say(f"{what}: bits differ", "red")
    elif len(findings.backends) == 1:
        say(f"{what}: only one backend, nothing to compare", "red")
    elif findings.alone:
        say(f"{what}: only one backend has {', '.join(map(str, findings.alone))}, nothing to compare", "red")
    else:
        say(f"{what}: all bits equal", "green")


def _print_products(findings: Findings) -> None:
    """Prints what products there are: how many sums were looked at, which formats and backends have none, and the verdict."""
    for reason, formats in findings.no_products().items():
        say(f"no products of {', '.join(map(str, formats))}: {reason}")
    found = [one for _, one in findings.products() if one.summation is not None]
    for why in dict.fromkeys(why for one in found for why in one.without.values()):
        say(f"{why}: skipped for products")
    tensors = len({(path, tensor.name) for path, tensor, check in findings.checks() if check.products is not None})
    everything = sum(map(len, findings.files.values()))
    some = (
        f"{tensors} of {counted(everything, 'tensor')} (forward, dgrad, wgrad; at most {LINES} x {LINES} sums of {LENGTH} each)"
    )
    if not found:
        say(f"products of {some}: none", "red")
        return
    compared, differ = sum(bool(one.compared) for one in found), any(one.differences for one in found)
    verdict = "bits differ" if differ else "all bits equal" if compared else "nothing to compare"
    what = f"products by {found[0].summation} of {some}: {sum(one.sums for one in found)} sums"
    say(f"{what}, {verdict}", "green" if verdict == "all bits equal" else "red")


def _print_comparison(comparison: Comparison, shown: int = 20) -> int:
    """Prints the differences of two reports and returns the exit code."""
    for remark in comparison.remarks:
        say(remark)
    for line in comparison_table(comparison):
        say(line, "red" if " NO (" in line else "")
    for difference in comparison.differences[:shown]:
        say(difference, "red")
    if len(comparison.differences) > shown:
        say(f"and {len(comparison.differences) - shown} more", "red")
    tensors, formats = sum(comparison.compared.values()), len(comparison.compared)
    what = f"{counted(tensors, 'tensor')} in {counted(formats, 'format')}, counted per format"
    if not comparison.compared:
        say("the reports have no tensor in common in any format", "red")
        return 2
    if not comparison.equal:
        say(f"{what}: not all bits are equal", "red")
        return 1
    if comparison.unlike_sums and not comparison.products:
        say(f"{what}: all casts equal, no products compared", "red")
        return 2
    say(f"{what}: all bits equal", "green")
    return 0


def _print_source(path: Path, source: Path) -> int:
    """Prints the comparison of a quantized model with its source and returns the exit code."""
    model = contents_of(saving.open_whole(path))
    if not model.weights:
        raise refused(f"FILE {path}: has no quantized weights")
    differing = 0
    for name, format, equal, sqnr in against_source(model, saving.open_whole(source)):
        differing += not equal
        if format is not None:
            made = "the bits that blockfp makes" if equal else "NO (blockfp makes other bits)"
            say(f"{name}: {format}, SQNR {sqnr:.1f} dB, {made}", "" if equal else "red")
        elif not equal:
            say(f"{name}: NO (differs from the source)", "red")
    weights, others = counted(len(model.weights), "quantized weight"), counted(len(model.others), "other tensor")
    what = f"{weights} and {others} against {source}"
    say(f"{what}: {'all bits equal' if not differing else f'{differing} differ'}", "red" if differing else "green")
    return 1 if differing else 0
