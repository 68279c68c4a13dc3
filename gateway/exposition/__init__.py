"""Metrics pages of several servers become one valid page: merged by family, as text. Pure.

Pages one after the other are no exposition: a family may have one HELP and one TYPE, and its samples
stand together. Parsing and printing them anew would rename counters, so names, values and times stay as
they are, and a `replica` label is added.

Pages are read in Prometheus' text format 0.0.4, which is all that Triton speaks, and strictly: one bad
line makes Prometheus refuse the whole of a merged page, so it has to cost its own page here.
"""
