"""The formats that slow tests take: without variants of 4-over-6 whose arithmetic `executors.EveryInput` covers."""

from blockfp.formats import FORMATS as ALL

OTHER_CHOICES = tuple(f for f in ALL if f.scale.four_over_six and f.scale.name != "e4m3_4over6")
FORMATS = tuple(f for f in ALL if f not in OTHER_CHOICES)
