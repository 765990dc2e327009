"""benchmarks/weight_sync_gpu.py with two small layers, on two processes of this CPU."""

import argparse
import sys
from pathlib import Path

import gloo
import torch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def _rows(rank):
    sys.path.append(str(BENCHMARKS))
    # What `gloo` calls this file; the benchmarks have one of that name.
    sys.modules.pop("ranks", None)
    import weight_sync_gpu

    for recipe, layout in (("fp8_block", "fine-grained-fp8"), ("nvfp4", "modelopt")):
        options = argparse.Namespace(recipe=recipe, layout=layout, layers=2, width=160, bucket_mib=1, repeats=1)
        for contender in ("codes", "codes, sums", "requantized"):
            row = weight_sync_gpu.measure(contender, options, torch.device("cpu"))
            assert row["contender"] == contender
            assert row.get("differing", 0) == 0
            assert ("differing" in row) is (contender != "requantized")
            assert row["sent_MB"] > 0


def test_every_contender_runs():
    gloo.run(2, __file__, "_rows")
