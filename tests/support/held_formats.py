"""The formats that tests take one after another.

4-over-6 by another bound or another error differs from `nvfp4_4over6` in a number and a product. So every executor holds these
on a few arrays (`executors.EveryInput`), and a test that takes long leaves them out.
"""

from blockfp.formats import FORMATS as ALL

OTHER_CHOICES = tuple(f for f in ALL if f.scale.four_over_six and f.scale.name != "e4m3_4over6")
FORMATS = tuple(f for f in ALL if f not in OTHER_CHOICES)
